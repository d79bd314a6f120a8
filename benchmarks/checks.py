"""Accuracy and FLOPs of every workload, checked before it is timed.

Accuracy is the one rule of `heads_kernels.testing` for the output, lse and every gradient; where a
call has many pairs, those of some heads and batches. FLOPs
are counted by `torch.utils.flop_counter` on our operator and on plain PyTorch, and worked out by
closed formulas (2 per multiply-add): scores 2 B T S H D (collaborative 2 B T S H Ds), P V
2 B T S H Dv; executed: see `Workload`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.baselines import baselines
from benchmarks.problems import Workload
from heads_kernels import testing
from heads_kernels.testing import Inputs

#: Pairs of a query row and a key, summed over batch and heads, whose oracle takes a second: it forms
#: them in float64, for every gradient.
_MOST_PAIRS: Final = 1 << 21


@dataclass(frozen=True)
class Check:
    """What was found; `failures` is empty where all is well.

    worst, ratio  the quantity nearest to its bound, and its error as a part of that bound
    counted       FLOPs of the forward pass as FlopCounterMode counts them: every pair
    executed      FLOPs of the forward pass that have to be done
    model_error   largest difference from the output of the model that the inputs come from
    """

    workload: str
    table: str
    label: str
    worst: str
    ratio: float
    counted: int
    executed: int
    model_error: float | None
    failures: tuple[str, ...]


def check(workload: Workload, dtype: torch.dtype) -> Check:
    """Hold a workload to the accuracy rule, to its FLOP formulas and to its baselines' results."""
    calls = workload.make(dtype)
    failures: list[str] = []
    worst, ratio, model_error = "", 0.0, None
    for number, inputs in enumerate(calls):
        some, where = (inputs, None) if workload.expected else _part(inputs)
        with _one_thread():
            reference = testing.reference(some)
        report = testing.compare(reference, None, workload.name)
        failures += [f"accuracy: {quantity}" for quantity in report.quantities if not quantity.ok]
        nearest = max(report.quantities, key=lambda quantity: quantity.ratio)
        if nearest.ratio >= ratio:
            worst, ratio = nearest.name, nearest.ratio
        bound = next(q.max_bound for q in report.quantities if q.name == "out")
        if where is not None:
            failures += _whole_failures(inputs, where, reference.oracle["out"], bound)
        failures += _baseline_failures(some, reference.oracle["out"])
        if workload.expected and dtype == torch.float32:
            error = _model_error(inputs, workload.expected[number])
            model_error = max(error, model_error or 0.0)
            if not error <= 2 * bound:  # the model's own float32 output may be as far off as ours
                failures.append(
                    f"accuracy: {error:.1e} from the model's output, of {2 * bound:.1e}"
                )
    counted, executed, flop_failures = _check_flops(workload, calls)
    failures += flop_failures
    return Check(
        workload.name, workload.table, workload.label, worst, ratio, counted, executed, model_error,
        tuple(failures),
    )  # fmt: skip


def _part(inputs: Inputs) -> tuple[Inputs, tuple[slice, slice] | None]:
    """The call itself; or, with more than `_MOST_PAIRS`, some heads and batches of it, and where its output has them.

    Heads are the first and the last: where some are closed, an open and a closed one. Grouped ones are kept, all of
    them: another number would be another kernel's work. Batches are evenly spread, and all of them under a mask.
    """
    problem = inputs.problem()
    B, H = problem.B, problem.H
    pairs = problem.B * problem.H * problem.T * problem.S
    step = H - 1 if H > 2 and inputs.tensors["value"].shape[1] == H else 1
    if pairs <= _MOST_PAIRS or (step == 1 and "attn_mask" in inputs.options):
        return inputs, None
    batches = 1
    if "attn_mask" not in inputs.options:
        kept = pairs // H * len(range(0, H, step))
        batches = min(B, -(-kept // _MOST_PAIRS))
    if step == batches == 1:
        return inputs, None
    tensors = dict(inputs.tensors)
    for name, tensor in tensors.items():
        if name in ("mixing", "sinks", "offset_table", "alpha") or (
            name == "gate" and tensor.dim() == 1
        ):
            tensors[name] = tensor[::step]  # [H, ...]
            continue
        if tensor.shape[0] == B:
            tensor = tensor[::batches]
        if name in ("gate", "content_bias") or tensor.dim() == 4:  # [B, H, ...]
            tensor = tensor[:, ::step]
        tensors[name] = tensor
    where = slice(None, None, batches), slice(None, None, step)
    return replace(inputs, tensors=tensors, dout=inputs.dout[where]), where


def _whole_failures(
    inputs: Inputs, where: tuple[slice, ...], oracle: Tensor, bound: float
) -> list[str]:
    """Hold a part of the whole call's output to the bound that the call of that part alone has."""
    with torch.no_grad():
        part = inputs.call()[where]
    error = float((part.double() - oracle).abs().max())
    if error <= bound:
        return []
    return [f"accuracy: a part of the whole call is off by {error:.1e}, of {bound:.1e}"]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The oracle takes many small steps; where a core is busy, each would wait for the other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def count(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    total: int = counter.get_total_flops()
    return total


def _check_flops(workload: Workload, calls: tuple[Inputs, ...]) -> tuple[int, int, list[str]]:
    """Counted and executed FLOPs of the forward pass, and what does not agree."""
    wrong: list[str] = []

    def agree(what: str, got: int, expected: int) -> None:
        if got != expected:
            wrong.append(f"FLOPs: {what} is {got}, not {expected}")

    counted = executed = executed_backward = 0
    for inputs in calls:
        leaves = inputs.requires_grad()
        problem = leaves.problem()
        executed += problem.flops()
        executed_backward += problem.flops(backward=True)
        pairs, D, Dv = problem.B * problem.H * problem.T * problem.S, problem.D, problem.Dv
        forward, again = 2 * pairs * (D + Dv), 2 * pairs * D  # again: flash forms the scores twice
        ours, ours_backward = _count_both(leaves, leaves.call)
        eager, eager_backward = _count_both(leaves, baselines(leaves)["eager"])
        agree("forward count of our operator", ours, forward)
        agree("forward count of eager PyTorch", eager, forward)
        agree("backward count of eager PyTorch", eager_backward, 2 * forward)
        agree("backward count of our operator", ours_backward, eager_backward + again)
        agree("Problem.flops(dense=True)", problem.flops(dense=True), ours)
        agree("Problem.flops(backward=True, dense=True)",
            problem.flops(backward=True, dense=True), ours_backward)  # fmt: skip
        counted += ours
    agree("Problem.flops()", executed, workload.flops("forward"))
    agree("Problem.flops(backward=True)", executed_backward, workload.flops("backward"))
    return counted, executed, wrong


def _count_both(inputs: Inputs, call: Callable[[], Tensor]) -> tuple[int, int]:
    """FLOPs of the forward pass, and of the backward pass alone."""
    held: list[Tensor] = []
    forward = count(lambda: held.append(call()))
    leaves = list(inputs.tensors.values())
    return forward, count(lambda: torch.autograd.grad(held[0], leaves, inputs.dout))


def _baseline_failures(inputs: Inputs, oracle: Tensor) -> list[str]:
    """A baseline that computes something else is no baseline.

    Half the digits of the dtype tell: what differs by more than rounding differs in the first ones.
    """
    rows, failures = real_rows(inputs), []
    exact = oracle.where(rows, 0.0)
    limit = torch.finfo(inputs.dout.dtype).eps ** 0.5 * float(exact.abs().max())
    with torch.no_grad():
        for name, call in baselines(inputs).items():
            error = float((call().double().where(rows, 0.0) - exact).abs().max())
            if not error <= limit:
                failures.append(f"baseline: {name} is off by {error:.1e}, of {limit:.1e}")
    return failures


def _model_error(inputs: Inputs, expected: Tensor) -> float:
    with torch.no_grad():
        difference = (inputs.call() - expected).abs()
    return float(difference.where(real_rows(inputs), 0.0).max())


def real_rows(inputs: Inputs) -> Tensor:
    """bool `[B | 1, 1, T, 1]`: query rows that see a key."""
    problem = inputs.problem()
    visible = problem.intervals.to_dense(problem.T, problem.S, problem.query.device)
    return visible.any(-1, keepdim=True)


def check_long(inputs: Inputs, rows: int = 64) -> list[str]:
    """The rule on evenly spread query rows of an unmasked call that is too long for an oracle.

    Held to it are a call of these rows alone and the same rows of the whole call.
    """
    step = max(1, inputs.dout.shape[2] // rows)
    tensors = {**inputs.tensors, "query": inputs.tensors["query"][:, :, ::step]}
    some = replace(inputs, tensors=tensors, dout=inputs.dout[:, :, ::step])
    with _one_thread():
        reference = testing.reference(some)
    report = testing.compare(reference, None, "rows")
    failures = [f"accuracy: {quantity}" for quantity in report.quantities if not quantity.ok]
    bound = next(q.max_bound for q in report.quantities if q.name == "out")
    where = slice(None), slice(None), slice(None, None, step)
    return failures + _whole_failures(inputs, where, reference.oracle["out"], bound)
