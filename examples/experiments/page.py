"""The published results, and their tables in docs/experiments.md."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any, Final

import plots

from benchmarks.results import write_text

EXPERIMENTS: Final = (
    "heads_of_minilm",
    "pruning_curves",
    "l0_by_kind",
    "collaborative_from_scratch",
    "l0_or_importance",
    "conversion_recovered",
    "deep_decoders",
    "rotary_conversion",
    "sparse_heads",
)
DOCS: Final = Path(__file__).parents[2] / "docs"
KEPT: Final = DOCS / "experiments"
PAGE: Final = DOCS / "experiments.md"


class NothingToKeep(Exception):
    """A folder has no results, or the page has no place for a table."""


def keep(folder: Path) -> list[str]:
    """Copy the results in `folder` to `KEPT`, draw them, and put their tables on the page. Returns their names.

    Raises:
        NothingToKeep: the folder has no results, or the page no place for a table; nothing is written then.
    """
    names = names_in(folder)
    if not names:
        raise NothingToKeep(f"{folder} has no results; run an experiment with --out {folder}")
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables(folder).items():
        text = with_table(text, name, table)
    KEPT.mkdir(exist_ok=True)
    for name in names:
        file = f"{name}.json"
        write_text(KEPT / file, (folder / file).read_text(encoding="utf-8"))
        module, found = module_and_results(KEPT, name)
        plots.save(module.draw, **found, path=KEPT / f"{name}.svg")
    write_text(PAGE, text)
    return names


def names_in(folder: Path) -> list[str]:
    """The experiments whose results are in a folder."""
    return [name for name in EXPERIMENTS if (folder / f"{name}.json").exists()]


def module_and_results(folder: Path, name: str) -> tuple[Any, dict[str, Any]]:
    """The module of an experiment, and its `settings` and `runs` in a folder."""
    text = (folder / f"{name}.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return importlib.import_module(name), found


def tables(folder: Path) -> dict[str, str]:
    """Every table of the results in a folder, by its name on the page."""
    made: dict[str, str] = {}
    for name in names_in(folder):
        module, found = module_and_results(folder, name)
        made |= module.tables(**found)
    return made


def with_table(text: str, name: str, table: str) -> str:
    """`text` with a table between `<!-- name:begin -->` and `<!-- name:end -->`."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise NothingToKeep(f"{PAGE} has no place for {name}; write {begin} and {end} into it")
    return re.sub(
        f"{re.escape(begin)}.*{re.escape(end)}",
        lambda _: f"{begin}\n{table}\n{end}",
        text,
        flags=re.DOTALL,
    )
