"""Draws the pictures of a report: grids of heads, points by layer, curves and attention maps.

Pictures are drawn dark on light with a transparent background; the page inverts them in dark mode and writes their
titles above them.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colors that color-blind readers tell apart, with a contrast of 3 or more on white, and on black when inverted.
BLUE, ORANGE, GREY = "#2f6fc4", "#c9520f", "#5a6572"
#: From near white to navy: the scale of all values, readable without color.
SCALE: Final = ("#f6f8fb", "#dbe8f6", "#a9cbea", "#6ea6da", "#3b7cc0", "#1f5496", "#0d2d5c")
#: The same without the palest: colors of layers, for lines and points.
DEPTH: Final = SCALE[3:]
INK: Final = "#1c2733"
NO_HEAD: Final = "#eceae4"
WIDTH: Final = (
    4.9  # inches: 470 CSS pixels, two pictures side by side on a wide screen, one on a phone
)
#: Most curves in a plot: with a level they are five lines, which can be distinguished.
MOST_CURVES: Final = 4

STYLE: Final[Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text: the browser has fonts for all tokens
    "svg.hashsalt": "heads_kernels",  # the same results give the same file
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e3e7ec",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.edgecolor": GREY,
}


@dataclass(frozen=True)
class Picture:
    """A picture of one panel.

    Attributes:
        message: its title, a sentence that says what it shows.
        seen: its alternative text, with the main numbers.
        figure: the picture.
        wide: whether it has the full width of the page.
    """

    message: str
    seen: str
    figure: Figure
    wide: bool = False


def canvas(height: float) -> tuple[Figure, Axes]:
    """A figure with one pair of axes, `WIDTH` by `height` inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def svg(figure: Figure) -> str:
    text = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a token that the font of the layout lacks
        figure.savefig(text, format="svg", transparent=True, dpi=200, metadata=nothing)
    return text.getvalue()


def scale(colors: Sequence[str] = SCALE) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("heads", list(colors))


# ---------------------------------------------------------------------- heads as a grid
def grid(
    message: str,
    what: str,
    values: list[list[float]],
    unit: str,
    form: str = "{:.0f}",
    words: list[list[str]] | None = None,
    top: float | None = None,
    framed: Collection[tuple[int, int]] = (),
) -> Picture:
    """A cell for each head, layers downwards.

    Args:
        message: title of the picture.
        what: what the values are, for the alternative text.
        values: `[L][H]`.
        unit: of the values, beside the color scale.
        form: format of the numbers in the cells, which are left out where cells are small.
        words: `[L][H]`, shown in the cells instead of the numbers.
        top: the value of the darkest color; default the largest.
        framed: the (layer, head) that get a frame.
    """
    import numpy as np
    from matplotlib.patches import Rectangle

    L, H = len(values), max(map(len, values))
    across = (WIDTH - 1.2) / H  # inches of a cell
    down = min(max(across, 0.16), 0.4)
    figure, axes = canvas(max(L * down, 1.2) + 0.55)
    table = np.array([row + [np.nan] * (H - len(row)) for row in values])
    top = top or max(float(np.nanmax(table)), 1e-12)
    colors = scale().with_extremes(bad=NO_HEAD)
    image = axes.imshow(table, cmap=colors, vmin=0, vmax=top, aspect="auto")
    axes.set(xlabel="head", ylabel="layer")
    for axis, count, size in ((axes.xaxis, H, across), (axes.yaxis, L, down)):
        axis.set_ticks(range(0, count, ceil(0.2 / size)))
        axis.set_ticks([place - 0.5 for place in range(1, count)], minor=True)
    axes.tick_params(which="both", length=0)
    axes.grid(which="minor", color="white", linewidth=1.2)
    axes.spines[:].set_visible(False)
    _colorbar(axes, image, unit)
    written = words or [[form.format(value) for value in row] for row in values]
    for layer, row in enumerate(written if across >= 0.22 else []):
        for head, word in enumerate(row):
            color = "white" if values[layer][head] > 0.55 * top else INK
            axes.text(head, layer, word, ha="center", va="center", color=color, fontsize=7)
    for layer, head in framed:
        corner = (head - 0.46, layer - 0.46)
        axes.add_patch(Rectangle(corner, 0.92, 0.92, fill=False, ec=ORANGE, lw=2))
    every = sorted(_heads(values), reverse=True)
    high = ", ".join(f"{name} ({form.format(value)})" for value, name in every[:3])
    middle, (low, lowest) = median(value for value, _ in every), every[-1]
    seen = (
        f"Grid of {L} layers by {H} heads: {what}, {unit}. Highest: {high}; median {form.format(middle)}; "
        f"lowest: {lowest} ({form.format(low)})."
    )
    return Picture(message, seen, figure)


def _heads(values: list[list[float]]) -> list[tuple[float, str]]:
    """The value and the name, layer:head, of each head."""
    return [
        (value, f"{layer}:{head}")
        for layer, row in enumerate(values)
        for head, value in enumerate(row)
    ]


def _colorbar(axes: Axes, colors: Any, unit: str) -> Any:
    bar = axes.figure.colorbar(colors, cax=axes.inset_axes((1.02, 0, 0.025, 1)))
    bar.set_label(unit)
    bar.outline.set_visible(False)
    return bar


# ---------------------------------------------------------------------- points and curves
def by_depth(what: str, values: list[list[float]], unit: str, form: str) -> Picture:
    """A point for each head by layer, the highest of each layer labeled, and the means of the layers as a line."""
    figure, axes = canvas(3.2)
    point: dict[str, Any] = {"color": BLUE, "alpha": 0.55, "markersize": 4.5, "markeredgewidth": 0}
    for layer, row in enumerate(values):
        middle = (len(row) - 1) / 2
        spread = [layer + (head - middle) * 0.4 / len(row) for head in range(len(row))]
        axes.plot(spread, row, "o", **point)
        if row and len(values) <= 12:
            head = row.index(max(row))
            _name(axes, layer, head, spread[head], row[head])
    means = {layer: mean(row) for layer, row in enumerate(values) if row}
    axes.plot([], [], "o", label="one head", **point)
    axes.plot([*means], [*means.values()], "o-", color=ORANGE, lw=2, markersize=4,
        label="mean of the layer")  # fmt: skip
    axes.set(
        xlabel="layer",
        ylabel=f"{what[0].lower()}{what[1:]}, {unit}",
        xlim=(-0.5, len(values) - 0.5),
    )
    axes.set_xticks(range(0, len(values), ceil(len(values) / 16)))
    high = max(max(row, default=0) for row in values) or 1
    axes.set_ylim(-0.02 * high, 1.1 * high)
    axes.grid(axis="y")
    figure.legend(loc="outside upper left", ncols=2)
    ends = dict.fromkeys((min(means), max(means)))
    said = ", ".join(f"{form.format(means[layer])} {unit} in layer {layer}" for layer in ends)
    every, (top, name) = ", ".join(map(form.format, means.values())), max(_heads(values))
    seen = (
        f"A point for each head over its layer; the means of the layers are {every} {unit}. "
        f"Highest: {name} ({form.format(top)})."
    )
    return Picture(f"{what}: {said}", seen, figure)


def scatter(
    points: Mapping[tuple[int, int], tuple[float, float]],
    xlabel: str,
    ylabel: str,
    named: Collection[tuple[int, int]] = (),
    logarithmic: bool = False,
) -> Figure:
    """Heads as points in the color of their layer; those in `named` are labeled layer:head."""
    figure, axes = canvas(3.6)
    layers = [layer for layer, _ in points]
    x, y = zip(*points.values(), strict=True)
    drawn = axes.scatter(x, y, s=26, c=layers, cmap=scale(DEPTH), edgecolors=INK, linewidths=0.5,
        vmin=0, vmax=max(*layers, 1))  # fmt: skip
    for layer, head in named:
        _name(axes, layer, head, *points[layer, head])
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if logarithmic:
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            _plain_ticks(axis)
    else:
        axes.set_aspect("equal", adjustable="datalim")
    axes.grid()
    bar = _colorbar(axes, drawn, "layer")
    bar.set_ticks(range(0, 1 + max(layers), ceil((1 + max(layers)) / 12)))
    return figure


def _name(axes: Axes, layer: int, head: int, x: float, y: float) -> None:
    axes.annotate(f"{layer}:{head}", (x, y), (4, 3), textcoords="offset points", fontsize=7.5)


def _plain_ticks(axis: Any) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, as plain numbers."""
    low, high = axis.get_view_interval()
    plain = [d * 10.0**n for n in range(-9, 3) for d in (1, 2, 5) if low < d * 10.0**n < high]
    axis.set_ticks(plain, [f"{tick:g}" for tick in plain])
    axis.set_ticks([], minor=True)


def curves_of_layers(
    curves: Mapping[int, Sequence[float]], xlabel: str, ylabel: str, level: tuple[float, str] | None
) -> Figure:
    """A curve for each of at most `MOST_CURVES` layers, deeper ones darker; x is % of the length of a curve."""
    figure, axes = canvas(3.4)
    layers = evenly(list(curves), MOST_CURVES)
    colors = scale(DEPTH)
    for layer in layers:
        curve = curves[layer]
        share = [100 * count / (len(curve) - 1) for count in range(len(curve))]
        color = colors(layer / max(*curves, 1))
        axes.plot(
            share, [100 * value for value in curve], color=color, lw=1.8, label=f"layer {layer}"
        )
    if level:
        axes.axhline(level[0], color=ORANGE, lw=1, ls="--", label=level[1])
    axes.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, 100), ylim=(0, 102))
    axes.grid()
    axes.legend()
    return figure


def evenly(values: list[int], most: int) -> list[int]:
    """At most `most` of the values, evenly spaced, including the first and the last."""
    if len(values) <= most:
        return values
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]


# ---------------------------------------------------------------------- attention maps
def maps_of_heads(maps: list[list[Any]], layers: list[int]) -> Figure:
    """Small maps `[T, T]` of all heads: layers downwards, heads to the right."""
    import numpy as np

    T, L, H = len(maps[0][0]), len(maps), max(map(len, maps))
    gap = max(1, T // 12)
    table = np.full((L * (T + gap) - gap, H * (T + gap) - gap), np.nan)
    for line, row in enumerate(maps):
        for head, each in enumerate(row):
            y, x = line * (T + gap), head * (T + gap)
            table[y : y + T, x : x + T] = each
    cell = min(1.0, (WIDTH - 1.2) / H)
    figure, axes = canvas(max(L * cell, 1.6) + 0.6)
    image = _map(axes, table)
    middle, step = (T - 1) / 2, ceil(0.2 / cell)
    axes.set_xticks(
        [h * (T + gap) + middle for h in range(0, H, step)], map(str, range(0, H, step))
    )
    axes.set_yticks([n * (T + gap) + middle for n in range(0, L, step)], map(str, layers[::step]))
    axes.set(xlabel="head", ylabel="layer")
    _attention_key(axes, image)
    return figure


def map_of_head(rows: Any, tokens: list[str]) -> Figure:
    """The map `[T, T]` of one head, with as many tokens along both axes as are readable."""
    import numpy as np

    figure, axes = canvas(WIDTH - 0.6)
    image = _map(axes, np.array(rows))
    T, space = len(tokens), 72 * (WIDTH - 1.9) / 1.2  # points for the tokens
    step = ceil(6 * T / space)  # 6 points are readable
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(range(0, T, step), tokens[::step], fontsize=min(8.0, space * step / T),
            parse_math=False)  # fmt: skip
    axes.tick_params(axis="x", rotation=90)
    axes.set(xlabel="attends to", ylabel="token")
    _attention_key(axes, image)
    return figure


def _map(axes: Axes, table: Any) -> Any:
    """Draw attention in %, on a scale that shows small values too."""
    from matplotlib.colors import PowerNorm

    image = axes.imshow(
        100 * table, cmap=scale(), norm=PowerNorm(0.5, 0, 100), interpolation="nearest"
    )
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return image


def _attention_key(axes: Axes, image: Any) -> None:
    _colorbar(axes, image, "% of the row's attention").set_ticks([0, 1, 5, 10, 25, 50, 75, 100])
