"""Weights of a collaborative layer, and their error relative to the original heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heads_kernels.call import active_widths
from heads_kernels.checks import refuse
from heads_kernels.convert.heads import Heads
from heads_kernels.convert.moments import Moments, content_weights, whiten


@dataclass(frozen=True, eq=False)
class Factors:
    r"""The projections of a collaborative layer, float64 (Cordonnier et al. 2020, eq. 7 and 12).

    .. math:: score_h(x, y) = scale \cdot ((query \, x \circ mixing_h) \cdot (key \, y) + content_h \cdot y)

    Attributes:
        query: `[Ds, D_in]`, shared by all heads, without bias.
        key: `[Ds, D_in_k]`, without bias.
        mixing: `[H, Ds]`; the largest entry of a feature is 1, and its rows of `query` and `key` have equal norms.
        content: `[H, D_in_k]`: `content_bias` of the operator is `content` times the keys' inputs.
        scale: that of the original layer.
    """

    query: Tensor
    key: Tensor
    mixing: Tensor
    content: Tensor
    scale: float

    @property
    def dim(self) -> int:
        """Ds."""
        return self.mixing.shape[1]

    @property
    def features(self) -> list[int]:
        """Number of features that each head uses."""
        used: list[int] = self.mixing.count_nonzero(1).tolist()
        return used

    @property
    def executed_features(self) -> int:
        """Features that the scores of all heads use, in whole chunks."""
        return int(active_widths(self.mixing).sum())


def balanced(
    heads: Heads, moments: Moments | None, query: Tensor, key: Tensor, mixing: Tensor
) -> Factors:
    """Factors of the same products, their features scaled as `Factors` says, and the content weights that they need.

    What the features miss of the mean of the queries' inputs is in `content`, so the mean query scores what it scored.
    """
    peak = mixing.gather(0, mixing.abs().argmax(0, keepdim=True))  # [1, Ds]
    peak = torch.where(peak == 0, 1.0, peak)
    norms = query.norm(dim=1), key.norm(dim=1)
    strength = (peak[0].abs() * norms[0] * norms[1]).sqrt()
    query, key = (
        rows * (strength / norm.where(norm != 0, 1.0))[:, None]
        for rows, norm in zip((query, key), norms, strict=True)
    )
    mixing, query = mixing / peak, query * peak[0].sign()[:, None]
    content = content_weights(heads, moments)
    if moments is not None:
        content = content - (mixing * (query @ moments.query_mean)) @ key
    return Factors(query, key, mixing, content, heads.scale)


def weight_error(heads: Heads, factors: Factors) -> float:
    """`||T - T~|| / ||T||` over all heads, where `T_h = W_Q^hT W_K^h`; biases do not count."""
    cut, whole = _products(heads, factors, None)
    return _ratio(cut, whole)


def score_error(heads: Heads, factors: Factors, moments: Moments) -> float:
    """Root mean square of what scores are off by, relative to the scores, both without what a whole row shares.

    In closed form from the moments, for queries' inputs that are independent of the keys': the mean square is
    `|C_q^1/2 (T_h - T~_h) C_k^1/2|^2`, plus that of the content weights at the mean query, summed over heads.
    """
    cut, whole = _products(heads, factors, moments)
    mean = moments.query_mean
    content = content_weights(heads, moments)
    scored = factors.content + (factors.mixing * (factors.query @ mean)) @ factors.key
    root = moments.key_root
    cut += float(((content - scored) @ root).square().sum())
    whole += float((content @ root).square().sum())
    return _ratio(cut, whole)


def _products(heads: Heads, factors: Factors, moments: Moments | None) -> tuple[float, float]:
    """Squared norms of `T - T~` and of `T`, a head at a time."""
    expected = [heads.H, heads.D_in, heads.D_in_k]
    found = [len(factors.mixing), factors.query.shape[1], factors.key.shape[1]]
    if found != expected:
        was = f"have [H, D_in, D_in_k] = {found}"
        refuse("factors", was, f"those of the heads have {expected}")
    query, key = whiten(heads, moments, heads.query, heads.key)
    shared_query, shared_key = whiten(heads, moments, factors.query, factors.key)
    cut = whole = 0.0
    for own_query, own_key, mixing in zip(query, key, factors.mixing, strict=True):
        product = own_query.T @ own_key
        used = mixing != 0
        whole += float(product.square().sum())
        mixed = shared_query[used] * mixing[used, None]
        cut += float(torch.addmm(product, mixed.T, shared_key[used], alpha=-1).square().sum())
    return cut, whole


def _ratio(cut: float, whole: float) -> float:
    """0 where there was nothing and nothing was made of it."""
    if whole == 0:
        return 0.0 if cut == 0 else float("inf")
    return float((cut / whole) ** 0.5)
