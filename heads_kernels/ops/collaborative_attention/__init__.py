"""Collaborative attention: one query and one key projection for all heads, mixed by one vector per head."""

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
