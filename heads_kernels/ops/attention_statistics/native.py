"""Attention statistics on the `cpu` backend: calls `csrc/cpu/attention_statistics.h`."""

from __future__ import annotations

import torch
from torch import Tensor

from heads_kernels import _cpu
from heads_kernels.ops.arguments import mask_of, scores_of
from heads_kernels.ops.attention_statistics import AttentionStatistics
from heads_kernels.ops.operator import Call


def forward(call: Call, excluded: Tensor | None, results: AttentionStatistics) -> None:
    """Fill `results`."""
    _cpu.attention_statistics(
        scores_of(call), excluded, mask_of(call.intervals), tuple(results), torch.get_num_threads()
    )
