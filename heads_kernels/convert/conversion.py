"""What a conversion did to each layer and to the model: errors, parameters, FLOPs, and a picture of them."""

from __future__ import annotations

import math
import operator
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from heads_kernels.analysis.figures import check_figure_path, write_figure
from heads_kernels.analysis.head_scores import text_table
from heads_kernels.checks import refuse
from heads_kernels.convert.counts import break_even, count_flops, count_parameters
from heads_kernels.convert.curves import Curves
from heads_kernels.convert.factors import Factors, score_error, weight_error
from heads_kernels.convert.heads import Heads
from heads_kernels.convert.moments import Moments

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Report:
    """One layer before and after.

    Attributes:
        dim: Ds.
        features: how many of them each head uses.
        executed_features: that the scores of all heads run over, in whole chunks; before it was `H D`.
        weight_error, score_error: as the functions of these names say; `score_error` is None without moments.
        parameters_before, parameters: of queries and keys, as `count_parameters` says. Values that were shared, which
            are repeated, are not in it.
        length: of the sentence that FLOPs are counted for.
        flops_before, flops: of its self-attention, as `count_flops` says, with values as wide as keys.
        break_even: the length below which there are fewer FLOPs than before, as `break_even` says.
    """

    dim: int
    features: tuple[int, ...]
    executed_features: int
    weight_error: float
    score_error: float | None
    parameters_before: int
    parameters: int
    length: int
    flops_before: int
    flops: int
    break_even: float

    @classmethod
    def of(
        cls,
        heads: Heads,
        factors: Factors,
        moments: Moments | None = None,
        *,
        Hk: int | None = None,
        length: int = 128,
    ) -> Report:
        """Of `factors` that were made from `heads`, their errors under `moments`; of Hk key heads, None means H."""
        D_in, D_k, H, D_in_k = heads.D_in, heads.D_k, heads.H, heads.D_in_k
        Ds, used = factors.dim, factors.executed_features
        bias = heads.query_bias is not None
        before = count_flops(length, length, D_in, D_k, H, D_in_k=D_in_k, Hk=Hk)
        after = count_flops(length, length, D_in, D_k, H, Ds, D_in_k=D_in_k, executed_features=used)
        return cls(
            dim=Ds,
            features=tuple(factors.features),
            executed_features=used,
            weight_error=weight_error(heads, factors),
            score_error=None if moments is None else score_error(heads, factors, moments),
            parameters_before=count_parameters(D_in, D_k, H, D_in_k=D_in_k, Hk=Hk, bias=bias),
            parameters=count_parameters(D_in, D_k, H, Ds, D_in_k=D_in_k),
            length=length,
            flops_before=before.total,
            flops=after.total,
            break_even=break_even(D_in, D_k, Ds, H, Hk=Hk, executed_features=used),
        )


#: A relative error that is nothing but rounding in float64, also of moments whose smallest directions weigh a
#: thousandth of the largest.
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, eq=False, repr=False)
class Conversion:
    """A converted model, before and after; `str` of it is a table, `hk.convert.plot` draws it.

    Attributes:
        method: "cp" or "ragged".
        layers: names of the converted layers.
        reports: one for each.
        curves: what other dims would have given.
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
    def exact(self) -> tuple[bool, ...]:
        """Of each layer, whether it computes what it did: its weights differ by rounding alone."""
        return tuple(report.weight_error < _ROUNDING for report in self.reports)

    @property
    def errors(self) -> tuple[float, ...]:
        """Relative error of the scores of each layer; of the weights, without calibration."""
        return tuple(
            report.weight_error if report.score_error is None else report.score_error
            for report in self.reports
        )

    @property
    def error(self) -> float:
        """That of all layers together."""
        squares = self.curves.squares
        cut = sum(map(operator.mul, squares, (error**2 for error in self.errors)))
        return math.sqrt(cut / sum(squares)) if any(squares) else 0.0

    @property
    def flops_before(self) -> int:
        """Of all layers, for one sentence of the length that the reports name."""
        return sum(report.flops_before for report in self.reports)

    @property
    def flops(self) -> int:
        return sum(report.flops for report in self.reports)

    def to_dict(self) -> dict[str, Any]:
        """In types of JSON; a break-even length that is infinite is None."""
        reports = [
            asdict(report)
            | {
                "features": list(report.features),
                "break_even": None if math.isinf(report.break_even) else report.break_even,
            }
            for report in self.reports
        ]
        return {
            "method": self.method,
            "parameters_before": self.parameters_before,
            "parameters": self.parameters,
            "flops_before": self.flops_before,
            "flops": self.flops,
            "error": self.error,
            "layers": {
                name: {"exact": exact, **report}
                for name, exact, report in zip(self.layers, self.exact, reports, strict=True)
            },
        }

    def __repr__(self) -> str:
        length = self.reports[0].length
        flops = f"MFLOPs at T = {length}"
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
        rows = [header, *map(_row, self.layers, self.reports, self.exact, self.errors)]
        of = "weights" if self.reports[0].score_error is None else "scores"
        parameters = f"{self.parameters_before:,} -> {self.parameters:,}"
        spent = f"{self.flops_before / 1e6:.1f} -> {self.flops / 1e6:.1f}"
        return (
            f"{text_table(rows, left=1)}\n{self.method}, all layers: relative error of the {of} "
            f"{self.error:.3f}, {flops} {spent}\nparameters of the model: {parameters}"
        )


def _row(name: str, report: Report, exact: bool, error: float) -> tuple[str, ...]:
    """Of the table. A head uses the same number of features as all others, or from the fewest to the most."""
    fewest, most = min(report.features), max(report.features)
    return (
        name,
        str(report.dim),
        str(most) if fewest == most else f"{fewest} to {most}",
        str(report.executed_features),
        "exact" if exact else f"{error:.3f}",
        f"{report.parameters_before:,} -> {report.parameters:,}",
        f"{report.flops_before / 1e6:.1f} -> {report.flops / 1e6:.1f}",
        "always" if math.isinf(report.break_even) else f"{report.break_even:.0f}",
    )


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
