"""The number of features of each layer: the requested target, error curves, and a budget shared among layers."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from heads_kernels.checks import check_size, is_real, refuse
from heads_kernels.convert.features import Spectrum
from heads_kernels.convert.rotary import AnyHeads

#: One number for all layers, one for each, or `{layer: number}`, layers by index or name.
Dim: TypeAlias = int | Sequence[int] | Mapping[int, int] | Mapping[str, int]

#: Ragged features that a head gets at once. On MiniLM at Ds 96 to 256 groups of 4 take 12 to 16 % off the features that
#: scores run over (below those of ordinary attention at Ds 256 too) and at most 0.003 off the cosine of sentences;
#: groups of 8 take 25 to 35 % and up to 0.008, groups of 16 cost up to 0.02.
_GROUP: Final = 4
#: Features are allotted in multiples of this: rows of 16 bytes in half precision.
_ROW: Final = 8


@dataclass(frozen=True)
class Wanted:
    """The requested size of a conversion; see `collaborate`.

    Raises:
        TypeError, ValueError: none or several of the four are given, or one is invalid.
    """

    dim: Dim | None
    energy: float | None
    params: int | None
    error: float | None

    def __post_init__(self) -> None:
        ways = {name: getattr(self, name) for name in ("dim", "energy", "params", "error")}
        given = [name for name, value in ways.items() if value is not None]
        if len(given) != 1:
            found = " and ".join(f"{name} is {ways[name]!r}" for name in given or ["dim"])
            argument, _, was = found.partition(" ")
            refuse(argument, was, "pass one of dim, energy, params and error")
        if self.dim is not None:
            self._check_dim()
        if self.energy is not None and not (is_real(self.energy) and 0 < self.energy <= 1):
            instead = "pass a share of the scores, above 0 and up to 1"
            refuse("energy", f"is {self.energy!r}", instead)
        if self.params is not None:
            check_size("params", self.params)
        if self.error is not None and not (is_real(self.error) and self.error >= 0):
            refuse("error", f"is {self.error!r}", "pass a relative error, 0 or above")

    def _check_dim(self) -> None:
        numbers: dict[str, object]
        if isinstance(self.dim, Mapping):
            numbers = {f"dim[{key!r}]": number for key, number in self.dim.items()}
        elif isinstance(self.dim, Sequence) and not isinstance(self.dim, str):
            numbers = {f"dim[{place}]": number for place, number in enumerate(self.dim)}
        else:
            numbers = {"dim": self.dim}
        for name, number in numbers.items():
            check_size(name, number)

    @property
    def layers(self) -> list[int | str] | None:
        """Those that `dim` names."""
        return list(self.dim) if isinstance(self.dim, Mapping) else None

    @property
    def multiple(self) -> int:
        """Group size of ragged features: 1 for `energy` and `error`, so that they are met."""
        return _GROUP if self.energy is None and self.error is None else 1

    def dims(self, heads: Sequence[AnyHeads], spectra: Sequence[Spectrum]) -> list[int]:
        """Ds of each layer; values above its rank mean its rank."""
        if self.energy is not None:
            bound = (1 - self.energy) ** 0.5
            least = [max(1, int((spectrum.errors() > bound).sum())) for spectrum in spectra]
            return _in_groups(heads, least, up=True)
        if self.error is not None:
            return _in_groups(heads, allot(heads, spectra, None, self.error), up=True)
        if self.params is not None:
            return _in_groups(heads, _in_rows(heads, spectra, self.params))
        if isinstance(self.dim, int):
            params = sum(each.sizes.parameters(self.dim) for each in heads)
            return _in_groups(heads, _in_rows(heads, spectra, params))
        assert self.dim is not None
        dims = list(self.dim.values() if isinstance(self.dim, Mapping) else self.dim)
        if len(dims) != len(heads):
            refuse("dim", f"has {len(dims)} numbers", f"pass one for each of {len(heads)} layers")
        return dims


def _in_groups(heads: Sequence[AnyHeads], dims: list[int], up: bool = False) -> list[int]:
    """Dims in whole groups of features that come together, at least one."""
    return [
        max(1, (dim + (each.group - 1 if up else 0)) // each.group) * each.group
        for each, dim in zip(heads, dims, strict=True)
    ]


def _in_rows(heads: Sequence[AnyHeads], spectra: Sequence[Spectrum], params: int) -> list[int]:
    """As `allot` with `params`, in multiples of `_ROW`.

    What is over a multiple goes to the layers that lack least of the next one. Layers stay exact that are, and those
    with less than a row.
    """
    dims = allot(heads, spectra, params, None)
    costs = [each.sizes.of_feature for each in heads]
    missing = [spectrum.rank - dim for spectrum, dim in zip(spectra, dims, strict=True)]
    over = [
        dim % _ROW if dim > _ROW and lacks > 0 else 0
        for dim, lacks in zip(dims, missing, strict=True)
    ]
    free = sum(map(operator.mul, over, costs))
    for n in sorted(range(len(dims)), key=lambda n: -over[n]):
        dims[n] -= over[n]
        step = min(_ROW, missing[n] + over[n])
        if over[n] and step * costs[n] <= free:
            dims[n] += step
            free -= step * costs[n]
    return dims


def allot(
    layers: Sequence[AnyHeads], spectra: Sequence[Spectrum], params: int | None, error: float | None
) -> list[int]:
    """The `dim` of each layer, at least 1, that keeps most of the scores of all layers together.

    Singular values of all layers are chosen by the mean square that they add to the scores, scale included, per
    parameter. A layer whose scores vary little gets few features: its attention is nearly uniform.

    Args:
        layers, spectra: the projections of each layer, and what their features add to the scores.
        params: maximum number of query and key parameters of all converted layers together.
        error: without `params`, the maximum relative error of the scores of all layers together (of the weights,
            without moments), reached with the fewest parameters.

    Raises:
        ValueError: `params` is too small for one feature per layer.
    """
    first = sum(each.sizes.parameters(1) for each in layers)
    gains, costs, owners = [], [], []
    for n, (heads, spectrum) in enumerate(zip(layers, spectra, strict=True)):
        squares = spectrum.values.flatten().sort(descending=True).values.square()
        gains.append(heads.scale**2 * squares[1 : spectrum.rank].cpu())
        owners.append(torch.full_like(gains[-1], n, dtype=torch.int64))
        costs.append(torch.full_like(owners[-1], heads.sizes.of_feature))
    gain, cost = torch.cat(gains), torch.cat(costs)
    order = (gain / cost).argsort(descending=True, stable=True)
    if params is not None:
        if params < first:
            refuse("params", f"is {params}", f"pass at least {first}: one feature for each layer")
        number = int((cost[order].cumsum(0) <= params - first).sum())
    else:
        assert error is not None
        left = torch.cat([gain[order].flip(0).cumsum(0).flip(0), gain.new_zeros(1)])
        whole = sum(
            x.scale**2 * spectrum.square for x, spectrum in zip(layers, spectra, strict=True)
        )
        number = int((left > error**2 * whole).sum())
    chosen = torch.cat(owners)[order[:number]]
    dims: list[int] = (1 + chosen.bincount(minlength=len(layers))).tolist()
    return dims
