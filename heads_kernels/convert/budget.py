"""How many features: the error of every number of them, and a budget shared out among layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heads_kernels.convert.counts import count_parameters
from heads_kernels.convert.heads import Heads
from heads_kernels.convert.moments import Moments
from heads_kernels.convert.spectrum import Spectrum, spectra_of
from heads_kernels.errors import refuse


def error_curve(heads: Heads, moments: Moments | None = None) -> Tensor:
    """`[R + 1]`: the relative error of `ragged` for `dim` 0 to R, where R is at most `H D`; the last is 0.

    It is `weight_error` without moments and `score_error` with them; that of `cp` is below it.
    """
    return Spectrum.of(heads, moments).errors()


def solve_budget(
    layers: Sequence[Heads],
    moments: Sequence[Moments] | None = None,
    *,
    params: int | None = None,
    error: float | None = None,
) -> list[int]:
    """The `dim` of each layer with which all of them together keep most of their scores.

    The singular values of all layers compete, each by the mean square that it adds to the scores, scale included, for
    each parameter that it costs. A layer whose scores vary little gets few features: its attention is near uniform.

    Args:
        layers: the projections of each layer.
        moments: of each layer's inputs; None weighs all weights alike.
        params: query and key parameters of all converted layers together, as `count_parameters` counts them; at most
            so many.
        error: relative error of the scores of all layers together (of the weights, without moments); at most so
            large, with the fewest parameters.

    Returns:
        One number of at least 1 for each layer.

    Raises:
        ValueError: neither or both of `params` and `error`; fewer `params` than one feature a layer needs; an `error`
            that is negative; another number of `moments` than of layers; moments that do not fit their layer.
    """
    if (params is None) == (error is None):
        refuse("params", f"is {params} and error is {error}", "pass one of the two")
    if error is not None and not error >= 0:
        refuse("error", f"is {error}", "pass 0 or a larger number")
    if not layers:
        refuse("layers", "is empty", "pass the projections of at least one layer")
    if moments is not None and len(moments) != len(layers):
        refuse("moments", f"are of {len(moments)} layers", f"pass one for each of {len(layers)}")
    return allot(layers, spectra_of(layers, moments), params, error)


def allot(
    layers: Sequence[Heads], spectra: Sequence[Spectrum], params: int | None, error: float | None
) -> list[int]:
    """As `solve_budget`, of these spectra."""
    offers = [_offers(heads, spectrum) for heads, spectrum in zip(layers, spectra, strict=True)]
    first = sum(count_parameters(x.D_in, x.D_k, x.H, 1, D_in_k=x.D_in_k) for x in layers)
    owner = torch.tensor(
        [n for n, (gains, _) in enumerate(offers) for _ in gains[1:]], dtype=torch.int64
    )
    gains = torch.cat([gains[1:].cpu() for gains, _ in offers])
    costs = torch.tensor([cost for gains, cost in offers for _ in gains[1:]], dtype=torch.int64)
    order = (gains / costs).argsort(descending=True, stable=True)
    if params is not None:
        if params < first:
            refuse("params", f"is {params}", f"pass at least {first}: one feature for each layer")
        number = int((costs[order].cumsum(0) <= params - first).sum())
    else:
        assert error is not None
        number = _enough(error, layers, spectra, gains[order])
    dims: list[int] = (1 + owner[order[:number]].bincount(minlength=len(layers))).tolist()
    return dims


def _offers(heads: Heads, spectrum: Spectrum) -> tuple[Tensor, int]:
    """What each feature of a layer adds to the mean square of its scores, descending, and what one costs."""
    squares = spectrum.values.flatten().sort(descending=True).values.square()
    cost = heads.D_in + heads.D_in_k + heads.H
    return heads.scale**2 * squares[: max(spectrum.rank, 1)], cost


def _enough(
    error: float, layers: Sequence[Heads], spectra: Sequence[Spectrum], gains: Tensor
) -> int:
    """How many of these features, in their order, leave at most this error."""
    whole = sum(
        heads.scale**2 * (float(spectrum.values.square().sum()) + spectrum.content)
        for heads, spectrum in zip(layers, spectra, strict=True)
    )
    cuts = torch.cat([gains.flip(0).cumsum(0).flip(0), gains.new_zeros(1)])
    return int((cuts > error**2 * whole).sum())
