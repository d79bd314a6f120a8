"""Accuracy of every workload, checked before it is timed, and its FLOPs.

Accuracy is the one rule of `heads_kernels.testing` for the output, lse and every gradient; where a call has many pairs,
those of some heads, batches and rows. FLOPs are those of closed formulas (2 per multiply-add), which
`tests/ops/test_costs.py` holds to `torch.utils.flop_counter`: scores 2 B T S H D (collaborative 2 B T S H Ds), P V
2 B T S H Dv. Those that masks, closed heads and empty mixing chunks leave are `Call.flops`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from benchmarks.candidates import RIVALS, NotRun, attention, further_backends
from benchmarks.settings import Settings, on_threads
from benchmarks.workloads import Workload, flops
from heads_kernels import Mask, testing
from heads_kernels.mask.terms import HeadWindows, Term
from heads_kernels.testing import Inputs

#: Pairs of a query row and a key, summed over batch and heads, whose oracle takes a second on a CPU: it forms
#: them in float64, for every gradient. On a GPU two heads of 8192 tokens, 1 GiB a matrix.
_MOST_PAIRS: Final = {"cpu": 1 << 21, "cuda": 1 << 27}
#: The oracle takes many small steps; where a core is busy, each thread would wait for the other.
_ORACLE_THREADS: Final = 1


@dataclass(frozen=True)
class Check:
    """What was found.

    worst, ratio  the quantity nearest to its bound, and its error as a part of that bound
    dense         FLOPs of the forward pass for every pair, as FlopCounterMode counts them
    executed      those that have to be done
    model_error   largest difference from the output of the model that the inputs come from
    failures      of ours: the workload is not timed
    wrong         baselines that compute something else, which are left out, and what they are off by
    """

    workload: str
    worst: str
    ratio: float
    dense: int
    executed: int
    model_error: float | None
    failures: tuple[str, ...]
    wrong: dict[str, str]


def check(workload: Workload, settings: Settings) -> Check:
    """Hold a workload to the accuracy rule, and to its baselines' results."""
    calls = workload.make(settings.dtype, settings.place)
    failures: list[str] = []
    wrong: dict[str, str] = {}
    worst, ratio, model_error = "", 0.0, None
    for number, inputs in enumerate(calls):
        some, where = (inputs, None) if workload.expected else _part(inputs)
        with on_threads(_ORACLE_THREADS):
            reference = testing.reference(some)
        for backend in (None, *further_backends(inputs, settings.device)):
            report = testing.compare(reference, backend, workload.name)
            of = f" on {backend}" if backend else ""
            failures += [f"accuracy{of}: {quantity}" for quantity in report.quantities if not quantity.ok]
            nearest = max(report.quantities, key=lambda quantity: quantity.ratio)
            if nearest.ratio >= ratio:
                worst, ratio = nearest.name, nearest.ratio
            if where is not None:
                failures += _whole_failures(inputs, where, reference, backend)
        wrong |= _wrong_baselines(some, reference.oracle["out"], workload, settings)
        if workload.expected and settings.dtype == torch.float32:
            expected = workload.expected[number]
            with torch.no_grad():
                off = (inputs.call() - expected).abs().where(real_rows(inputs), 0.0).max()
            model_error = max(float(off), model_error or 0.0)
            real = expected.where(real_rows(inputs), reference.eager["out"])
            found = reference.judge("out", real)
            if not found.ratio <= 2:  # the model's own float32 output may be as far off as ours
                failures.append(f"accuracy: the model's output: {found}")
    dense = sum(inputs.parsed().flops(dense=True) for inputs in calls)
    executed = flops(calls, "forward")
    return Check(workload.name, worst, ratio, dense, executed, model_error, tuple(failures), wrong)


def _part(inputs: Inputs) -> tuple[Inputs, tuple[slice, ...] | None]:
    """The call itself; or, with more pairs, or numbers in the keys of its heads, than `_MOST_PAIRS`, some heads and
    batches of it, and where these are.

    Heads are the first and the last: where some are closed, an open and a closed one. Grouped ones are kept, all of
    them: another number would be another kernel's work. Of those a causal call has its first rows and keys, where it
    has more than twice as many pairs. Batches are evenly spread, and all of them under a mask.
    """
    p, most = inputs.parsed(), _MOST_PAIRS[inputs.dout.device.type]
    matrix = max(p.T, p.query.shape[-1]) * p.S
    if p.B * p.H * matrix <= most:
        return inputs, None
    grouped = inputs.tensors["value"].shape[1] != p.H
    step = p.H - 1 if p.H > 2 and not grouped else 1
    batches, rows = 1, p.T
    if "attn_mask" not in inputs.options:
        batches = min(p.B, -(-p.B * len(range(0, p.H, step)) * matrix // most))
        while grouped and inputs.options["is_causal"] and p.H * rows**2 > 2 * most:
            rows //= 2
    if step == batches == 1 and rows == p.T:
        return inputs, None
    tensors = dict(inputs.tensors)
    for name, tensor in tensors.items():
        if name in ("mixing", "sinks", "offset_table", "alpha") or (name == "gate" and tensor.dim() == 1):
            tensors[name] = tensor[::step]  # [H, ...]
            continue
        if tensor.shape[0] == p.B:
            tensor = tensor[::batches]
        if name in ("gate", "content_bias") or tensor.dim() == 4:  # [B, H, ...]
            tensor = tensor[:, ::step]
        tensors[name] = tensor if rows == p.T else tensor[:, :, :rows]
    options = {**inputs.options, "scale": p.scale}  # its default may depend on the number of heads
    if isinstance(mask := options.get("attn_mask"), Mask):
        options["attn_mask"] = Mask.of(tuple(_of_heads(term, step) for term in mask.terms))
    where = slice(None, None, batches), slice(None, None, step), slice(rows)
    return replace(inputs, tensors=tensors, options=options, dout=inputs.dout[where]), where


def _of_heads(term: Term, step: int) -> Term:
    """A term of the mask of every `step`-th head."""
    if not isinstance(term, HeadWindows):
        return term
    first_keys = None if term.first_keys is None else term.first_keys[::step]
    return replace(term, sides=term.sides[::step], first_keys=first_keys)


def _whole_failures(
    inputs: Inputs, where: tuple[slice, ...], reference: testing.accuracy.Reference, backend: str | None = None
) -> list[str]:
    """Hold a part of the whole call's output to the rule, as the call of that part alone."""
    with torch.no_grad():
        found = reference.judge("out", inputs.call(backend)[where])
    return [] if found.ok else [f"accuracy: a part of the whole call: {found}"]


def _wrong_baselines(inputs: Inputs, oracle: Tensor, workload: Workload, settings: Settings) -> dict[str, str]:
    """A baseline that computes something else is no baseline.

    Half the digits of the dtype tell: what differs by more than rounding differs in the first ones.
    """
    rows, found = real_rows(inputs), {}
    exact = oracle.where(rows, 0.0)
    limit = torch.finfo(inputs.dout.dtype).eps ** 0.5 * float(exact.abs().max())
    for name in RIVALS[settings.device]:
        try:
            with torch.no_grad():
                out = attention(name, inputs, flex=workload.flex, direction="forward")()
        except (NotRun, RuntimeError):  # it cannot serve the call: where it is timed it says why
            continue
        error = float((out.double().where(rows, 0.0) - exact).abs().max())
        if not error <= limit:
            found[name] = f"off by {error:.1e}, of {limit:.1e}"
    return found


def real_rows(inputs: Inputs) -> Tensor:
    """bool `[B | 1, 1, T, 1]`: query rows that see a key."""
    problem = inputs.parsed()
    visible = problem.intervals.to_dense(problem.T, problem.S, problem.query.device)
    return visible.any(-1, keepdim=True)


def check_long(inputs: Inputs, rows: int = 64) -> list[str]:
    """The rule on evenly spread query rows of an unmasked call that is too long for an oracle.

    Held to it are a call of these rows alone and the same rows of the whole call.
    """
    step = max(1, inputs.dout.shape[2] // rows)
    tensors = {**inputs.tensors, "query": inputs.tensors["query"][:, :, ::step]}
    some = replace(inputs, tensors=tensors, dout=inputs.dout[:, :, ::step])
    with on_threads(_ORACLE_THREADS):
        reference = testing.reference(some)
    report = testing.compare(reference, None, "rows")
    failures = [f"accuracy: {quantity}" for quantity in report.quantities if not quantity.ok]
    where = slice(None), slice(None), slice(None, None, step)
    return failures + _whole_failures(inputs, where, reference)
