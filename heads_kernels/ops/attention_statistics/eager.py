"""Attention statistics in plain PyTorch, by blocks of query rows: `[T, S]` never lies in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from heads_kernels.mask import Intervals
from heads_kernels.ops import formula
from heads_kernels.ops.attention_statistics.op import AttentionStatistics, allocate

#: Query rows at a time. Heuristic: the scores of 64 rows of BERT-base on 512 tokens are 1.5 MiB.
BLOCK_M = 64


@formula.without_autocast
def forward(
    query: Tensor,
    key: Tensor,
    mixing: Tensor | None,
    content_bias: Tensor | None,
    excluded: Tensor | None,
    intervals: Intervals,
    scale: float,
) -> AttentionStatistics:
    """`lse`, `max_prob`, `argmax` and `entropy` of every row: `functional.attention_statistics`."""
    result = allocate(query, mixing)
    if mixing is None:
        key = formula.per_head(key, query)
    for start in range(0, query.shape[-2], BLOCK_M):
        q = query[..., start : start + BLOCK_M, :]
        if mixing is None:
            scores = scale * (q.to(key.dtype) @ key.mT)
        else:
            mixed = formula.mixed_query(q, mixing)
            scores = formula.collaborative_scores(mixed, key, content_bias, scale)
        rows = formula.rows_of(intervals, start, start + BLOCK_M)
        visible = formula.visible_matrix(rows, scores)
        block = of_scores(scores, visible, excluded)
        for whole, part in zip(result, block, strict=True):
            whole[:, :, start : start + BLOCK_M] = part
    return result


def of_scores(
    scores: Tensor, visible: Tensor | None, excluded: Tensor | None
) -> AttentionStatistics:
    """Of scores `[B, H, rows, S]`; the maximum is that of scores: probabilities may all be 0."""
    p, lse = formula.softmax(scores, visible)
    entropy = torch.special.entr(p).sum(-1)  # entr(p) = -p ln p, and 0 for p = 0
    if scores.shape[-1] == 0:
        return AttentionStatistics(
            lse, torch.zeros_like(lse), torch.full_like(lse, -1, dtype=torch.int64), entropy
        )
    if visible is not None:
        scores = scores.masked_fill(~visible, formula.NEG_INF)
    if excluded is not None:
        scores = scores.masked_fill(excluded[:, None, None, :], formula.NEG_INF)
    best, argmax = scores.max(-1)  # the first of equals
    nothing = best == formula.NEG_INF
    max_prob = p.gather(-1, argmax[..., None])[..., 0].masked_fill(nothing, 0.0)
    return AttentionStatistics(lse, max_prob, argmax.masked_fill(nothing, -1), entropy)
