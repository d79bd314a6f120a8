"""Reports of a conversion: errors, parameters and FLOPs of each layer and the model, and their plot."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from heads_kernels.analysis.head_scores import short_name, text_table
from heads_kernels.checks import refuse
from heads_kernels.convert.curves import Curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: Below it a relative error is rounding: of a difference of squares in float64, and of weights in float32.
_ROUNDING: Final = 1e-7


@dataclass(frozen=True)
class Report:
    """One layer before and after.

    Attributes:
        dim: Ds.
        features: number of features that each head uses.
        executed_features: features that the scores of all heads use, in whole chunks; `H D` before conversion.
        error: relative error of the scores on the calibration inputs, or of the weights without calibration.
        parameters_before, parameters: of queries and keys, content weights and mixing.
        length: input length for which FLOPs are counted.
        flops_before, flops: of the forward pass of its self-attention, 2 per multiply-add, with values as wide as keys;
            the softmax and rotation do not count.
        break_even: the length below which it takes fewer FLOPs than before, mixing and content left out; infinite if
            scores cost no more, 0 if projections save nothing.
    """

    dim: int
    features: tuple[int, ...]
    executed_features: int
    error: float
    parameters_before: int
    parameters: int
    length: int
    flops_before: int
    flops: int
    break_even: float

    @classmethod
    def of(cls, heads: Any, factors: Any, *, Hk: int | None = None, length: int = 128) -> Report:
        """The report of `factors` of `heads`; Hk key heads, None means H."""
        sizes = replace(heads.sizes, Hk=Hk)
        Ds, used = factors.dim, factors.executed_features
        return cls(
            dim=Ds,
            features=tuple(factors.features),
            executed_features=used,
            error=factors.error,
            parameters_before=sizes.parameters(),
            parameters=sizes.parameters(Ds),
            length=length,
            flops_before=sizes.flops(length),
            flops=sizes.flops(length, Ds, used),
            break_even=sizes.break_even(Ds, used),
        )

    @property
    def exact(self) -> bool:
        """Whether the layer computes the same as before, up to rounding of its weights."""
        return self.error < _ROUNDING

    @property
    def row(self) -> tuple[str, ...]:
        """The row of the table; the features of a head are a number, or a range."""
        fewest, most = min(self.features), max(self.features)
        return (
            str(self.dim),
            str(most) if fewest == most else f"{fewest} to {most}",
            str(self.executed_features),
            "exact" if self.exact else f"{self.error:.3f}",
            f"{self.parameters_before:,} -> {self.parameters:,}",
            f"{self.flops_before / 1e6:.1f} -> {self.flops / 1e6:.1f}",
            "always" if math.isinf(self.break_even) else f"{self.break_even:.0f}",
        )


@dataclass(frozen=True, eq=False, repr=False)
class Conversion:
    """The result of a conversion; `print` shows a table, `hk.convert.plot` draws it.

    Attributes:
        method: "cp" or "ragged".
        layers: names of the converted layers.
        reports: one per layer.
        curves: errors at other dims.
        parameters_before, parameters: of the whole model.
    """

    method: str
    layers: tuple[str, ...]
    reports: tuple[Report, ...]
    curves: Curves
    parameters_before: int
    parameters: int

    @property
    def dims(self) -> tuple[int, ...]:
        """Ds of each layer."""
        return tuple(report.dim for report in self.reports)

    @property
    def errors(self) -> tuple[float, ...]:
        """Relative error of the scores of each layer, or of the weights without calibration."""
        return tuple(report.error for report in self.reports)

    @property
    def error(self) -> float:
        """Relative error of all layers together."""
        squares = self.curves.squares
        cut = sum(map(operator.mul, squares, (error**2 for error in self.errors)))
        return math.sqrt(cut / sum(squares)) if any(squares) else 0.0

    @property
    def flops_before(self) -> int:
        """Of all layers, for one input of the length of the reports."""
        return sum(report.flops_before for report in self.reports)

    @property
    def flops(self) -> int:
        return sum(report.flops for report in self.reports)

    def __repr__(self) -> str:
        flops = f"MFLOPs at T = {self.reports[0].length}"
        header = (
            "layer",
            "Ds",
            "of a head",
            "executed",
            "error",
            "parameters",
            flops,
            "fewer below T",
        )
        rows = [(name, *report.row) for name, report in zip(self.layers, self.reports, strict=True)]
        parameters = f"{self.parameters_before:,} -> {self.parameters:,}"
        spent = f"{self.flops_before / 1e6:.1f} -> {self.flops / 1e6:.1f}"
        return (
            f"{text_table([header, *rows], left=1)}\n{self.method}, all layers: relative error "
            f"{self.error:.3f}, {flops} {spent}\nparameters of the model: {parameters}"
        )


def plot(shown: Curves | Conversion) -> Figure:
    """Plot errors over the number of features, for layers from dark to light, and the choice of a conversion.

    The first panel shows the relative errors (`Curves.errors`), with a dot for each converted layer, below
    its curve if features are shared (`cp`). The second shows the captured energy of `W_Q^T W_K` over its dimensions
    (Cordonnier et al. 2020, figure 1), of all heads together and the mean of single heads.

    Args:
        shown: the result of `curves` or `collaborate`.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: `shown` is something else.
    """
    if not isinstance(shown, (Curves, Conversion)):
        instead = "pass the result of hk.convert.curves or hk.convert.collaborate"
        refuse("shown", f"is a {type(shown).__name__}", instead, TypeError)
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("hk.convert.plot needs matplotlib: pip install matplotlib") from error
    curves = shown.curves if isinstance(shown, Conversion) else shown
    count = len(curves.layers)
    colors = [colormaps["viridis"](0.9 * place / max(1, count - 1)) for place in range(count)]
    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    axes = figure.subplots(1, 2)
    _draw_errors(axes[0], curves, colors)
    _draw_energy(axes[1], curves, colors)
    if isinstance(shown, Conversion):
        for report, color in zip(shown.reports, colors, strict=True):
            axes[0].plot(report.dim, report.error, "o", color=color)
    for each in axes:
        each.grid(alpha=0.3)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_errors(axes: Any, curves: Curves, colors: list[Any]) -> None:
    named = {curves.layers[0], curves.layers[-1]}
    for layer, curve, color in zip(curves.layers, curves.errors, colors, strict=True):
        axes.plot(curve, color=color, label=short_name(layer) if layer in named else None)
    axes.set(title="relative error", xlabel="features", ylim=(0, None))
    axes.legend(frameon=False, fontsize="small")


def _draw_energy(axes: Any, curves: Curves, colors: list[Any]) -> None:
    for place, (energy, color) in enumerate(zip(curves.energy, colors, strict=True)):
        if energy is None:
            continue
        for held, style, label in (
            (energy.stacked_product, "-", "all heads together"),
            (energy.product.mean(0), "--", "single heads"),
        ):
            shares = [(n + 1) / len(held) for n in range(len(held))]
            axes.plot(shares, held.cpu(), style, color=color, label=None if place else label)
    axes.set(title="captured energy", xlabel="share of the dimensions", ylim=(0, 1.02))
    if any(curves.energy):
        axes.legend(frameon=False)
