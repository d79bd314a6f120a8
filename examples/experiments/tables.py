"""Markdown tables, and the numbers in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Rows = Iterable[Sequence[object]]


def markdown(header: Sequence[str], rows: Rows) -> str:
    """A table; all columns but the first are aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def seeds_of(runs: Mapping[str, Any]) -> list[int]:
    """The seeds of runs whose names end with "seed N"."""
    return sorted({int(name.rsplit(" ", 1)[1]) for name in runs if "seed " in name})


def by_seed(runs: Mapping[str, Any], name: str) -> list[Any]:
    """The runs "<name>, seed N", in order of the seeds."""
    found = (runs.get(f"{name}, seed {seed}") for seed in seeds_of(runs))
    return [run for run in found if run is not None]


def quality_cells(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Shares of words and of sentences that are right, and nats per word: a number for each seed."""
    runs = list(runs)
    shares = [each(run[what] for run in runs) for what in ("words", "sentences")]
    return [*shares, each((run["loss"] for run in runs), ".3f")]


def each(values: Iterable[float], form: str = ".1%") -> str:
    """One number for each seed, "98.1, 97.5"; shares in percent, without the percent sign."""
    return ", ".join(format(value, form).rstrip("%") for value in values)
