"""Fused attention kernels for heads that can be gated, closed, shared and analysed."""

from heads_kernels import analysis, convert, heads, integrations, nn, testing
from heads_kernels.build_info import build_info
from heads_kernels.dispatch import Choice
from heads_kernels.functional import (
    attention_statistics,
    collaborative_attention,
    explain,
    gated_attention,
)
from heads_kernels.mask import Mask
from heads_kernels.offset_bias import OffsetBias
from heads_kernels.ops.attention_statistics.op import AttentionStatistics
from heads_kernels.problem import Problem

__version__ = "0.1.0"

__all__ = [
    "AttentionStatistics",
    "Choice",
    "Mask",
    "OffsetBias",
    "Problem",
    "analysis",
    "attention_statistics",
    "build_info",
    "collaborative_attention",
    "convert",
    "explain",
    "gated_attention",
    "heads",
    "integrations",
    "nn",
    "testing",
]
