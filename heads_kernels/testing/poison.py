"""Memory that must not be read: NaN around tensors, NaN in what the allocator hands out next."""

from __future__ import annotations

import torch
from torch import Tensor

#: Guard rows before and after, and guard elements left and right of every row. Odd, so that the
#: first element of a row is not aligned to a vector, and wide enough that one vector too many (16
#: float32) still lands in NaN.
GUARD_ROWS = 1
GUARD_WIDTH = 17


def surrounded(tensor: Tensor, fill: float = float("nan")) -> Tensor:
    """The same values as a slice inside a larger storage full of `fill`: a read outside shows.

    The last dimension keeps stride 1; the tensor is the same in every other respect, and a leaf.
    """
    if tensor.dim() == 0:
        return tensor.detach().clone()
    rows = tensor.shape[-2] if tensor.dim() > 1 else 1
    width = tensor.shape[-1]
    shape = (*tensor.shape[:-2], rows + 2 * GUARD_ROWS, width + 2 * GUARD_WIDTH)
    storage = tensor.new_full(shape, fill)
    inner = storage[..., GUARD_ROWS : GUARD_ROWS + rows, GUARD_WIDTH : GUARD_WIDTH + width]
    inner = inner if tensor.dim() > 1 else inner[0]
    inner.copy_(tensor.detach())
    return inner


def dirty_allocator(like: Tensor, largest: int = 1 << 20) -> None:
    """Fill and free blocks of all sizes up to `largest` bytes: memory allocated next holds NaN.

    An output that a kernel leaves unwritten is then NaN instead of an accidental zero.
    """
    blocks = []
    size = 64
    while size <= largest:
        for numel in (size // 8, size * 3 // 16):
            blocks += [torch.full((numel,), float("nan"), device=like.device, dtype=torch.float64)]
        size *= 2
    del blocks
