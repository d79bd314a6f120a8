"""Peak memory beyond inputs and results at long lengths, which has to grow with T and not with T^2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from benchmarks.gpu.candidates import NotRun, attempt, rival
from benchmarks.gpu.settings import Items, Row, Settings, must_serve
from benchmarks.gpu.workloads import tiny
from heads_kernels.testing import Case, CollaborativeCase, GatedCase, Inputs, peak_memory

_CASES: Final[tuple[Case, ...]] = (
    GatedCase("gated_D128", 1, 16, 32768, 32768, D=128, Dv=128, gate="H", is_causal=True,
        layout="transposed"),
    CollaborativeCase("collaborative_Ds256", 2, 12, 16384, 16384, Ds=256, Dv=64,
        layout="transposed"),
)  # fmt: skip
#: Of T: how memory grows.
_SHARES: Final = (1, 2)


def items(settings: Settings) -> Items:
    found: Items = {}
    for case in _CASES:
        case = tiny(case, H=2, T=32) if settings.tiny else case
        candidates = [*settings.backends(case.operator), "efficient"]
        if isinstance(case, GatedCase):
            candidates.append("cudnn")
        for name in candidates:
            found[f"{case}/{name}"] = partial(_peaks, settings, case, name)
    return found


def _peaks(settings: Settings, case: Case, name: str) -> Row:
    """Bytes by length, of the forward pass and of forward and backward together."""
    lengths = [case.T // share for share in reversed(_SHARES)]
    row: Row = {"case": case.name, "operator": case.operator, "candidate": name, "lengths": lengths}
    dtype = torch.float32 if settings.tiny else torch.bfloat16
    try:
        for direction, step in (("forward", _forward), ("both", _both)):
            row[direction] = []
            for T in lengths:
                drawn = replace(case, T=T, S=T).make(
                    dtype, settings.device, drawn_on=settings.device
                )
                inputs = drawn.requires_grad()
                call = _call(name, inputs)
                attempt(partial(partial, step, inputs, call), settings.device)
                row[direction].append(
                    peak_memory(partial(step, inputs, call), settings.device).extra
                )
    except NotRun as reason:
        row["refused"] = str(reason)
    return row


def _call(name: str, inputs: Inputs) -> Callable[[], Any]:
    if name in ("efficient", "cudnn"):
        return rival(name, inputs, False, 0)
    must_serve(inputs, name)
    return partial(inputs.call, name)


def _forward(inputs: Inputs, call: Callable[[], Any]) -> object:
    with torch.no_grad():
        return call()


def _both(inputs: Inputs, call: Callable[[], Any]) -> object:
    out = call()
    return out.detach(), torch.autograd.grad(out, list(inputs.tensors.values()), inputs.dout)
