"""Plots of the times: TFLOP/s over length, time over the share of open heads, collaborative attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu.candidates import RIVALS
from benchmarks.gpu.goals import milliseconds, ours, tflops
from benchmarks.gpu.record import Record
from benchmarks.gpu.settings import Row
from benchmarks.problems import DIRECTIONS

#: One color a candidate on every plot; ours are the first of the table that are no baseline.
_COLORS = {"flash": "C0", "efficient": "C1", "cudnn": "C2", "eager": "C7", "flex": "C4"}
_OURS = ("C3", "C5", "C6", "C8")


def draw(record: Record, folder: Path) -> list[Path]:
    """Write what there are times for; an empty list where nothing was timed. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = [
        row for row in record.rows("timing") if row.get("dtype") != "float16" and "operator" in row
    ]
    device = record.machine().get("device", "")
    written = []
    for name, plot in (("gated", _gated), ("closed", _closed), ("collaborative", _collaborative)):
        figure = plot(pyplot, rows)
        if figure is not None:
            figure.suptitle(f"{device}, {record.commit}", fontsize=9)
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=80, bbox_inches="tight")
            pyplot.close(figure)
            written.append(path)
    return written


def _gated(pyplot: Any, rows: list[Row]) -> Any:
    some = [
        r for r in rows if r["operator"] == "gated_attention" and r["kind"] in ("dense", "causal")
    ]
    return _rates(pyplot, some, "D")


def _collaborative(pyplot: Any, rows: list[Row]) -> Any:
    some = [r for r in rows if r["operator"] == "collaborative_attention" and r["kind"] == "dense"]
    return _rates(pyplot, some, "Ds")


def _rates(pyplot: Any, rows: list[Row], width: str) -> Any:
    """TFLOP/s over T of all candidates, one panel a width and direction; causal is dashed."""
    widths = sorted({row[width] for row in rows})
    if not widths:
        return None
    figure, axes = pyplot.subplots(
        len(DIRECTIONS), len(widths), figsize=(4.5 * len(widths), 7), squeeze=False, sharex=True
    )
    for line, direction in zip(axes, DIRECTIONS, strict=True):
        for axis, size in zip(line, widths, strict=True):
            for kind, style in (("dense", "o-"), ("causal", "s--")):
                some = sorted(
                    (r for r in rows if (r[width], r["kind"]) == (size, kind)), key=lambda r: r["T"]
                )
                for name in _candidates(some, direction):
                    points = [
                        (r["T"], rate)
                        for r in some
                        if (rate := tflops(r, direction, name)) is not None
                    ]
                    if points:
                        axis.plot(*zip(*points, strict=True), style, color=_color(name, some, direction),
                            label=name if kind == "dense" else None)  # fmt: skip
            axis.set(
                title=f"{width} {size}, {direction}", xscale="log", ylabel="TFLOP/s", xlabel="T"
            )
            axis.set_xticks(
                sorted({r["T"] for r in rows}), [str(t) for t in sorted({r["T"] for r in rows})]
            )
            axis.set_ylim(bottom=0)
            axis.legend(fontsize=7)
    return figure


def _closed(pyplot: Any, rows: list[Row]) -> Any:
    """Our time over the share of open heads, as a part of that with all open; the ideal is a line."""
    shares = {"closed_50": 0.5, "closed_75": 0.25}
    some = [row for row in rows if row["kind"] in shares]
    if not some:
        return None
    figure, axes = pyplot.subplots(1, len(DIRECTIONS), figsize=(9, 3.5), squeeze=False)
    for axis, direction in zip(axes[0], DIRECTIONS, strict=True):
        for D, T in sorted({(row["D"], row["T"]) for row in some}):
            points = [(1.0, 1.0)]
            for row in some:
                own = ours(row, direction)
                whole = milliseconds(row, direction, f"{row['default']} whole")
                if (row["D"], row["T"]) == (D, T) and own is not None and whole is not None:
                    points.append((shares[row["kind"]], own / whole))
            axis.plot(*zip(*sorted(points), strict=True), "o-", label=f"D{D} T{T}")
        axis.plot([0, 1], [0, 1], "k:", label="ideal")
        axis.set(title=direction, xlabel="share of open heads", ylabel="time by that with all open")
        axis.legend(fontsize=7)
    return figure


def _candidates(rows: list[Row], direction: str) -> list[str]:
    """Ours first."""
    names = dict.fromkeys(name for row in rows for name in row.get(direction, {}).get("times", {}))
    timed = [name for name in names if not name.endswith(" whole")]
    return sorted(timed, key=lambda name: name in RIVALS)


def _color(name: str, rows: list[Row], direction: str) -> str:
    if name in _COLORS:
        return _COLORS[name]
    mine = [other for other in _candidates(rows, direction) if other not in RIVALS]
    return _OURS[mine.index(name) % len(_OURS)]
