"""Fused attention kernels for heads that can be gated, closed, shared and analysed."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from heads_kernels import integrations
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

if TYPE_CHECKING:
    from heads_kernels import analysis, convert, heads, nn, testing
else:  # a type checker would let this __getattr__ answer for any name
    _LAZY = {"analysis", "convert", "heads", "nn", "testing"}

    def __getattr__(name: str) -> ModuleType:
        """Import a part of the package when it is first used."""
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
