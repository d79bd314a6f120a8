"""What features cost: parameters and FLOPs of a layer as closed formulas, and a budget shared among layers."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from heads_kernels.checks import check_size, is_real, refuse
from heads_kernels.convert.features import Spectrum

#: One number for all layers, or one for each.
Dim: TypeAlias = int | Sequence[int]

#: Features are allotted in multiples of this: rows of 16 bytes in half precision.
_ROW: Final = 8


@dataclass(frozen=True)
class Sizes:
    """Sizes of an attention layer, and its counts with `Ds` shared features, or as ordinary attention where Ds is None
    (Cordonnier et al. 2020, table 1, with the biases)."""

    D_in: int  # width of the inputs of the queries
    D_in_k: int  # and of the keys
    D_k: int  # the concatenated key width of all heads
    H: int
    Hk: int | None = None  # key heads of ordinary attention; None means H
    bias: bool = True  # queries or keys have biases
    rotary: bool = False  # positions are rotary

    @property
    def key_rows(self) -> int:
        """What is left of the key width of H heads where only Hk have keys."""
        return self.D_k if self.Hk is None else self.D_k * self.Hk // self.H

    @property
    def group(self) -> int:
        """Features that come together: the two of a rotating pair."""
        return 2 if self.rotary else 1

    @property
    def of_feature(self) -> int:
        """Parameters of one more feature."""
        return self.parameters(2) - self.parameters(1)

    def parameters(self, Ds: int | None = None) -> int:
        """Query and key parameters.

        Ordinary attention: `D_in D_k + D_in_k D_k Hk / H`, and a bias for each row. Converted: `(D_in + D_in_k + H) Ds`
        of the projections and mixing, and `H D_in_k` content weights. Converted with rotary positions: `2 Ds` biases
        instead, if there were some, and `H Ds / 2` mixing weights, one for a pair of features.
        """
        if Ds is None:
            rows = self.D_in * self.D_k + self.D_in_k * self.key_rows
            return rows + (self.D_k + self.key_rows) * self.bias
        if self.rotary:
            return (self.D_in + self.D_in_k + 2 * self.bias) * Ds + self.H * Ds // 2
        return (self.D_in + self.D_in_k + self.H) * Ds + self.H * self.D_in_k

    def flops(self, T: int, Ds: int | None = None, executed_features: int | None = None) -> int:
        """FLOPs of the forward pass for T query rows and keys: projections, scores, weighted values.

        | part | ordinary | collaborative |
        |---|---|---|
        | query, key | `2 T D_in D_k`, `2 T D_in_k D_k Hk / H` | `2 T D_in Ds`, `2 T D_in_k Ds` |
        | mixing | 0 | `T F` |
        | scores | `2 T^2 F`, `F = D_k` | `2 T^2 F`, `F = H Ds` or `executed_features` |
        | content | 0 | `2 T D_in_k H + T^2 H`; 0 with rotary positions |
        | values, weighted; their projection, output | `2 T^2 D_k`; `2 T D_in_k D_k Hk / H`, `2 T D_k D_in` | the same |
        """
        D_in, D_in_k, D_k, H = self.D_in, self.D_in_k, self.D_k, self.H
        width, key_width, F = (D_k, self.key_rows, D_k) if Ds is None else (Ds, Ds, H * Ds)
        if executed_features is not None:
            F = executed_features
        mixing = content = 0
        if Ds is not None:
            mixing = T * F
            content = 0 if self.rotary else 2 * T * D_in_k * H + T * T * H
        projections = D_in * width + D_in_k * (key_width + self.key_rows) + D_k * D_in
        return 2 * T * projections + mixing + content + 2 * T * T * (F + D_k)

    def break_even(self, Ds: int, executed_features: int | None = None) -> float:
        """The T below which collaborative self-attention takes fewer FLOPs than ordinary attention, rounded.

        It saves projections, `2 T D_in (D_k + D_k Hk / H - 2 Ds)`, and adds scores, `2 T^2 (F - D_k)`; mixing and
        content, which are small, are left out. With dense mixing `F = H Ds`. Infinite if scores cost no more; 0 if
        nothing is saved.
        """
        saved = self.D_k + self.key_rows - 2 * Ds
        paid = (self.H * Ds if executed_features is None else executed_features) - self.D_k
        if paid <= 0:
            return math.inf if saved >= 0 else 0
        return max(0, round(self.D_in * saved / paid))


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


def dims_of(layers: Sequence[Sizes], spectra: Sequence[Spectrum], dim: Dim | None, error: float | None) -> list[int]:
    """Ds of each layer; values above its rank mean its rank."""
    if dim is None:
        return allot(layers, spectra, None, error)
    if isinstance(dim, int):
        params = sum(sizes.parameters(dim) for sizes in layers)
        return _in_rows(layers, spectra, params)
    if len(dim) != len(layers):
        refuse("dim", f"has {len(dim)} numbers", f"pass one for each of {len(layers)} layers")
    return list(dim)


def _in_rows(layers: Sequence[Sizes], spectra: Sequence[Spectrum], params: int) -> list[int]:
    """As `allot` with `params`, in multiples of `_ROW`.

    What is over a multiple goes to the layers that lack least of the next one. Layers stay exact that are, and those
    with less than a row.
    """
    dims = allot(layers, spectra, params, None)
    costs = [sizes.of_feature for sizes in layers]
    missing = [spectrum.rank - dim for spectrum, dim in zip(spectra, dims, strict=True)]
    over = [dim % _ROW if dim > _ROW and lacks > 0 else 0 for dim, lacks in zip(dims, missing, strict=True)]
    free = sum(map(operator.mul, over, costs))
    for n in sorted(range(len(dims)), key=lambda n: -over[n]):
        dims[n] -= over[n]
        step = min(_ROW, missing[n] + over[n])
        if over[n] and step * costs[n] <= free:
            dims[n] += step
            free -= step * costs[n]
    return dims


def allot(layers: Sequence[Sizes], spectra: Sequence[Spectrum], params: int | None, error: float | None) -> list[int]:
    """The `dim` of each layer, at least one group, that keeps most of the scores of all layers together.

    Singular values of all layers are chosen by the mean square that they add to the scores per parameter, up to a
    number of parameters or, without it, until the relative error of all scores is at most `error`. A layer whose scores
    vary little gets few features: its attention is nearly uniform.
    """
    first = sum(sizes.parameters(sizes.group) for sizes in layers)
    gains, costs, owners = [], [], []
    for n, (sizes, spectrum) in enumerate(zip(layers, spectra, strict=True)):
        values = spectrum.values.flatten().sort(descending=True).values[: spectrum.rank]
        squares = values.square().view(-1, sizes.group).sum(1)  # of features that come together
        gains.append(spectrum.scale**2 * squares[1:].cpu())
        owners.append(torch.full_like(gains[-1], n, dtype=torch.int64))
        costs.append(torch.full_like(owners[-1], sizes.group * sizes.of_feature))
    gain, cost = torch.cat(gains), torch.cat(costs)
    order = (gain / cost).argsort(descending=True, stable=True)
    if params is not None:
        number = int((cost[order].cumsum(0) <= params - first).sum())
    else:
        assert error is not None
        left = torch.cat([gain[order].flip(0).cumsum(0).flip(0), gain.new_zeros(1)])
        whole = sum(spectrum.score_square for spectrum in spectra)
        number = int((left > error**2 * whole).sum())
    chosen = torch.cat(owners)[order[:number]]
    groups = (1 + chosen.bincount(minlength=len(layers))).tolist()
    return [count * sizes.group for count, sizes in zip(groups, layers, strict=True)]
