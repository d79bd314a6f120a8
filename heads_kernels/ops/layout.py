"""The layout of tensors in memory: one rule for the kernels and for the fakes that stand in for them while tracing."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

#: Elements between rows of a tensor: 128 rows of a tile times this stay within 32 bits.
FARTHEST_ROW: Final = 1 << 24


def empty_heads(like: Tensor, B: int, H: int, L: int, W: int) -> Tensor:
    """An empty `[B, H, L, W]` in the memory order of `like` `[B, H, rows, width]`.

    Heads outside rows (`[B, H, L, W]` contiguous), or rows outside heads (a transposed `[B, L, H, W]`) as projections
    give them, so that the reshape to `[B, L, H * W]` behind attention copies nothing.
    """
    if like.stride(1) < like.stride(2):
        return like.new_empty((B, L, H, W)).transpose(1, 2)
    return like.new_empty((B, H, L, W))


def empty_gradient(tensor: Tensor, needed: bool) -> Tensor:
    """A buffer for the gradient of `tensor`, dense and in its memory order; an empty tensor where it is not asked for.

    Rows are contiguous also where the strides do not tell the order (those of a view whose rows overlap).
    """
    if not needed:
        return tensor.new_empty(0)
    like = torch.empty_like(tensor)
    return like if like.stride(-1) == 1 else tensor.new_empty(tensor.shape)


def contiguous_rows(tensor: Tensor) -> Tensor:
    """The tensor, copied where its rows are not contiguous (a gradient that was expanded, say) or too far apart."""
    near = tensor.stride(-1) == 1 and tensor.stride(-2) < FARTHEST_ROW
    return tensor if near else tensor.contiguous()


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of scores, lse and accumulators."""
    return torch.float64 if dtype == torch.float64 else torch.float32
