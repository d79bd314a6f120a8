"""The choice of a backend for a call.

The order is that of the table, or what `python -m heads_kernels doctor --save` found on this machine; on a GPU float32
has an order of its own, `_FLOAT32`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from heads_kernels import doctor_record
from heads_kernels.backends import BACKENDS, Backend, BackendName, find
from heads_kernels.call import Call

#: What is tried first for float32 on a GPU: `cuda` multiplies float32 on tensor cores, `triton` does not. The doctor
#: times backends in bfloat16, which does not predict float32.
_FLOAT32: Final[tuple[BackendName, ...]] = ("cuda", "triton")


@dataclass(frozen=True)
class Choice:
    """What `explain` returns: the backend that would run, and why the others would not.

    `backend` is None if no backend, or not the requested one, can serve the call. `refusals` maps each backend that was
    not chosen to its reasons. `order` says where the order of the backends comes from; with a requested one, how it
    failed in `python -m heads_kernels doctor --save`, if it did.
    """

    operator: str
    backend: BackendName | None
    refusals: dict[str, list[str]]
    order: str = ""

    def __str__(self) -> str:
        head = f"{self.operator}: " + (
            f"runs on {self.backend!r}" if self.backend else "no backend can serve this call"
        )
        lines = [f"  not {name!r}: {'; '.join(reasons)}" for name, reasons in self.refusals.items()]
        return "\n".join([head, *lines, *([f"  {self.order}"] if self.order else [])])


def choose(call: Call, backend: str | None = None) -> Choice:
    """Choose the first backend that can serve the call, or consider only `backend` if given.

    Raises `ValueError` if there is no backend of this name.
    """
    found = doctor_record.found(call.operator, call.query.device)
    failed = dict(found.failed)
    if backend is not None:
        rows: Sequence[Backend] = [find(backend)]
        order = f"{backend!r} {failed[backend]}: {found.source}" if backend in failed else ""
    else:
        rows = in_order(call.operator, call.query)
        order = f"order: {found.source}"
        if _is_float32_on_gpu(call.query):
            order += "; of float32 on a GPU 'cuda' before 'triton'"
    refusals: dict[str, list[str]] = {}
    chosen: BackendName | None = None
    for row in rows:
        reasons = row.unsupported(call)
        if not reasons and chosen is None:
            chosen = row.name
        else:
            refusals[row.name] = reasons or [f"could serve it too, but {chosen!r} comes first"]
    if backend is None:
        for row in BACKENDS:
            if row.name in failed:
                refusals[row.name] = [failed[row.name], *row.unsupported(call)]
    return Choice(call.operator, chosen, refusals, order)


def select(call: Call, backend: str | None = None) -> str:
    """Name of the backend that serves the call; raises `ValueError` with all reasons if none does.

    Warns once if only `eager` can, which holds `[B, H, T, S]` in memory.
    """
    if backend is None:
        for row in in_order(call.operator, call.query):
            if not row.unsupported(call):
                wide = call.query.dtype == torch.float64  # no dtype of fused kernels on GPUs
                if row.name == "eager" and not wide and not torch.compiler.is_compiling():
                    _warn_of_eager(str(choose(call)))
                return row.name
    choice = choose(call, backend)
    if choice.backend is None:
        raise ValueError(str(choice))
    return choice.backend


def in_order(operator: str, query: Tensor) -> Sequence[Backend]:
    """The backends in the order in which they are tried, without those that failed on this machine."""
    found = doctor_record.found(operator, query.device)
    names: tuple[str, ...] = found.verified
    if _is_float32_on_gpu(query):
        of_float32 = tuple(name for name in _FLOAT32 if name in names or not names)
        names = (*of_float32, *(name for name in names if name not in _FLOAT32))
    if not (names or found.failed):
        return BACKENDS
    failed = [name for name, _ in found.failed]
    first = [row for name in names for row in BACKENDS if row.name == name and name not in failed]
    return first + [row for row in BACKENDS if row.name not in (*names, *failed)]


def _is_float32_on_gpu(query: Tensor) -> bool:
    return query.dtype == torch.float32 and query.is_cuda


@functools.cache
def _warn_of_eager(choice: str) -> None:
    warnings.warn(
        f'{choice}\n  It is slow and holds [B, H, T, S] in memory; pass backend="eager" to silence this warning.',
        stacklevel=5,  # the caller of the operator
    )
