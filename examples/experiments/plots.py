"""What figures of experiments share besides the style of `benchmarks.figures`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from benchmarks import figures
from benchmarks.figures import GREY

Draw = Callable[[Mapping[str, Any], Mapping[str, Any]], Figure]

#: Colors of layers: the deeper, the darker.
DEPTH: Final = LinearSegmentedColormap.from_list("depth", ["#6ea6da", "#3b7cc0", "#0d2d5c"])


def save(draw: Draw, settings: Mapping[str, Any], runs: Mapping[str, Any], path: Path) -> None:
    """Draw an experiment into an SVG file; an error leaves no partial file."""
    with mpl.rc_context(figures.STYLE):
        figures.save(draw(settings, runs), path)


def line(
    axes: Axes, x: Sequence[float], values: Sequence[Sequence[float]], color: str, label: str,
    **style: Any,
) -> None:  # fmt: skip
    """Plot the mean of the values at each x as a line, and each value as a small mark."""
    means = [sum(each) / len(each) for each in values]
    axes.plot(x, means, color=color, label=label, lw=1.6, **style)
    for place, each in zip(x, values, strict=True):
        axes.plot([place] * len(each), each, "o", color=color, markersize=3, alpha=0.7)


def legend(axes: Axes, **where: Any) -> None:
    """Add the legend of a panel: its lines, and the meaning of marks."""
    axes.plot([], [], "o", color=GREY, markersize=3, label="one seed;\nlines are means")
    axes.legend(**where)
