"""What conversion reports: error curves before it, errors, parameters and FLOPs after it, and their plot."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from heads_kernels.analysis.head_scores import short_name, text_table
from heads_kernels.checks import refuse_type
from heads_kernels.convert.budget import Sizes
from heads_kernels.convert.features import SharedFeatures, Spectrum
from heads_kernels.convert.heads import Heads
from heads_kernels.convert.rotary import AnyHeads

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: Below it a relative error is rounding: of a difference of squares in float64, and of weights in float32.
_ROUNDING: Final = 1e-7


# ---------------------------------------------------------------------- before conversion
@dataclass(frozen=True, eq=False)
class CapturedEnergy:
    """Shares of the squared singular values that the first 1, 2, ... dimensions hold, float64, rising to 1.

    The product of a head, `W_Q^hT W_K^h`, is what its scores are made of: unlike its factors it is the same for heads
    whose queries and keys are rotated alike.
    """

    query: Tensor  # [H, min(D, D_in)], of every head's query weights
    key: Tensor  # likewise
    product: Tensor
    stacked_query: Tensor  # [min(H D, D_in)], of the query weights of all heads
    stacked_key: Tensor  # likewise
    stacked_product: Tensor  # of `W_Q^T W_K`, the sum of all heads' products


def captured_energy(heads: Heads) -> CapturedEnergy:
    """The curves of figure 1 of Cordonnier et al. 2020: single heads are near full rank, all together are not."""
    return CapturedEnergy(
        *_captured(heads.query, heads.key), *_captured(heads.query.flatten(0, 1), heads.key.flatten(0, 1))
    )


def _captured(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows `[..., D, D_in]`, of `[..., D, D_in_k]` and of their product, whose QR factors are thin."""
    query_r, key_r = (torch.linalg.qr(rows.mT, mode="r").R for rows in (query, key))
    product = query_r @ key_r.mT
    return _share(query_r), _share(key_r), _share(product)


def _share(matrices: Tensor) -> Tensor:
    held = torch.linalg.svdvals(matrices).square().cumsum(-1)
    return torch.where(held[..., -1:] == 0, 1.0, held / held[..., -1:])


@dataclass(frozen=True, eq=False)
class Curves:
    """Error curves of the layers of a model before conversion.

    Attributes:
        layers: their names.
        errors: `[R + 1]` per layer: the relative error of the scores with 0 to R features, or of the weights without
            calibration. It is that of `"ragged"`, and that of `"cp"` is below it; after a conversion with `"cp"` that
            of a layer with rotary positions is the least that any shared features could have.
        squares: per layer, the mean square of the scores of all heads, scale included, that the error is relative to.
        energy: per layer, the `CapturedEnergy` of the weights; None with rotary positions.
    """

    layers: tuple[str, ...]
    errors: tuple[Tensor, ...]
    squares: tuple[float, ...]
    energy: tuple[CapturedEnergy | None, ...]

    @classmethod
    def of(cls, layers: Sequence[str], heads: Sequence[AnyHeads], spectra: Sequence[Spectrum]) -> Curves:
        energy = (captured_energy(each) if isinstance(each, Heads) else None for each in heads)
        return cls(
            layers=tuple(layers),
            errors=tuple(spectrum.errors().cpu() for spectrum in spectra),
            squares=tuple(spectrum.score_square for spectrum in spectra),
            energy=tuple(energy),
        )


# ---------------------------------------------------------------------- after it
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
    def of(cls, sizes: Sizes, factors: SharedFeatures, length: int) -> Report:
        """The report of a layer of these sizes that gets `factors`."""
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
        header = ("layer", "Ds", "of a head", "executed", "error", "parameters", flops, "fewer below T")
        rows = [(name, *report.row) for name, report in zip(self.layers, self.reports, strict=True)]
        parameters = f"{self.parameters_before:,} -> {self.parameters:,}"
        spent = f"{self.flops_before / 1e6:.1f} -> {self.flops / 1e6:.1f}"
        return (
            f"{text_table([header, *rows], left=1)}\n{self.method}, all layers: relative error "
            f"{self.error:.3f}, {flops} {spent}\nparameters of the model: {parameters}"
        )


# ---------------------------------------------------------------------- the plot
def plot(shown: Curves | Conversion) -> Figure:
    """A figure of errors over the number of features, for layers from dark to light, and the choice of a conversion.

    The first panel shows the relative errors (`Curves.errors`), with a dot for each converted layer, below
    its curve if features are shared (`cp`). The second shows the captured energy of `W_Q^T W_K` over its dimensions
    (Cordonnier et al. 2020, figure 1), of all heads together and the mean of single heads.

    Args:
        shown: the result of `curves` or `collaborate`.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: `shown` is something else.
    """
    if not isinstance(shown, (Curves, Conversion)):
        refuse_type("shown", shown, "pass the result of hk.convert.curves or hk.convert.collaborate")
    from matplotlib import colormaps
    from matplotlib.figure import Figure

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
