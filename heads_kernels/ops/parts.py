"""Sums over heads that are spread over the GPU: the splits of heads, buffers for their parts, and the sum in order."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def splits_of(heads: int, programs: int, like: Tensor) -> int:
    """Over how many programs to spread the heads that one could sum over, so that every multiprocessor has work.

    Every one of them gets `cdiv(heads, splits)` heads, the last what is left, and none is without.
    """
    wanted = max(1, min(heads, -(-_processors(like) // max(programs, 1))))
    return max(1, -(-heads // -(-heads // wanted))) if heads else 1


def split_parts(grad: Tensor, splits: int, dtype: torch.dtype | None = None) -> Tensor:
    """A buffer for the sums of every split: float32 `[splits * B, ...]`, or `grad` itself where there is one split.

    A `dtype` that is asked for and is not that of `grad` needs a buffer too.
    """
    if grad.numel() == 0 or (splits == 1 and dtype in (None, grad.dtype)):
        return grad
    return grad.new_empty((splits * grad.shape[0], *grad.shape[1:]), dtype=torch.float32)


def sum_parts(parts: Tensor, grad: Tensor, splits: int) -> None:
    """Fill `grad` with the sum of what the splits left in `parts`, in their order."""
    if parts is not grad:
        grad.copy_(parts.view(splits, *grad.shape).sum(0))


def _processors(like: Tensor) -> int:
    """Multiprocessors of the GPU that holds `like`; a few where kernels run on the CPU, so that splits happen."""
    return _count(like.device.index) if like.is_cuda else 4


@functools.cache
def _count(index: int) -> int:
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return count
