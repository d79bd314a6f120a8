"""Times of every workload, forward and backward apart, all candidates in turn on a cold L2 cache.

Before it is timed a candidate's output and gradients of query, key and value are held against those
of the first baseline that serves the call: a candidate that computes something else is not timed, and
one of ours that does makes the suite fail.

FLOPs are those that are left after masks, closed heads and empty mixing chunks (`Problem.flops`), 2 a
multiply-add: forward two products, backward five (the scores again, dP, dV, dQ, dK).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.checks import real_rows
from benchmarks.gpu.candidates import RIVALS, NotRun, attempt, rival
from benchmarks.gpu.settings import (
    FAILED,
    PASSED,
    Items,
    Refused,
    Row,
    Settings,
    default_backend,
    must_serve,
)
from benchmarks.gpu.workloads import Workload, workloads
from benchmarks.measure import gradients
from benchmarks.problems import Direction
from heads_kernels.testing import Inputs, Timing, time_in_turn

#: Relative root-mean-square difference. Two right bf16 results differ by a few hundredths where one of
#: them rounds its scores; another formula differs in the first digit.
CLOSE: Final = 0.1
#: Matrices `[B, H, T, S]` that eager may hold at once.
_MATRICES: Final = {"forward": 4, "backward": 8}


def items(settings: Settings) -> Items:
    return {w.name: partial(_time, settings, w) for w in workloads(settings.tiny)}


def _time(settings: Settings, workload: Workload) -> Row:
    inputs = workload.make(settings.device)
    row: Row = {**workload.sizes(), "default": default_backend(inputs), "verdict": PASSED}
    problem = inputs.problem()
    wrong: list[str] = []
    for direction in workload.directions:
        times = _direction(settings, workload, inputs, direction)
        backward = direction == "backward"
        row[direction] = {"flops": problem.flops(backward=backward), "times": times}
        wrong += [
            f"{direction} on {name}: {times[name]['error']}"
            for name in settings.backends(inputs.operator)
            if "error" in times[name]
        ]
    row.update(verdict=FAILED if wrong else PASSED, detail="; ".join(wrong))
    return row


def _direction(
    settings: Settings, workload: Workload, inputs: Inputs, direction: Direction
) -> dict[str, dict[str, Any]]:
    """By candidate: median and fastest milliseconds and samples, or why it was not timed."""
    backends = settings.backends(inputs.operator)
    if direction == "forward":  # as in inference: nothing asks for a gradient
        tensors = {name: tensor.detach() for name, tensor in inputs.tensors.items()}
        inputs = replace(inputs, tensors=tensors)
    times: dict[str, dict[str, Any]] = {}
    calls, reference = {}, None
    with torch.set_grad_enabled(direction == "backward"):
        for name in (*RIVALS, *backends):
            try:
                call, result = attempt(
                    partial(_candidate, name, workload, inputs, direction), settings.device
                )
            except NotRun as reason:
                mine = name in backends and not isinstance(reason.__cause__, Refused)
                times[name] = {"error" if mine else "refused": str(reason)}
                continue
            got = _compared(inputs, result)
            del result
            reference = got if reference is None else reference
            difference = _difference(got, reference)
            times[name] = {"difference": difference if isfinite(difference) else None}
            if difference <= CLOSE:
                calls[name] = call
            else:
                times[name]["error" if name in backends else "refused"] = (
                    f"it computes something else: relative difference {difference:.2g}"
                )
        reference = None
        calls.update(_whole(settings, workload, direction, [b for b in backends if b in calls]))
        taken = time_in_turn(
            calls, device=settings.device, cold=True, warmup=1,
            budget_s=0.01 if settings.tiny else 0.3, least=1 if settings.tiny else 7,
            most=60,
        )  # fmt: skip
    for name, timing in taken.items():
        times.setdefault(name, {}).update(_as_row(timing))
    return times


def _candidate(name: str, workload: Workload, inputs: Inputs, direction: Direction) -> Any:
    if name in RIVALS:
        call = rival(name, inputs, workload.flex, _MATRICES[direction])
    else:
        must_serve(inputs, name)
        call = partial(inputs.call, name)
    return call if direction == "forward" else gradients(inputs, call())


def _whole(
    settings: Settings, workload: Workload, direction: Direction, backends: list[str]
) -> dict[str, Any]:
    """Ours with all heads open or dense mixing, beside a workload that skips some of it."""
    inputs = workload.whole(settings.device)
    if inputs is None:
        return {}
    return {
        f"{name} whole": _candidate(name, replace(workload, flex=False), inputs, direction)
        for name in backends
    }


def _compared(inputs: Inputs, result: Any) -> dict[str, Tensor]:
    """What all candidates agree on: out of real rows, or the gradients of query, key and value.

    With `closed_grad=False` gradients of gate and mixing are not what baselines give.
    """
    if isinstance(result, Tensor):
        return {"out": result.detach().where(real_rows(inputs), 0.0)}
    named = dict(zip(inputs.tensors, result, strict=True))
    return {name: named[name] for name in ("query", "key", "value")}


def _difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest root-mean-square difference of them, relative to that of `want`; infinite for NaN."""
    worst = 0.0
    for name, b in want.items():
        difference = (got[name].float() - b.float()).norm() / b.float().norm().clamp(min=1e-30)
        worst = max(worst, float(difference.nan_to_num(float("inf"))))
    return worst


def _as_row(timing: Timing) -> dict[str, Any]:
    return {
        "ms": timing.median * 1e3,
        "fastest_ms": timing.minimum * 1e3,
        "samples": len(timing.samples),
    }
