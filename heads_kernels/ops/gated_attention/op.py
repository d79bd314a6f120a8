"""Gated attention, declared."""

from __future__ import annotations

from typing import Final

from heads_kernels.ops.gated_attention import BACKENDS
from heads_kernels.ops.operator import Operator

OPERATOR: Final = Operator(
    "gated_attention",
    ("query", "key", "value", "gate?", "bias?", "offset_bias?", "sinks?"),
    BACKENDS,
)
