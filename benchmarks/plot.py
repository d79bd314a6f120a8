"""One figure of a kept full run: time over length, dense and causal, and over the number of open heads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from benchmarks import figures
from benchmarks.figures import BLUE, GREY, ORANGE
from benchmarks.problems import CLOSED_SERIES
from benchmarks.shapes import LENGTHS, WIDTHS, by_length

#: Candidate: key of its time, what the legend calls it, color.
_CANDIDATES: Final = (
    ("ms", "heads_kernels", ORANGE),
    ("sdpa_ms", "SDPA, output times gate", BLUE),
    ("eager_ms", "eager PyTorch", GREY),
)
_HEADS: Final = 12

Row = dict[str, Any]


class CannotPlot(Exception):
    """There is nothing to draw or nothing to draw with; the message says what would do."""


def draw(kept: Path) -> Path:
    """Draw the newest whole full float32 run in `kept` into an SVG of the same name beside it."""
    run = newest(kept)
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise CannotPlot("matplotlib is missing: pip install 'heads_kernels[bench]'") from error
    path = kept.with_suffix(".svg")
    with mpl.rc_context(figures.STYLE):
        try:
            drawn = figure(run)
        except KeyError as error:
            lacks = f"the newest full run in {kept} has no {error}; keep a new one"
            raise CannotPlot(lacks) from error
        figures.save(drawn, path)
    return path


def figure(run: dict[str, Any]) -> Any:
    """Three panels; forward, all threads of the run."""
    from matplotlib.figure import Figure

    rows = forward_rows(run)
    drawn = Figure(figsize=(10.5, 4.3), layout="constrained")
    dense, causal, closed = drawn.subplots(1, 3)
    for axes, kind in ((dense, "dense"), (causal, "causal")):
        _over_length(axes, kind, rows)
    _over_heads(closed, rows)
    dense.legend(loc="upper left")
    version = f"heads_kernels {run['machine']['version']} {run['machine']['commit'] or ''}"
    drawn.supxlabel(f"Forward pass, 12 heads, float32; {conditions(run)}; {version}", fontsize=7.5)
    return drawn


def forward_rows(run: dict[str, Any]) -> dict[str, Row]:
    """Times of the forward pass on all threads of the run, by workload."""
    wanted = "forward", run["machine"]["threads"]
    return {
        row["workload"]: row for row in run["speed"] if (row["direction"], row["threads"]) == wanted
    }


def conditions(run: dict[str, Any]) -> str:
    """What a run was measured on."""
    machine = run["machine"]
    return (
        f"{machine['threads']} of {machine['cores']} cores, {machine['processor']}, "
        f"{machine['level']}; PyTorch {machine['torch']}"
    )


def newest(kept: Path) -> dict[str, Any]:
    """Of the runs on the most threads, for those on fewer tell another story."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    runs = [run for line in reversed(lines) if (run := _parse(line))]
    if not runs:
        raise CannotPlot(
            f"{kept} has no full run in float32; python -m benchmarks --full --keep makes one"
        )
    return max(runs, key=lambda run: run["machine"]["threads"])  # the first of equals


def _parse(line: str) -> dict[str, Any] | None:
    """The run in this line; None where it is no whole full run in float32."""
    try:
        run = json.loads(line)
    except ValueError:
        return None
    wanted = {"form": "full", "dtype": "float32", "complete": True}
    return run if isinstance(run, dict) and wanted.items() <= run.items() else None


def _over_length(axes: Any, kind: str, rows: dict[str, Row]) -> None:
    points = [(T, B, rows[f"{by_length(T, WIDTHS[0])}_{kind}"]) for T, B in LENGTHS.items()]
    for key, name, color in _CANDIDATES:
        times = [row[key] * 1e3 / (B * T) for T, B, row in points]
        axes.plot(list(LENGTHS), times, "o-", color=color, label=name, markersize=4)
    rates = [row["sdpa_ms"] / row["ms"] for _, _, row in points]
    figures.message(
        axes,
        f"{kind.capitalize()}: {min(rates):.1f} to {max(rates):.1f} times the speed of SDPA times gate",
    )
    axes.set(
        xlabel="tokens in a sequence (about 1000 in a call)",
        ylabel="microseconds per token",
        xscale="log",
        yscale="log",
    )
    _ticks(axes.xaxis, LENGTHS)
    lowest, highest = axes.get_ylim()
    _ticks(axes.yaxis, (n for n in (0.5, 1, 2, 5, 10, 20, 50, 100, 200) if lowest < n < highest))
    axes.grid()


def _over_heads(axes: Any, rows: dict[str, Row]) -> None:
    closed = {
        _HEADS * (100 - percent) // 100: f"gated_closed_{percent}" for percent in CLOSED_SERIES
    }
    names = {_HEADS: "gated_dense", **closed}
    for key, name, color in _CANDIDATES[:2]:
        times = [rows[workload][key] for workload in names.values()]
        axes.plot(list(names), times, "o-", color=color, label=name, markersize=4)
    every, fewest = rows["gated_dense"]["ms"], rows[names[min(names)]]["ms"]
    figures.message(
        axes,
        f"Closed heads save time: {every:.1f} ms with {_HEADS} open, {fewest:.1f} ms with {min(names)}",
    )
    axes.set(
        xlabel=f"open heads of {_HEADS} (2 sequences of 512 tokens)",
        ylabel="milliseconds",
        ylim=(0, None),
    )
    _ticks(axes.xaxis, names)
    axes.grid()


def _ticks(axis: Any, values: Iterable[float]) -> None:
    """These and no others, as plain numbers."""
    chosen = list(values)
    axis.set_ticks(chosen, [f"{value:g}" for value in chosen])
    axis.set_ticks([], minor=True)
