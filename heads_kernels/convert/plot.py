"""Pictures of a conversion, and of what to choose before one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from heads_kernels.analysis.figures import check_figure_path, write_figure
from heads_kernels.convert.conversion import Conversion
from heads_kernels.convert.curves import Curves
from heads_kernels.errors import refuse

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(shown: Curves | Conversion, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draw what each number of features keeps, layer by layer from dark to light, and what a conversion chose.

    The first panel has the relative errors (`Curves.errors`), with a dot for each converted layer: below
    its curve where features are shared (`cp`). The second has the captured energy of `W_Q^T W_K` over its dimensions
    (Cordonnier et al. 2020, figure 1): of all heads together, and of single heads, the mean. The third, of a
    conversion, has the features of every layer before those with which it would be exact.

    Args:
        shown: what `curves` or `collaborate` gave.
        path: of a file to write as well, PNG, SVG or PDF by its ending.

    Returns:
        The figure; notebooks show it.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: `shown` is something else.
        ValueError: a `path` of another ending, or in a folder that doesn't exist.
    """
    if not isinstance(shown, (Curves, Conversion)):
        instead = "pass what hk.convert.curves or hk.convert.collaborate gave"
        refuse("shown", f"is a {type(shown).__name__}", instead, TypeError)
    path = check_figure_path(path)
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("hk.convert.plot needs matplotlib: pip install matplotlib") from error
    conversion = shown if isinstance(shown, Conversion) else None
    curves = shown.curves if isinstance(shown, Conversion) else shown
    count = len(curves.layers)
    colors = [colormaps["viridis"](0.9 * place / max(1, count - 1)) for place in range(count)]
    panels = 2 if conversion is None else 3
    figure = Figure(figsize=(4.2 * panels, 3.8), layout="constrained")
    axes = figure.subplots(1, panels)
    _draw_errors(axes[0], curves, colors)
    _draw_energy(axes[1], curves, colors)
    if conversion is not None:
        _draw_choice(axes[0], axes[2], conversion, colors)
    for each in axes:
        each.grid(alpha=0.3)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    if path is not None:
        write_figure(figure, path)
    return figure


def _draw_errors(axes: Any, curves: Curves, colors: list[Any]) -> None:
    for place, (curve, color) in enumerate(zip(curves.errors, colors, strict=True)):
        shown = place in (0, len(colors) - 1)
        axes.plot(curve, color=color, label=f"layer {place}" if shown else None)
    axes.set(title="relative error", xlabel="features", ylim=(0, None))
    axes.legend(frameon=False)


def _draw_energy(axes: Any, curves: Curves, colors: list[Any]) -> None:
    for place, (energy, color) in enumerate(zip(curves.energy, colors, strict=True)):
        for held, style, label in (
            (energy.stacked_product, "-", "all heads together"),
            (energy.product.mean(0), "--", "single heads"),
        ):
            shares = [(n + 1) / len(held) for n in range(len(held))]
            axes.plot(shares, held.cpu(), style, color=color, label=None if place else label)
    axes.set(title="captured energy", xlabel="share of the dimensions", ylim=(0, 1.02))
    axes.legend(frameon=False)


def _draw_choice(errors: Any, axes: Any, conversion: Conversion, colors: list[Any]) -> None:
    """A dot for every layer among the errors, and its features as bars."""
    for dim, error, color in zip(conversion.dims, conversion.errors, colors, strict=True):
        errors.plot(dim, error, "o", color=color)
    places = range(len(colors))
    whole = [int((curve > 1e-9).sum()) for curve in conversion.curves.errors]
    axes.bar(places, whole, color="0.9")
    axes.bar(places, conversion.dims, color=colors)
    title = f"{sum(conversion.dims)} of {sum(whole)} features"
    axes.set(title=title, xlabel="layer", ylabel="features")
