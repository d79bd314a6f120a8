"""Attention statistics on the `triton` backend."""

from __future__ import annotations

from torch import Tensor

from heads_kernels.ops.attention_statistics.op import AttentionStatistics
from heads_kernels.ops.attention_statistics.triton_collaborative import collaborative_statistics
from heads_kernels.ops.attention_statistics.triton_gated import gated_statistics
from heads_kernels.ops.operator import Call


def forward(call: Call, excluded: Tensor | None, results: AttentionStatistics) -> None:
    """Fill `results`."""
    (gated_statistics if call.mixing is None else collaborative_statistics)(call, excluded, results)
