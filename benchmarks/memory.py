"""Peak memory beyond inputs and results: of a long call, which has to grow with T and not with T^2, and of a pair bias.

Eager PyTorch keeps about two `[T, S]` matrices of all heads at once in the forward pass and about five with gradients.
It is run where the machine has memory for 4 and 8 (`candidates.MATRICES`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch

from benchmarks import checks
from benchmarks.candidates import (
    BASELINES,
    RIVALS,
    Call,
    NotRun,
    attention,
    further_backends,
)
from benchmarks.goals import GPU_MEMORY
from benchmarks.measure import Row
from benchmarks.peak import peak_memory
from benchmarks.results import Column, Found
from benchmarks.settings import Settings
from benchmarks.workloads import DIRECTIONS, Direction, table
from heads_kernels.testing import Inputs, find

_COLUMNS: Final[dict[str, Column]] = {
    "": "{case}",
    "candidate": "{candidate}",
    "pass": lambda row: "forward" if row["direction"] == "forward" else "forward and backward",
    "MiB": lambda row: "-" if row["extra"] is None else f"{row['extra'] / 2**20:,.1f}",
    "not measured": "{how}",
}


def measure(settings: Settings) -> Iterator[Found]:
    found = Found("memory", "Peak memory beyond inputs and results", _COLUMNS)
    for name, inputs in _cases(settings, found):
        for direction in DIRECTIONS:
            others = (*further_backends(inputs, settings.device), *RIVALS[settings.device])
            for candidate in ("ours", *others):
                found.rows.append(_row(name, inputs, candidate, direction))
    yield found


def _cases(settings: Settings, found: Found) -> Iterator[tuple[str, Inputs]]:
    """Calls by name. Those of a GPU are workloads, which have been checked."""
    every = {workload.name: workload for workload in table(settings)}
    if settings.device == "cuda":
        names = [name for pair in GPU_MEMORY for name in pair if name in every] or [*every][:1]
        for name in names:
            yield name, every[name].make(settings.dtype, settings.place)[0]
        return
    T = 1024 if settings.form == "smoke" else 8192
    long = replace(find("gated_attention", "long_8192"), T=T, S=T).make(settings.dtype)
    failures = checks.check_long(long)
    found.failures += [f"memory: {failure}" for failure in failures]
    if not failures:
        yield f"B1 H8 T{T} D64", long
    if "pair_bias_H4" in every:  # in all forms but quick
        yield "pair_bias_H4", every["pair_bias_H4"].make(settings.dtype, settings.place)[0]


def _row(case: str, inputs: Inputs, candidate: str, direction: Direction) -> Row:
    row: Row = {
        "case": case,
        "direction": direction,
        "candidate": candidate,
        "extra": None,
        "how": "",
    }
    try:
        step = _step(inputs, candidate, direction)
        if inputs.dout.is_cuda:
            step()  # compiles
        else:
            _step(_first_rows(inputs), candidate, direction)()  # thread pools, code
        row["extra"] = peak_memory(step, inputs.dout.device).extra
    except (NotRun, RuntimeError) as reason:
        if candidate not in BASELINES:
            raise
        row["how"] = " ".join(str(reason).split())[:60]
    return row


def _step(inputs: Inputs, candidate: str, direction: Direction) -> Call:
    leaves = inputs.requires_grad()
    call = attention(candidate, leaves, flex=False, direction=direction)

    def forward() -> object:
        with torch.no_grad():
            return call()

    def both() -> object:
        out = call()
        return out.detach(), torch.autograd.grad(out, list(leaves.tensors.values()), leaves.dout)

    return forward if direction == "forward" else both


def _first_rows(inputs: Inputs) -> Inputs:
    tensors = {n: t[:, :, :64] if t.dim() == 4 else t for n, t in inputs.tensors.items()}
    if "bias" in tensors:
        tensors["bias"] = tensors["bias"][..., :64]
    return replace(inputs, tensors=tensors, dout=inputs.dout[:, :, :64])
