"""The attention maps of a sentence as pictures."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

from heads_kernels.report.drawing import WIDTH, canvas, scale
from heads_kernels.report.pictures import Findings, by_layer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def all_maps(found: Findings) -> Figure:
    """The maps of all heads, small: one image, with gaps between them."""
    import numpy as np

    shown, T = found["maps"]["layers"], len(found["maps"]["tokens"])
    L, H, gap = len(shown), max(layer["heads"] for layer in shown), max(1, T // 12)
    table = np.full((L * (T + gap) - gap, H * (T + gap) - gap), np.nan)
    for line, layer in enumerate(shown):
        for head in range(layer["heads"]):
            y, x = line * (T + gap), head * (T + gap)
            table[y : y + T, x : x + T] = found["maps"]["attention"][line][0][head]
    cell = min(1.3, (WIDTH - 1.2) / H)
    figure, axes = canvas(1, 1, (max(H * cell, 2.5) + 1.2, max(L * cell, 2.2) + 0.8))
    (panel,) = axes.flat
    _map(panel, table)
    middle = (T - 1) / 2
    heads = range(0, H, ceil(0.2 / cell))
    panel.set_xticks([head * (T + gap) + middle for head in heads], map(str, heads))
    names = [str(layer["layer"]) for layer in shown]
    panel.set_yticks([line * (T + gap) + middle for line in range(L)], names)
    panel.set(title="Who looks at whom, every head", xlabel="head", ylabel="layer")
    _key(figure, [panel])
    return figure


def chosen_maps(found: Findings) -> Figure:
    """The maps of the heads under "heads", large, with the tokens beside them."""
    import numpy as np

    tokens, T = found["maps"]["tokens"], len(found["maps"]["tokens"])
    heads = found["maps"]["heads"] or sharpest(found)
    line = {layer["layer"]: n for n, layer in enumerate(found["maps"]["layers"])}
    across = 3 if T <= 16 else 2 if T <= 40 else 1
    columns, side = min(len(heads), across), WIDTH / across
    rows = ceil(len(heads) / columns)
    figure, axes = canvas(rows, columns, (columns * side + 0.6, rows * side))
    size = min(8.0, 72 * (side - 1) / T / 1.25)  # points
    for panel, (layer, head) in zip(axes.flat, heads, strict=False):
        _map(panel, np.array(found["maps"]["attention"][line[layer]][0][head]))
        panel.set(title=f"layer {layer}, head {head}", xlabel="looks at", ylabel="token")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_ticks(range(T), tokens, fontsize=size, parse_math=False)
        panel.tick_params(axis="x", rotation=90)
    for unused in list(axes.flat)[len(heads) :]:
        unused.set_visible(False)
    _key(figure, list(axes.flat))
    return figure


def sharpest(found: Findings, most: int = 12) -> list[tuple[int, int]]:
    """Of at most so many layers, evenly chosen, the head with the highest confidence.

    On the text; in this sentence where there are no statistics of the layer.
    """
    on_text = by_layer(found, "statistics", "confidence") if "statistics" in found else []
    shown = list(zip(found["maps"]["layers"], found["maps"]["attention"], strict=True))
    chosen = []
    for layer, (maps,) in shown[:: ceil(len(shown) / most)]:
        here = [sum(map(max, maps[head])) for head in range(layer["heads"])]
        sharp = dict(enumerate(on_text)).get(layer["layer"], here)
        chosen.append((layer["layer"], sharp.index(max(sharp))))
    return chosen


def _map(axes: Axes, table: Any) -> None:
    """Per cent of attention; what is small is told apart as well."""
    from matplotlib.colors import PowerNorm

    axes.imshow(100 * table, cmap=scale(), norm=PowerNorm(0.5, 0, 100), interpolation="nearest")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _key(figure: Figure, axes: list[Axes]) -> None:
    """What the colors of `_map` mean, once."""
    bar = figure.colorbar(axes[0].images[0], ax=axes, fraction=0.02, pad=0.015, aspect=30)
    bar.set_ticks([0, 1, 5, 10, 25, 50, 75, 100])
    bar.set_label("% of the row's attention")
    bar.outline.set_visible(False)
