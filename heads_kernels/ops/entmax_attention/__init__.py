"""Adaptively sparse attention: `out = act(gate) * entmax_alpha(scale * Q K^T under mask) V`, `alpha` per head."""

from heads_kernels.dispatch import Backend
from heads_kernels.ops import support
from heads_kernels.ops.operator import Operator

#: In order of preference.
BACKENDS = (
    Backend("cpu", "heads_kernels.ops.native", support.cpu),
    Backend("triton", "heads_kernels.ops.triton.backend", support.triton),
    Backend("eager", "heads_kernels.ops.entmax_attention.eager", support.eager),
)

OPERATOR = Operator(
    "entmax_attention",
    ("query", "key", "value", "gate?", "bias?", "offset_bias?", "alpha"),
    BACKENDS,
)
