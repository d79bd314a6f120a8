"""The table of backends, in order of preference, and the choice of one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from heads_kernels.problem import Problem

#: The names in the tables of backends.
BackendName = Literal["cpu", "triton", "cuda", "eager"]


@dataclass(frozen=True, eq=False)
class Backend:
    """One row of the table.

    `module` runs the operator; it is imported when the op runs. `unsupported(problem)` returns the reasons why this
    backend cannot serve the problem, an empty list if it can.
    """

    name: BackendName
    module: str
    unsupported: Callable[[Problem], list[str]]


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


def choose(table: Sequence[Backend], problem: Problem, backend: str | None = None) -> Choice:
    """Choose the first backend that can serve the problem, or consider only `backend` if given.

    Raises `ValueError` if `backend` is not in the table.
    """
    if backend is not None:
        rows = [row for row in table if row.name == backend]
        if not rows:
            known = ", ".join(repr(row.name) for row in table)
            raise ValueError(
                f"backend is {backend!r}; use one of {known}, or None to let the package choose."
            )
        table = rows
    refusals: dict[str, list[str]] = {}
    chosen: BackendName | None = None
    for row in table:
        reasons = row.unsupported(problem)
        if not reasons and chosen is None:
            chosen = row.name
        else:
            refusals[row.name] = reasons or [f"could serve it too, but {chosen!r} comes first"]
    return Choice(problem.operator, chosen, refusals)


def select(table: Sequence[Backend], problem: Problem, backend: str | None = None) -> str:
    """Name of the backend that serves the problem; raises `ValueError` with all reasons if none does.

    Warns once if only `eager` can, which holds `[B, H, T, S]` in memory.
    """
    if backend is None:
        for row in table:
            if not row.unsupported(problem):
                wide = problem.query.dtype == torch.float64  # no dtype of fused kernels on GPUs
                if row.name == "eager" and not wide and not torch.compiler.is_compiling():
                    _warn_of_eager(str(choose(table, problem)))
                return row.name
    choice = choose(table, problem, backend)
    if choice.backend is None:
        raise ValueError(str(choice))
    return choice.backend


@functools.cache
def _warn_of_eager(choice: str) -> None:
    warnings.warn(
        f'{choice}\n  It is slow and holds [B, H, T, S] in memory; pass backend="eager" to silence this warning.',
        stacklevel=4,  # the caller of the operator
    )
