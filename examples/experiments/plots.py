"""Figures: one style, SVG that is the same file for the same results, marks for the seeds of a run."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.results import write_whole

Draw = Callable[[Mapping[str, Any], Mapping[str, Any]], Figure]

#: Colors that color-blind eyes tell apart; they and the grey have a contrast of 3 or more on white and on black.
BLUE, ORANGE, PURPLE, GREEN, PINK, GREY = (
    "#3b82d6", "#e0561b", "#a83279", "#1f9d6b", "#d667a5", "#808080",
)  # fmt: skip

_STYLE: Final[dict[str, Any]] = {
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "heads_kernels",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    **dict.fromkeys(
        (
            "text.color",
            "axes.labelcolor",
            "axes.edgecolor",
            "axes.titlecolor",
            "xtick.color",
            "ytick.color",
            "grid.color",
        ),
        GREY,
    ),
}


def save(draw: Draw, settings: Mapping[str, Any], runs: Mapping[str, Any], path: Path) -> None:
    """Draw an experiment into an SVG file, written whole."""
    text = io.StringIO()
    with mpl.rc_context(_STYLE):
        draw(settings, runs).savefig(text, format="svg", transparent=True, metadata={"Date": None})
    write_whole(path, text.getvalue())


def line(
    axes: Axes, x: Sequence[float], values: Sequence[Sequence[float]], color: str, label: str,
    **style: Any,
) -> None:  # fmt: skip
    """The mean of each place's values as a line, and each value as a small mark."""
    means = [sum(each) / len(each) for each in values]
    axes.plot(x, means, color=color, label=label, lw=1.6, **style)
    for place, each in zip(x, values, strict=True):
        axes.plot([place] * len(each), each, "o", color=color, markersize=3, alpha=0.7)
