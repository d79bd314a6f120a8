"""Fused attention kernels for PyTorch whose heads can be gated, closed, pruned, shared and analysed.

The operators take the arguments of `torch.nn.functional.scaled_dot_product_attention` in its order:

    gated_attention          act(gate) * softmax(scores) V; a head whose gate is exactly 0 costs nothing
    collaborative_attention  one query and one key shared by all heads, one mixing vector per head
    entmax_attention         act(gate) * entmax(scores) V; probabilities that can be exactly 0
    attention_statistics     log-sum-exp, largest probability, its key and entropy of each query row
    merge_attention          attention over all keys from results over parts of them (return_lse=True)
    Mask                     causal, padding, windows, packed documents, prefixes; they combine with &
    OffsetBias               a bias that depends only on the offset of key and query: ALiBi, T5
    explain                  which backend would run a call, and why the others would not

    out = hk.gated_attention(query, key, value, is_causal=True, gate=gate)  # [B, H, T, D]

Modules on top of them are imported on first use:

    nn            attention layers and gates; replace_attention_ puts them into a model
    heads         gate, close, prune and save the heads of a model
    analysis      what heads do and how much they matter: importance, roles, statistics, distance, maps
    convert       conversion of pretrained attention to collaborative attention
    integrations  transformers, torch.distributed, ONNX, C++
    testing       named cases, the accuracy rule, timers

Remove the six least important heads from the weights of a model:

    model = hk.nn.replace_attention_(model)  # or, from transformers, hk.integrations.transformers.use(model)
    scores = hk.analysis.importance(model, batches, loss)  # loss(model, batch) returns a tensor
    hk.heads.prune(model, scores.lowest(6))

`help(heads_kernels.gated_attention)` shows the specification of that operator. The command `python -m heads_kernels`
shows versions and which kernels were built.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from heads_kernels import integrations
from heads_kernels.backends import Choice
from heads_kernels.build_info import build_info
from heads_kernels.functional import (
    attention_statistics,
    collaborative_attention,
    entmax_attention,
    explain,
    gated_attention,
)
from heads_kernels.mask import Mask
from heads_kernels.merge import merge_attention
from heads_kernels.offset_bias import OffsetBias
from heads_kernels.ops.statistics import AttentionStatistics

__version__ = "0.1.0"

__all__ = [
    "AttentionStatistics",
    "Choice",
    "Mask",
    "OffsetBias",
    "analysis",
    "attention_statistics",
    "build_info",
    "collaborative_attention",
    "convert",
    "entmax_attention",
    "explain",
    "gated_attention",
    "heads",
    "integrations",
    "merge_attention",
    "nn",
    "testing",
]

if TYPE_CHECKING:
    from heads_kernels import analysis, convert, heads, nn, testing
else:  # a type checker would accept any name with this __getattr__
    _LAZY = {"analysis", "convert", "heads", "nn", "testing"}

    def __getattr__(name: str) -> ModuleType:
        """Import a part of the package on first use."""
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
