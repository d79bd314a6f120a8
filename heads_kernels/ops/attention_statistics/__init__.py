"""Statistics of attention rows (lse, largest probability, its key, entropy) that never build the `[T, S]` matrix."""

from heads_kernels.dispatch import Backend
from heads_kernels.ops import support

#: In the order in which they are asked.
BACKENDS = (
    Backend("cpu", "heads_kernels.ops.attention_statistics.native", support.cpu),
    Backend("triton", "heads_kernels.ops.attention_statistics.triton", support.triton),
    Backend("eager", "heads_kernels.ops.attention_statistics.eager", support.eager),
)
