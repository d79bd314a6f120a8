"""Compiles what `timing` will run, by many workers at once, into the caches on disk.

One worker alone would spend minutes of `timing` on it. One call forward and one backward of each of
our backends and of FlexAttention; nothing is checked or kept.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu.candidates import NotRun, attempt, rival
from benchmarks.gpu.settings import Items, Refused, Row, Settings, must_serve
from benchmarks.gpu.workloads import Workload, workloads


def items(settings: Settings) -> Items:
    """One workload of every set of kernels: lengths of 16384 tokens compile alike."""
    found: Items = {}
    seen = set()
    for workload in workloads(settings.tiny):
        case = workload.case
        for name in settings.backends(case.operator):
            kernels = (case.operator, name, workload.dtype, workload.width, case.H, case.gate,
                case.is_causal, case.mask is None, case.B == 1)  # fmt: skip
            if kernels not in seen:
                seen.add(kernels)
                found[f"{workload.name}/{name}"] = partial(_backend, settings, workload, name)
        if workload.flex and settings.on_gpu:
            found[f"{workload.name}/flex"] = partial(_flex, settings, workload)
    return found


def _backend(settings: Settings, workload: Workload, name: str) -> Row:
    inputs = workload.make(settings.device)
    try:
        must_serve(inputs, name)
    except Refused as reason:
        return {"detail": str(reason)}
    with torch.no_grad():
        inputs.call(name)
    if "backward" in workload.directions:
        inputs.backward(name)
    return {}


def _flex(settings: Settings, workload: Workload) -> Row:
    inputs = workload.make(settings.device)
    try:
        with torch.no_grad():
            attempt(lambda: rival("flex", inputs, True, 0), settings.device)
        _, out = attempt(lambda: rival("flex", inputs, True, 0), settings.device)
        torch.autograd.grad(out, [inputs.tensors["query"], inputs.tensors["key"]], inputs.dout)
    except NotRun as reason:
        return {"detail": str(reason)}
    return {}
