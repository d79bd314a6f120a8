"""How far factors are from the heads that they stand for."""

from __future__ import annotations

import torch

from heads_kernels.convert.factors import Factors
from heads_kernels.convert.heads import Heads
from heads_kernels.convert.moments import Moments, content_weights, whiten
from heads_kernels.errors import refuse


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
