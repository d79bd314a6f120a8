"""Attention statistics on the `cpu` backend: launcher of `csrc/cpu/attention_statistics.h`."""

from __future__ import annotations

import torch
from torch import Tensor

from heads_kernels import _cpu
from heads_kernels.mask import Intervals
from heads_kernels.ops.arguments import mask_of
from heads_kernels.ops.attention_statistics.op import AttentionStatistics, allocate


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
    _cpu.attention_statistics(
        (query, key, mixing, content_bias, scale),
        excluded,
        mask_of(intervals),
        tuple(statistics),
        torch.get_num_threads(),
    )
    return statistics
