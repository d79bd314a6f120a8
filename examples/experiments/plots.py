"""Figures: one style, a message as the title of each panel, SVG that is the same file for the same results."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from benchmarks.results import write_whole

Draw = Callable[[Mapping[str, Any], Mapping[str, Any]], Figure]

#: Colors that color-blind readers tell apart; they and the grey have a contrast of 3 or more on white.
BLUE, ORANGE, PURPLE, GREEN, GREY = "#2f6fc4", "#c9520f", "#a83279", "#1b8a5e", "#5a6572"
#: Of layers: the deeper, the darker.
DEPTH: Final = LinearSegmentedColormap.from_list("depth", ["#6ea6da", "#3b7cc0", "#0d2d5c"])
_INK: Final = "#1c2733"

_STYLE: Final[dict[str, Any]] = {
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "heads_kernels",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "grid.color": "#e3e7ec",
    "legend.frameon": False,
    "legend.fontsize": 8,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}
#: A figure has its own background, so that it is readable on any page; a dark one where that is preferred.
_DARK: Final = (
    "@media (prefers-color-scheme: dark) { svg { filter: invert(.9) hue-rotate(180deg) } }"
)


def save(draw: Draw, settings: Mapping[str, Any], runs: Mapping[str, Any], path: Path) -> None:
    """Draw an experiment into an SVG file, written whole."""
    text = io.StringIO()
    with mpl.rc_context(_STYLE):
        draw(settings, runs).savefig(text, format="svg", facecolor="white", metadata={"Date": None})
    write_whole(path, text.getvalue().replace("</style>", f"\n{_DARK}</style>", 1))


def message(axes: Axes, text: str) -> None:
    """The title of a panel, in lines as wide as the panel."""
    figure = axes.get_figure()
    columns = axes.get_subplotspec().get_gridspec().ncols
    letters = int(figure.get_figwidth() / columns / 0.097)  # inches of a letter, and of the margins
    axes.set_title(textwrap.fill(text.replace(" %", "\N{NO-BREAK SPACE}%"), letters))


def line(
    axes: Axes, x: Sequence[float], values: Sequence[Sequence[float]], color: str, label: str,
    **style: Any,
) -> None:  # fmt: skip
    """The mean of each place's values as a line, and each value as a small mark."""
    means = [sum(each) / len(each) for each in values]
    axes.plot(x, means, color=color, label=label, lw=1.6, **style)
    for place, each in zip(x, values, strict=True):
        axes.plot([place] * len(each), each, "o", color=color, markersize=3, alpha=0.7)


def legend(axes: Axes, **where: Any) -> None:
    """The lines of a panel, and what a mark is."""
    axes.plot([], [], "o", color=GREY, markersize=3, label="one seed;\nlines are means")
    axes.legend(**where)
