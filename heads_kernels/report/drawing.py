"""How the pictures of a report look: their style, heads as a grid, and lines."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colors that color-blind eyes tell apart.
BLUE, ORANGE, PURPLE, GREY = "#2f6fc4", "#e0661b", "#a83279", "#7d8590"
#: From near white to ink, ever darker: the one scale of values, readable without color.
SCALE: Final = ("#f6f8fb", "#dbe8f6", "#a9cbea", "#6ea6da", "#3b7cc0", "#1f5496", "#0d2d5c")
#: From light to dark without the palest: of layers, as colors of lines and points.
DEPTH: Final = SCALE[2:]
INK: Final = "#1c2733"
NOTHING: Final = "#eceae4"  # where there is no head
WIDTH: Final = 10.0  # inches, of every picture of more than one panel

STYLE: Final[Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e3e7ec",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.edgecolor": GREY,
}


def canvas(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, Any]:
    """A figure of so many inches, and its panels `[rows, columns]`."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.04, hspace=0.06)
    figure = Figure(figsize=size, layout=layout)
    return figure, figure.subplots(rows, columns, squeeze=False)


def png(figure: Figure) -> bytes:
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of a token that the font lacks
        figure.savefig(content, format="png", dpi=160, metadata={"Software": None})
    return content.getvalue()


def scale(colors: Sequence[str] = SCALE) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("heads", list(colors))


# ---------------------------------------------------------------------- heads as a grid
@dataclass(frozen=True)
class Panel:
    """Values of all heads, `[L][H]`, and what is written over them: by a form or in other words, `[L][H]` too."""

    title: str
    unit: str
    values: list[list[float]]
    form: str = "{:.0f}"
    words: list[list[str]] | None = None

    @property
    def written(self) -> list[list[str]]:
        return self.words or [[self.form.format(value) for value in row] for row in self.values]


def grids(
    panels: Sequence[Panel], columns: int = 2, top: float | None = None
) -> tuple[Figure, list[Axes]]:
    """A cell for each head, with what is written over it where there is room.

    Args:
        panels: what to draw.
        columns: panels in a row.
        top: the darkest value of all panels; default the largest of each.

    Returns:
        The figure and all its axes, those without a panel hidden.
    """
    L, H = len(panels[0].values), max(map(len, panels[0].values))
    across = (WIDTH / columns - 1.15) / H  # inches of a cell
    down = min(across, 0.45)
    rows = ceil(len(panels) / columns)
    figure, axes = canvas(rows, columns, (WIDTH, rows * (max(L * down, 1.5) + 0.85)))
    flat = list(axes.flat)
    for each, panel in zip(flat, panels, strict=False):
        _grid(each, panel, top, words=across >= 0.22)
        for axis, count, size in ((each.xaxis, H, across), (each.yaxis, L, down)):
            axis.set_ticks(range(0, count, ceil(0.2 / size)))
            axis.set_ticks([place - 0.5 for place in range(1, count)], minor=True)
    for unused in flat[len(panels) :]:
        unused.set_visible(False)
    return figure, flat


def _grid(axes: Axes, panel: Panel, top: float | None, words: bool) -> None:
    import numpy as np

    values, H = panel.values, max(map(len, panel.values))
    table = np.array([row + [np.nan] * (H - len(row)) for row in values])
    top = top or max(float(np.nanmax(table)), 1e-12)
    colors = scale().with_extremes(bad=NOTHING)
    image = axes.imshow(table, cmap=colors, vmin=0, vmax=top, aspect="auto")
    axes.set(title=panel.title, xlabel="head", ylabel="layer")
    axes.tick_params(which="both", length=0)
    axes.grid(which="minor", color="white", linewidth=1.2)
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(image, cax=axes.inset_axes((1.02, 0, 0.025, 1)))
    bar.set_label(panel.unit)
    bar.outline.set_visible(False)
    for layer, row in enumerate(panel.written if words else []):
        for head, word in enumerate(row):
            color = "white" if values[layer][head] > 0.55 * top else INK
            axes.text(head, layer, word, ha="center", va="center", color=color, fontsize=7)


# ---------------------------------------------------------------------- layers, as lines and points
def of_layers(layers: int) -> list[Any]:
    """A color for each layer, the deeper the darker."""
    colors = scale(DEPTH)
    return [colors(layer / max(layers - 1, 1)) for layer in range(layers)]


def layer_name(layer: int, layers: int) -> str | None:
    """For the legend: of at most twelve layers, evenly chosen."""
    return None if layer % ceil(layers / 12) else f"layer {layer}"


def by_depth(
    axes: Axes, values: list[list[float]], title: str, unit: str, odd: bool = False
) -> None:
    """A point for each head over its layer, and the mean of each layer as a line; `odd` names the highest heads."""
    point: dict[str, Any] = {"color": BLUE, "alpha": 0.55, "markersize": 4.5, "markeredgewidth": 0}
    mean: dict[str, Any] = {"color": ORANGE, "lw": 2, "markersize": 4}
    for layer, row in enumerate(values):
        middle = (len(row) - 1) / 2
        spread = [layer + (head - middle) * 0.4 / len(row) for head in range(len(row))]
        axes.plot(spread, row, "o", **point)
        if odd and row and len(values) <= 12:
            head = row.index(max(row))
            axes.annotate(f"{layer}:{head}", (spread[head], row[head]), fontsize=7.5,
                xytext=(4, 3), textcoords="offset points")  # fmt: skip
    there = [(layer, sum(row) / len(row)) for layer, row in enumerate(values) if row]
    axes.plot(*zip(*there, strict=True), "o-", **mean)
    axes.plot([], [], "o", label="one head", **point)
    axes.plot([], [], "o-", label="mean of the layer", **mean)
    axes.set(title=title, xlabel="layer", ylabel=unit, xlim=(-0.5, len(values) - 0.5))
    axes.set_xticks(range(0, len(values), ceil(len(values) / 16)))
    high = max(max(row, default=0) for row in values) or 1
    axes.set_ylim(-0.02 * high, 1.1 * high)
    axes.grid(axis="y")
    axes.legend(fontsize=8)
