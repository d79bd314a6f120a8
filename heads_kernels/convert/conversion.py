"""What conversion made of a model: a report of each layer, and of all together."""

from __future__ import annotations

import math
import operator
from dataclasses import asdict, dataclass
from typing import Any, Final

from heads_kernels.convert.curves import Curves
from heads_kernels.convert.report import Report

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
            "layer", "Ds", "of a head", "executed", "error", "parameters", flops, "fewer below T",
        )  # fmt: skip
        rows = [header, *map(_row, self.layers, self.reports, self.exact, self.errors)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])
            for name, *cells in rows
        ]
        of = "weights" if self.reports[0].score_error is None else "scores"
        parameters = f"{self.parameters_before:,} -> {self.parameters:,}"
        spent = f"{self.flops_before / 1e6:.1f} -> {self.flops / 1e6:.1f}"
        lines += [
            f"{self.method}, all layers: relative error of the {of} {self.error:.3f}, {flops} {spent}",
            f"parameters of the model: {parameters}",
        ]
        return "\n".join(lines)


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
