"""Attention on more than one process, with the engine of `torch.distributed`.

Operators take `DTensor`s sharded along the batch or the heads; what else is to be known about a model is here.
"""

from heads_kernels.integrations.distributed.context_parallel import ContextParallel, context_parallel
from heads_kernels.integrations.distributed.sharded import SharedNoise, gather, tensor_parallel_plan

__all__ = ["ContextParallel", "SharedNoise", "context_parallel", "gather", "tensor_parallel_plan"]
