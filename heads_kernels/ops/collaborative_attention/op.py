"""Collaborative attention, declared."""

from __future__ import annotations

from typing import Final

from heads_kernels.ops.collaborative_attention import BACKENDS
from heads_kernels.ops.operator import Operator

OPERATOR: Final = Operator(
    "collaborative_attention",
    (
        "query",
        "key",
        "value",
        "mixing",
        "content_bias?",
        "gate?",
        "bias?",
        "offset_bias?",
        "sinks?",
    ),
    BACKENDS,
)
