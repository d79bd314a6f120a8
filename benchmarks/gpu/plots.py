"""Plots of the times: TFLOP/s over length, time over the share of open heads, collaborative attention."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, Final

from benchmarks import figures
from benchmarks.figures import BLUE, GREEN, GREY, ORANGE, PURPLE
from benchmarks.gpu.candidates import RIVALS
from benchmarks.gpu.goals import best, milliseconds, ours, tflops
from benchmarks.gpu.record import Record
from benchmarks.gpu.settings import Row
from benchmarks.problems import DIRECTIONS, Direction

#: Of every candidate on every plot: color and line.
_LOOKS: Final = {
    "triton": (ORANGE, "-"),
    "cuda": (PURPLE, "-"),
    "cpu": (GREEN, "-"),
    "cudnn": (BLUE, "-"),
    "flash": (BLUE, "--"),
    "efficient": (BLUE, ":"),
    "flex": (GREY, "-"),
    "eager": (GREY, "--"),
}
_MOST_LINES: Final = 5
_SHARES: Final = {"closed_50": 0.5, "closed_75": 0.25}


def draw(record: Record, folder: Path) -> list[Path]:
    """Write what there are times for; an empty list where nothing was timed. Needs matplotlib."""
    import matplotlib as mpl

    rows = [
        row for row in record.rows("timing") if row.get("dtype") != "float16" and "operator" in row
    ]
    device = record.machine().get("device", "")
    written = []
    with mpl.rc_context(figures.STYLE):
        for name, figure in (
            ("gated", _rates(rows, "gated_attention", ("dense", "causal"), "D")),
            ("closed", _closed(rows)),
            ("collaborative", _rates(rows, "collaborative_attention", ("dense",), "Ds")),
        ):
            if figure is not None:
                figure.supxlabel(f"{device}, {record.commit}", fontsize=7.5)
                written.append(folder / f"{name}.png")
                figure.savefig(written[-1], dpi=100, facecolor="white")
    return written


def _rates(rows: list[Row], operator: str, kinds: tuple[str, ...], width: str) -> Any:
    """TFLOP/s over T, a row of panels for each kind and direction and a column for each width."""
    from matplotlib.figure import Figure

    rows = sorted(
        (r for r in rows if r["operator"] == operator and r["kind"] in kinds), key=lambda r: r["T"]
    )
    widths = sorted({row[width] for row in rows})
    if not widths:
        return None
    lines = list(product(kinds, DIRECTIONS))
    figure = Figure(figsize=(4.5 * len(widths), 3.4 * len(lines)), layout="constrained")
    grid = figure.subplots(len(lines), len(widths), squeeze=False)
    for (kind, direction), panels in zip(lines, grid, strict=True):
        for size, axes in zip(widths, panels, strict=True):
            some = [row for row in rows if (row[width], row["kind"]) == (size, kind)]
            _panel(axes, some, direction)
            title = f"{width} {size}, {kind}, {direction}"
            figures.message(axes, f"{title}: {_found(some, direction)}")
    return figure


def _panel(axes: Any, rows: list[Row], direction: Direction) -> None:
    """Ours, and of the others the fastest, up to `_MOST_LINES`."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row, name in product(rows, _LOOKS):
        if (rate := tflops(row, direction, name)) is not None:
            curves.setdefault(name, []).append((row["T"], rate))
    fastest = sorted(curves, key=lambda name: (name in RIVALS, -max(r for _, r in curves[name])))
    for name in fastest[:_MOST_LINES]:
        color, style = _LOOKS[name]
        label = f"{name}, times gate" if name in RIVALS else f"heads_kernels, {name}"
        axes.plot(*zip(*curves[name], strict=True), style, color=color, marker="o", label=label)
    lengths = [row["T"] for row in rows]
    axes.set(xscale="log", xlabel="sequence length T", ylabel="TFLOP/s", ylim=(0, None))
    axes.set_xticks(lengths, [str(T) for T in lengths])
    axes.set_xticks([], minor=True)
    axes.grid()
    if curves:
        axes.legend()


def _found(rows: list[Row], direction: Direction) -> str:
    """The message of a panel: ours against the fastest other at the longest length that both have."""
    for row in reversed(rows):
        own, other = ours(row, direction), best(row, direction, RIVALS)
        if own is not None and other is not None:
            return f"{other / own:.2f} times the speed of the fastest other at T = {row['T']}"
    return "nothing to compare with"


def _closed(rows: list[Row]) -> Any:
    """Our time over the share of open heads, as a part of that with all open; the ideal is a line."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["kind"] in _SHARES]
    if not rows:
        return None
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for axes, direction in zip(figure.subplots(1, len(DIRECTIONS)), DIRECTIONS, strict=True):
        curves: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for row in rows:
            own = ours(row, direction)
            whole = milliseconds(row, direction, f"{row['default']} whole")
            if own is not None and whole is not None:
                share = _SHARES[row["kind"]], own / whole
                curves.setdefault((row["D"], row["T"]), [(1.0, 1.0)]).append(share)
        looks = product((ORANGE, BLUE), "-:")
        for ((D, T), points), (color, style) in zip(sorted(curves.items()), looks, strict=False):
            points = sorted(points)
            label = f"D = {D}, T = {T}"
            axes.plot(*zip(*points, strict=True), style, color=color, marker="o", label=label)
        axes.plot([0, 1], [0, 1], color=GREY, lw=1, label="ideal")
        least = [min(points) for points in curves.values()]
        figures.message(
            axes,
            f"{direction.capitalize()}: {min(least)[0]:.0%} of the heads open take "
            f"{min(t for _, t in least):.0%} to {max(t for _, t in least):.0%} of the time"
            if least
            else f"{direction.capitalize()}: not measured",
        )
        axes.set(xlabel="share of open heads", ylabel="time, as a share of that with all open")
        axes.grid()
        axes.legend()
    return figure
