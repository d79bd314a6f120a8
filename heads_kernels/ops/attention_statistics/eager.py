"""Attention statistics in plain PyTorch, in blocks of query rows, without a `[T, S]` matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from heads_kernels.ops import formula, scores
from heads_kernels.ops.attention_statistics import AttentionStatistics
from heads_kernels.ops.operator import Call

#: Query rows at a time. Heuristic: the scores of 64 rows of BERT-base on 512 tokens are 1.5 MiB.
BLOCK_M = 64


def forward(call: Call, excluded: Tensor | None, results: AttentionStatistics) -> None:
    """Fill `lse`, `max_prob`, `argmax` and `entropy` of every row: `functional.attention_statistics`."""
    for start in range(0, call.query.shape[-2], BLOCK_M):
        rows = scores.of_rows(call, start, start + BLOCK_M)
        for whole, part in zip(results, of_call(rows, excluded), strict=True):
            whole[:, :, start : start + BLOCK_M] = part


@formula.without_autocast
def of_call(call: Call, excluded: Tensor | None) -> AttentionStatistics:
    """Statistics of all rows of a call at once."""
    raw = formula.raw_scores(call, *formula.operands_of_scores(call))
    finished = scores.finish(call, raw)[0]
    return of_scores(finished, scores.visible_pairs(call), call.sinks, excluded)


def of_scores(
    finished: Tensor, visible: Tensor | None, sinks: Tensor | None, excluded: Tensor | None
) -> AttentionStatistics:
    """Statistics of finished scores `[B, H, rows, S]`. The maximum is of scores: probabilities may all round to 0."""
    p, lse = formula.softmax(finished, visible, sinks)
    entropy = torch.special.entr(p).sum(-1)  # entr(p) = -p ln p, and 0 for p = 0
    if finished.shape[-1] == 0:
        return AttentionStatistics(
            lse, torch.zeros_like(lse), torch.full_like(lse, -1, dtype=torch.int64), entropy
        )
    if visible is not None:
        finished = finished.masked_fill(~visible, scores.NEG_INF)
    if excluded is not None:
        finished = finished.masked_fill(excluded[:, None, None, :], scores.NEG_INF)
    best, argmax = finished.max(-1)  # the first of equal scores
    nothing = best == scores.NEG_INF
    max_prob = p.gather(-1, argmax[..., None])[..., 0].masked_fill(nothing, 0.0)
    return AttentionStatistics(lse, max_prob, argmax.masked_fill(nothing, -1), entropy)
