"""Backends: one row each in an ordered table, and the choice among them.

A row names the module that runs the operator (imported when the op runs, never before) and answers, for a `Problem`,
the list of reasons why it can not serve it. An empty list means that it can.
"""

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
    """One row: `module` holds the launchers, `unsupported(problem)` the reasons against it."""

    name: BackendName
    module: str
    unsupported: Callable[[Problem], list[str]]


@dataclass(frozen=True)
class Choice:
    """What `explain` returns: the backend that would run, and why each other one would not.

    `backend` is None where no backend of the table (or not the one that was asked for) can serve the call.
    `refusals` maps each backend that was passed over to its reasons.
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
    """Ask the rows in order; the first that can serve the problem is chosen, or only `backend` where it is named.

    Raises `ValueError` where `backend` is not in the table.
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
            refusals[row.name] = reasons or [f"could serve it too; {chosen!r} comes first"]
    return Choice(problem.operator, chosen, refusals)


def select(table: Sequence[Backend], problem: Problem, backend: str | None = None) -> str:
    """Name of the backend that serves the problem; raises `ValueError` with every reason where none does.

    Warns once where the formula alone is left, which holds `[B, H, T, S]` in memory.
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
        f'{choice}\n  It holds [B, H, T, S] in memory and is slow; backend="eager" asks for it without this warning.',
        stacklevel=4,  # the caller of the operator
    )
