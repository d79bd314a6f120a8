"""One plot of a kept full run: time over length, dense and causal, and over the number of open heads."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from benchmarks.problems import CLOSED_SERIES
from benchmarks.results import write_whole
from benchmarks.shapes import LENGTHS, WIDTHS, by_length

#: Candidate: key of its time, what the legend calls it, color. The colors, and a grey for text,
#: have a contrast of 3 or more on white and on black.
_CANDIDATES: Final = (
    ("ms", "heads_kernels", "#e0561b"),
    ("sdpa_ms", "SDPA times gate", "#3b82d6"),
    ("eager_ms", "eager PyTorch", "#7d8590"),
)
_GREY: Final = "#808080"
_HEADS: Final = 12

#: Of all figures of the benchmarks, for `matplotlib.rc_context`.
STYLE: Final[dict[Any, Any]] = {
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "heads_kernels",  # the same run gives the same file
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color",
        "ytick.color", "grid.color"), _GREY),
}  # fmt: skip

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
    path, text = kept.with_suffix(".svg"), io.StringIO()
    with mpl.rc_context(STYLE):
        try:
            drawn = figure(run)
        except KeyError as error:
            lacks = f"the newest full run in {kept} has no {error}; keep a new one"
            raise CannotPlot(lacks) from error
        drawn.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    write_whole(path, text.getvalue())
    return path


def figure(run: dict[str, Any]) -> Any:
    """Three panels; forward, all threads of the run."""
    from matplotlib.figure import Figure

    machine = run["machine"]
    rows = {
        row["workload"]: row
        for row in run["speed"]
        if (row["direction"], row["threads"]) == ("forward", machine["threads"])
    }
    drawn = Figure(figsize=(10.5, 3.9), layout="constrained")
    dense, causal, closed = drawn.subplots(1, 3)
    for axes, kind in ((dense, "dense"), (causal, "causal")):
        _over_length(axes, kind, rows)
    _over_heads(closed, rows)
    dense.legend(loc="upper left")
    drawn.suptitle(
        f"Gated attention forward, 12 heads of width 64, float32, {machine['threads']} of "
        f"{machine['cores']} cores, {machine['processor']}, {machine['level']}\n"
        f"heads_kernels {machine['version']} {machine['commit'] or ''}, PyTorch {machine['torch']}",
        fontsize=9,
    )
    return drawn


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
        axes.plot(
            list(LENGTHS), [row[key] * 1e3 / (B * T) for T, B, row in points], "o-", color=color,
            label=name, markersize=4,
        )  # fmt: skip
    axes.set(title=f"{kind}, over length", xlabel="T (about 1000 tokens a call)", xscale="log",
        yscale="log", ylabel="microseconds a token")  # fmt: skip
    _ticks(axes.xaxis, LENGTHS)
    lowest, highest = axes.get_ylim()
    _ticks(axes.yaxis, (n for n in (0.5, 1, 2, 5, 10, 20, 50, 100) if lowest < n < highest))
    axes.grid(alpha=0.3)


def _over_heads(axes: Any, rows: dict[str, Row]) -> None:
    closed = {
        _HEADS * (100 - percent) // 100: f"gated_closed_{percent}" for percent in CLOSED_SERIES
    }
    names = {_HEADS: "gated_dense", **closed}
    for key, name, color in _CANDIDATES:
        axes.plot(list(names), [rows[one][key] for one in names.values()], "o-", color=color,
            label=name, markersize=4)  # fmt: skip
    axes.set(title="T 512, B 2, over open heads", xlabel=f"open heads of {_HEADS}",
        ylabel="milliseconds", ylim=(0, None))  # fmt: skip
    _ticks(axes.xaxis, names)
    axes.grid(alpha=0.3)


def _ticks(axis: Any, values: Iterable[float]) -> None:
    """These and no others, as plain numbers."""
    chosen = list(values)
    axis.set_ticks(chosen, [f"{value:g}" for value in chosen])
    axis.set_ticks([], minor=True)
