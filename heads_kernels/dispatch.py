"""The choice of a backend for a call, in one order for every operator.

The order is that of the table, or what the environment variable HEADS_KERNELS_BACKENDS names, which is read once.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from heads_kernels.backends import BACKENDS, CPU_MISSING, SIMULATED, Backend, BackendName, find
from heads_kernels.call import Call

VARIABLE: Final = "HEADS_KERNELS_BACKENDS"


def _read(value: str) -> tuple[Backend, ...]:
    """The backends that a value of the variable names; none where it is empty."""
    if not value:
        return ()
    table: dict[str, Backend] = {row.name: row for row in BACKENDS}
    names = dict.fromkeys(name.strip() for name in value.split(","))
    if not names.keys() <= table.keys():
        known = ", ".join(table)
        raise ValueError(f"{VARIABLE} is {value!r}; name some of {known}, separated by commas.")
    return tuple(table[name] for name in names)


_NAMED: Final = _read(os.environ.get(VARIABLE, ""))

#: Backends that may serve CPU tensors in this process.
_ON_CPU: Final = {"cpu", "eager", *SIMULATED}

#: The order for float32 on a GPU, without the variable: `cuda` multiplies it on tensor cores, `triton` does not.
_FLOAT32: Final = tuple(sorted(BACKENDS, key=lambda row: row.name != "cuda"))


@dataclass(frozen=True)
class Choice:
    """What `explain` returns: the backend that would run, and why the others would not.

    `backend` is None if no backend, or not the requested one, can serve the call. `refusals` maps each backend that was
    not chosen to its reasons.
    """

    operator: str
    backend: BackendName | None
    refusals: dict[str, list[str]]

    def __str__(self) -> str:
        head = f"{self.operator}: " + (
            f"runs on {self.backend!r}" if self.backend else "no backend can serve this call"
        )
        lines = [f"  not {name!r}: {'; '.join(reasons)}" for name, reasons in self.refusals.items()]
        return "\n".join([head, *lines])


def choose(call: Call, backend: str | None = None) -> Choice:
    """Choose the first backend that can serve the call; with `backend`, consider only that one.

    Raises `ValueError` if there is no backend of this name.
    """
    rows = in_order(call.query) if backend is None else [find(backend)]
    refusals: dict[str, list[str]] = {}
    chosen: BackendName | None = None
    for row in rows:
        reasons = row.unsupported(call)
        if not reasons and chosen is None:
            chosen = row.name
        else:
            refusals[row.name] = reasons or [f"could serve it too, but {chosen!r} comes first"]
    for row in BACKENDS if backend is None else ():
        if row not in rows:
            refusals[row.name] = [f"{VARIABLE} leaves it out", *row.unsupported(call)]
    return Choice(call.operator, chosen, refusals)


def select(call: Call, backend: str | None = None) -> str:
    """Name of the backend that serves the call; raises `ValueError` with all reasons if none does.

    Warns once if only `eager` can, since it stores `[B, H, T, S]`.
    """
    if backend is None:
        for row in in_order(call.query):
            if not row.unsupported(call):
                if row.name == "eager" and not torch.compiler.is_compiling():
                    _warn_of_eager(_why_eager(call))
                return row.name
    choice = choose(call, backend)
    if choice.backend is None:
        raise ValueError(str(choice))
    return choice.backend


def in_order(query: Tensor) -> Sequence[Backend]:
    """The backends in the order in which they are tried."""
    return _NAMED or (_FLOAT32 if query.is_cuda and query.dtype == torch.float32 else BACKENDS)


def first_on_cpu() -> str:
    """Name of the first backend that may serve CPU tensors in this process."""
    for row in _NAMED or BACKENDS:
        if row.name in _ON_CPU:
            return row.name
    return ""


def _why_eager(call: Call) -> str:
    """Why a call runs on `eager`, the same text for all calls on a CPU without kernels; empty for float64 elsewhere."""
    if call.query.is_cpu and CPU_MISSING:
        return f"heads_kernels runs on 'eager' on this CPU: {CPU_MISSING}"
    return "" if call.query.dtype == torch.float64 else str(choose(call))  # no dtype of GPU kernels


@functools.cache
def _warn_of_eager(why: str) -> None:
    if not why:
        return
    warnings.warn(
        f'{why}\n  It is slow and holds [B, H, T, S] in memory; pass backend="eager" to silence this warning.',
        stacklevel=5,  # the caller of the operator
    )
