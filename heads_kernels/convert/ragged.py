"""Ragged heads: every head keeps its own most important features."""

from __future__ import annotations

import torch
from torch import Tensor

from heads_kernels.call import MIXING_CHUNK
from heads_kernels.checks import check_size, refuse
from heads_kernels.convert.factors import Factors, balanced
from heads_kernels.convert.heads import Heads
from heads_kernels.convert.moments import Moments
from heads_kernels.convert.spectrum import HeadSpectrum


def ragged(
    heads: Heads,
    dim: int,
    moments: Moments | None = None,
    *,
    multiple: int = 1,
    spectrum: HeadSpectrum | None = None,
) -> Factors:
    """The best `dim` features that no two heads share.

    The `dim` largest singular values of all heads are kept, so heads may have different numbers of features; mixing is
    1 for a head's own features and 0 elsewhere. No other choice of disjoint features has a smaller error of the
    weights, or with moments of the scores (Eckart and Young, head by head). Scores use whole chunks of features, which
    are ordered so that each head uses as few chunks as possible.

    Args:
        heads: the layer's projections.
        dim: Ds, at least 1. From the rank of all heads on, at most `H * D`, the factors are exact and have only that
            many features.
        moments: of the inputs of queries and keys; None weights all weights equally.
        multiple: heads get features in groups of this size, at most `dim`. With 1 the error is the smallest for its
            `dim`; with `MIXING_CHUNK` heads share no chunk, scores use exactly `dim` features, and the error is the
            smallest for its FLOPs.
        spectrum: `HeadSpectrum.of(heads, moments)`, if already computed.

    Raises:
        TypeError, ValueError: `dim` is not an int >= 1, `multiple` is below 1 or above `dim`, or moments do not fit the
            heads.
    """
    check_size("dim", dim)
    if not 1 <= multiple <= dim:
        refuse("multiple", f"is {multiple}", f"pass 1 to {dim}, which is dim")
    spectrum = HeadSpectrum.of(heads, moments) if spectrum is None else spectrum
    counts = spectrum.largest(dim, multiple)
    owner = torch.tensor(chunked(counts), device=heads.query.device)
    query, key, mixing = own_features(spectrum, owner)
    return balanced(
        heads,
        moments,
        torch.einsum("nd,nde->ne", query, heads.query[owner]),
        torch.einsum("nd,nde->ne", key, heads.key[owner]),
        mixing,
    )


def own_features(spectrum: HeadSpectrum, owner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The features of the heads `owner` `[Ds]`, a head's best first, and their mixing.

    Returns:
        query, key `[Ds, D]` over the head's own weights, and mixing `[H, Ds]`.
    """
    mixing = torch.nn.functional.one_hot(owner, len(spectrum.values)).T.double()
    place = (mixing.cumsum(1) * mixing).sum(0).long() - 1  # [Ds], which of its head's features
    values = spectrum.values[owner, place]
    weight = torch.where(values > 0, values, torch.inf).rsqrt()[:, None]
    return spectrum.query[owner, place] * weight, spectrum.key[owner, place] * weight, mixing


def chunked(counts: list[int], chunk: int = MIXING_CHUNK) -> list[int]:
    """The head of each feature, ordered so that heads use few chunks.

    Whole chunks come first. The remainders of heads, the largest first, go into the first chunk where they fit whole,
    or else are split over the remaining space.
    """
    order = [head for head, count in enumerate(counts) for _ in range(count - count % chunk)]
    left = sum(counts) - len(order)
    bins: list[list[int]] = [[] for _ in range(-(-left // chunk))]
    space = [chunk] * (left // chunk) + [left % chunk] * (left % chunk > 0)
    rests = sorted(((count % chunk, head) for head, count in enumerate(counts)), reverse=True)
    homeless: list[int] = []
    for rest, head in rests:
        fits = next((n for n, size in enumerate(space) if size - len(bins[n]) >= rest), None)
        (homeless if fits is None else bins[fits]).extend([head] * rest)
    for size, features in zip(space, bins, strict=True):
        free = size - len(features)
        order += [*features, *homeless[:free]]
        homeless = homeless[free:]
    return order
