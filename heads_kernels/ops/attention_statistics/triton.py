"""Attention statistics on the `triton` backend."""

from __future__ import annotations

from torch import Tensor

from heads_kernels.mask import Intervals
from heads_kernels.ops.attention_statistics.op import AttentionStatistics, allocate
from heads_kernels.ops.attention_statistics.triton_collaborative import collaborative_statistics
from heads_kernels.ops.attention_statistics.triton_gated import gated_statistics


def forward(
    query: Tensor,
    key: Tensor,
    mixing: Tensor | None,
    content_bias: Tensor | None,
    excluded: Tensor | None,
    intervals: Intervals,
    scale: float,
) -> AttentionStatistics:
    """One number of each kind per query row."""
    statistics = allocate(query, mixing)
    if mixing is None:
        gated_statistics(query, key, excluded, intervals, scale, statistics)
    else:
        collaborative_statistics(
            query, key, mixing, content_bias, excluded, intervals, scale, statistics
        )
    return statistics
