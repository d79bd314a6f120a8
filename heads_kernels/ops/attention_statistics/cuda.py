"""Attention statistics on the `cuda` backend: launcher of `csrc/cuda/attention_statistics.cu`."""

from __future__ import annotations

from torch import Tensor

from heads_kernels.ops import cuda
from heads_kernels.ops.attention_statistics import AttentionStatistics
from heads_kernels.ops.operator import Call


def forward(call: Call, excluded: Tensor | None, results: AttentionStatistics) -> None:
    """Fill `results`."""
    cuda.statistics(call, excluded, tuple(results))
