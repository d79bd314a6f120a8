"""The number of features of each layer: the requested target, and a budget shared among layers."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Final, TypeAlias

import torch

from heads_kernels.checks import check_size, is_real, refuse
from heads_kernels.convert.features import Spectrum
from heads_kernels.convert.rotary import AnyHeads

#: One number for all layers, or one for each.
Dim: TypeAlias = int | Sequence[int]

#: Features are allotted in multiples of this: rows of 16 bytes in half precision.
_ROW: Final = 8


def check_target(dim: Dim | None, error: float | None) -> None:
    """Check that one of the two is given, and valid; see `collaborate`."""
    if (dim is None) == (error is None):
        refuse("dim", f"is {dim!r} and error is {error!r}", "pass one of them")
    if dim is None:
        if not (is_real(error) and error >= 0):
            refuse("error", f"is {error!r}", "pass a relative error, 0 or above")
    elif isinstance(dim, Sequence) and not isinstance(dim, str):
        for place, number in enumerate(dim):
            check_size(f"dim[{place}]", number)
    else:
        check_size("dim", dim)


def dims_of(
    heads: Sequence[AnyHeads], spectra: Sequence[Spectrum], dim: Dim | None, error: float | None
) -> list[int]:
    """Ds of each layer; values above its rank mean its rank."""
    if dim is None:
        return allot(heads, spectra, None, error)
    if isinstance(dim, int):
        params = sum(each.sizes.parameters(dim) for each in heads)
        return _in_rows(heads, spectra, params)
    if len(dim) != len(heads):
        refuse("dim", f"has {len(dim)} numbers", f"pass one for each of {len(heads)} layers")
    return list(dim)


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
    """The `dim` of each layer, at least one group, that keeps most of the scores of all layers together.

    Singular values of all layers are chosen by the mean square that they add to the scores, scale included, per
    parameter, up to a number of parameters or, without it, until the relative error of all scores is at most `error`.
    A layer whose scores vary little gets few features: its attention is nearly uniform.
    """
    first = sum(each.sizes.parameters(each.group) for each in layers)
    gains, costs, owners = [], [], []
    for n, (heads, spectrum) in enumerate(zip(layers, spectra, strict=True)):
        values = spectrum.values.flatten().sort(descending=True).values[: spectrum.rank]
        squares = values.square().view(-1, heads.group).sum(1)  # of features that come together
        gains.append(heads.scale**2 * squares[1:].cpu())
        owners.append(torch.full_like(gains[-1], n, dtype=torch.int64))
        costs.append(torch.full_like(owners[-1], heads.group * heads.sizes.of_feature))
    gain, cost = torch.cat(gains), torch.cat(costs)
    order = (gain / cost).argsort(descending=True, stable=True)
    if params is not None:
        number = int((cost[order].cumsum(0) <= params - first).sum())
    else:
        assert error is not None
        left = torch.cat([gain[order].flip(0).cumsum(0).flip(0), gain.new_zeros(1)])
        pairs = zip(layers, spectra, strict=True)
        whole = sum(heads.scale**2 * spectrum.square for heads, spectrum in pairs)
        number = int((left > error**2 * whole).sum())
    chosen = torch.cat(owners)[order[:number]]
    groups = (1 + chosen.bincount(minlength=len(layers))).tolist()
    return [count * heads.group for count, heads in zip(groups, layers, strict=True)]
