"""Kept runs, and what README says of GPU support: only what a kept run shows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.pool import ROOT
from benchmarks.gpu.record import FILE, Record, by_backend
from benchmarks.gpu.settings import BAD, LEFT_OUT, PASSED, TABLES, Row, Settings, slug
from benchmarks.results import write_whole

KEPT: Final = ROOT / "benchmarks" / "results"
README: Final = ROOT / "README.md"
BEGIN: Final = "<!-- gpu-support:begin -->"
END: Final = "<!-- gpu-support:end -->"
#: What is known of a backend that no kept run has shown on a GPU.
_UNVERIFIED: Final = {
    "cuda": "not verified on a GPU so far: emulated on the CPU and compiled ahead of time only",
    "triton": "not verified on a GPU so far: interpreted on the CPU and compiled ahead of time only",
}


class CannotKeep(Exception):
    """The folder holds no run to keep; the message says why."""


def keep(folders: Sequence[Path], kept: Path = KEPT) -> Path:
    """Copy a run on a GPU to `benchmarks/results/<gpu>/`: `results.json` and plots of the first folder.

    Further folders, of the same commit and device, give what the first one left out.
    """
    run, *others = [_read(folder / FILE) for folder in folders]
    for folder, other in zip(folders[1:], others, strict=True):
        if _origin(other) != _origin(run):
            raise CannotKeep(f"{folder} is of {_origin(other)}, {folders[0]} of {_origin(run)}")
        _fill(run["stages"], other["stages"])
    # Counts, failures and goals anew, of all rows.
    run = Record(**{part.name: run[part.name] for part in fields(Record)}).to_json()
    target = kept / slug(run["machine"]["device"])
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.png"):
        old.unlink()
    write_whole(target / FILE, json.dumps(run, indent=1) + "\n")
    for plot in sorted(folders[0].glob("*.png")):
        shutil.copyfile(plot, target / plot.name)
    return target


def _read(path: Path) -> dict[str, Any]:
    try:
        run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CannotKeep(f"{path} cannot be read: {error}") from error
    if run["form"] != "full" or run["device"] != "cuda" or "device" not in run["machine"]:
        raise CannotKeep(
            f"{path} is a {run['form']} run on {run['device']}; keep full ones on a GPU, with stage machine"
        )
    return run


def _origin(run: dict[str, Any]) -> tuple[str, str]:
    return run["machine"]["device"], run["commit"]


def _fill(stages: dict[str, list[Row]], others: dict[str, list[Row]]) -> None:
    """Rows of `others` in the place of those that were left out, and of stages that are missing."""
    for stage, rows in others.items():
        had = {row["name"]: row for row in stages.get(stage, [])}
        for row in rows:
            if had.get(row["name"], {"verdict": LEFT_OUT})["verdict"] == LEFT_OUT:
                had[row["name"]] = row
        stages[stage] = list(had.values())


def render(kept: Path = KEPT) -> str:
    """The section of README between its markers, without them."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(kept.glob(f"*/{FILE}"))]
    lines = [
        f"| `{backend}` | `{operator}` | {_cell(runs, operator, backend)} |"
        for operator in TABLES
        for backend in Settings().backends(operator)
    ]
    if not lines:
        return "No backend for GPUs is in the tables yet: CUDA tensors run on `eager`.\n"
    return "\n".join(["| GPU backend | operator | verified on |", "|---|---|---|", *lines]) + "\n"


def _cell(runs: list[dict[str, Any]], operator: str, backend: str) -> str:
    shown = [text for run in runs if (text := _shown(run, operator, backend))]
    return "; ".join(shown) or _UNVERIFIED.get(backend, "not verified on a GPU so far")


def _shown(run: dict[str, Any], operator: str, backend: str) -> str:
    """What one run shows of a backend; empty where it shows nothing."""
    counts = by_backend(run["stages"]).get((operator, backend))
    if counts is None or not counts[PASSED]:
        return ""
    bad = sum(counts[verdict] for verdict in BAD)
    v, device = run["machine"]["versions"], run["machine"]["device"]
    text = f"{device}: {counts[PASSED]} checks passed"
    if bad:
        text += f", **{bad} failed**"
    if counts[LEFT_OUT]:
        text += f", {counts[LEFT_OUT]} left out"
    return f"{text} (commit {run['commit']}, torch {v['torch']}, Triton {v['triton']}, CUDA {v['cuda']})"


def section(text: str, table: str) -> str:
    """`text` of README with `table` between the markers."""
    before, marker, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not marker or not end:
        raise ValueError(f"README.md has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{table}{END}{after}"


def rewrite(readme: Path = README, kept: Path = KEPT) -> bool:
    """Bring the section of README in step with the kept runs; whether it changed."""
    old = readme.read_text(encoding="utf-8")
    new = section(old, render(kept))
    if new != old:
        write_whole(readme, new)
    return new != old
