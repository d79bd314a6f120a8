"""Heads and inputs for tests of conversion, and their scores and products in dense linear algebra."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from heads_kernels.convert import Factors, Heads, Moments

H, D, D_in, D_in_k = 4, 6, 20, 18


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def random_heads(H: int = H, D: int = D, D_in: int = D_in, D_in_k: int = D_in_k, bias: bool = True) -> Heads:
    """Heads whose singular values fall, and differ from head to head."""
    by_head = (1 + torch.arange(H))[:, None, None]
    fall = torch.logspace(0, -1, D, dtype=torch.float64)[:, None] / by_head
    query_bias = normal(H, D) if bias else None
    return Heads(normal(H, D, D_in) * fall, normal(H, D, D_in_k), D**-0.5, query_bias)


def random_moments(D_in: int = D_in, D_in_k: int = D_in_k) -> tuple[Tensor, Tensor, Moments]:
    """Correlated inputs of 5 sentences, with a mean: queries `[5, 60, D_in]`, keys `[5, 40, D_in_k]`."""
    x = normal(5, 60, D_in) @ normal(D_in, D_in) + normal(D_in)
    y = normal(5, 40, D_in_k) @ normal(D_in_k, D_in_k) + 3 * normal(5, 1, D_in_k)
    return x, y, Moments.of(x, y)


def scores_before(heads: Heads, x: Tensor, y: Tensor) -> Tensor:
    """`[H, T, S]`."""
    query = torch.einsum("hde,te->htd", heads.query, x)
    if heads.query_bias is not None:
        query = query + heads.query_bias[:, None]
    return heads.scale * torch.einsum("htd,hde,se->hts", query, heads.key, y)


def scores_after(factors: Factors, x: Tensor, y: Tensor) -> Tensor:
    scores = torch.einsum("te,re,hr,rf,sf->hts", x, factors.query, factors.mixing, factors.key, y)
    return factors.scale * (scores + (factors.content @ y.T)[:, None])


def dense(heads: Heads) -> Any:
    """The tensor `[D_in, H, D_in_k]` of all products."""
    return torch.einsum("hdq,hdk->qhk", heads.query, heads.key).numpy()


def dense_after(factors: Factors) -> Any:
    return torch.einsum("rq,hr,rk->qhk", factors.query, factors.mixing, factors.key).numpy()


def whitened(moments: Moments, tensor: Any) -> Any:
    """`C_q^1/2 T_h C_k^1/2` with symmetric roots, of covariances as NumPy has them."""
    count = float(moments.count)
    mean = moments.query_sum.numpy() / count
    covariances = (moments.query_outer.numpy() / count - np.outer(mean, mean), moments.key_outer.numpy() / count)
    roots = []
    for covariance in covariances:
        values, vectors = np.linalg.eigh(covariance)
        roots.append(vectors @ np.diag(np.sqrt(np.maximum(values, 0))) @ vectors.T)
    return np.einsum("pq,qhk,kl->phl", roots[0], tensor, roots[1])


def relative(before: Any, after: Any) -> float:
    return float(np.linalg.norm(before - after) / np.linalg.norm(before))


def score_error(heads: Heads, factors: Factors, x: Tensor, y: Tensor) -> float:
    """Of every query with the keys of every sentence, each row less its mean."""
    queries = x.flatten(0, 1)
    before = torch.stack([scores_before(heads, queries, keys) for keys in y])
    after = torch.stack([scores_after(factors, queries, keys) for keys in y])
    before, after = (scores - scores.mean(-1, keepdim=True) for scores in (before, after))
    return float((before - after).norm() / before.norm())
