"""Gated attention: `out = act(gate) * softmax(scale * Q K^T under mask) V`, per head."""

from heads_kernels.dispatch import Backend
from heads_kernels.ops import support
from heads_kernels.ops.operator import Operator

#: In order of preference.
BACKENDS = (
    Backend("cpu", "heads_kernels.ops.native", support.cpu),
    Backend("triton", "heads_kernels.ops.triton.backend", support.triton),
    # After Triton, but for float32 (`dispatch`), until a measurement on a GPU decides: neither has run on one.
    Backend("cuda", "heads_kernels.ops.cuda", support.cuda),
    Backend("eager", "heads_kernels.ops.eager", support.eager),
)

OPERATOR = Operator(
    "gated_attention",
    ("query", "key", "value", "gate?", "bias?", "offset_bias?", "sinks?"),
    BACKENDS,
)
