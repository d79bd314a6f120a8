"""How a kernel is launched: on the device of its tensors, with the tiles that were chosen for it."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from heads_kernels.ops.triton.tiles import Tiles


def launch(
    kernel: Any, programs: int, like: Tensor, tiles: Tiles, *args: Any, **constants: Any
) -> None:
    """Run `programs` programs of `kernel` on the device and the current stream of `like`."""
    if programs == 0:
        return
    elsewhere = like.is_cuda and like.device.index != torch.cuda.current_device()
    with torch.cuda.device(like.device) if elsewhere else contextlib.nullcontext():
        kernel[(programs,)](*args, **constants, **tiles.launch_options)


def splits_of(heads: int, programs: int, like: Tensor) -> int:
    """Over how many programs to spread the heads that one could sum over, so that every multiprocessor has work.

    Every one of them gets `cdiv(heads, splits)` heads, the last what is left, and none is without.
    """
    wanted = max(1, min(heads, -(-_processors(like) // max(programs, 1))))
    return max(1, -(-heads // -(-heads // wanted))) if heads else 1


def split_parts(grad: Tensor, splits: int, dtype: torch.dtype | None = None) -> Tensor:
    """Room for the sums of every split: float32 `[splits * B, ...]`, or `grad` itself where there is one split.

    A `dtype` that is asked for and is not that of `grad` needs the room too.
    """
    if grad.numel() == 0 or (splits == 1 and dtype in (None, grad.dtype)):
        return grad
    return grad.new_empty((splits * grad.shape[0], *grad.shape[1:]), dtype=torch.float32)


def sum_parts(parts: Tensor, grad: Tensor, splits: int) -> None:
    """Fill `grad` with the sum of what the splits left in `parts`, in their order."""
    if parts is not grad:
        grad.copy_(parts.unflatten(0, (splits, grad.shape[0])).sum(0))


def _processors(like: Tensor) -> int:
    """Multiprocessors of the GPU that holds `like`; a few where kernels are interpreted, so that splits happen."""
    return _count(like.device.index) if like.is_cuda else 4


@functools.cache
def _count(index: int) -> int:
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return count
