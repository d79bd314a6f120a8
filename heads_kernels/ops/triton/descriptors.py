"""Tiles of keys and values through tensor descriptors: on NVIDIA's sm_90 and newer one thread asks for a whole tile.

The copy takes no addresses, registers or instructions of the other threads, so that a step takes two tiles. Partial
tiles, which would spill, and rows that no descriptor can describe are loaded through pointers (`load.load_tile`). So
are those of collaborative attention: heads gather features of the key, and descriptors of the value alone make two of
its three loops longer.

Descriptors are made on the host, per call: both take 25 us of its time, most of it in Triton's launcher. Those made in
a kernel need `triton.set_allocator`, global state of the user's process. They are arguments of their own, because
Triton 3.6 finds none inside tuples.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from heads_kernels.ops.triton.load import load_tile


def describable(rows: Tensor) -> bool:
    """Whether a descriptor can describe rows `[B, H, L, W]` of 16 bits.

    The first address and the strides must be multiples of 16 bytes, and strides below 2**40. Dimensions of stride 0
    are left to pointers: CUDA's documentation of `cuTensorMapEncodeTiled` does not say that they may be described.
    """
    if rows.dim() != 4 or rows.dtype.itemsize != 2 or not rows.numel() or rows.data_ptr() % 16:
        return False
    outer = zip(rows.shape[:3], rows.stride()[:3], strict=True)
    return all(size == 1 or (0 < s < 1 << 39 and s % 8 == 0) for size, s in outer)


def tiles_in(rows: Tensor, block: int, columns: int) -> TensorDescriptor:
    """A descriptor of tiles `[block, columns]` of rows `[B, H, L, W]`; beyond rows and columns they are 0.

    All four dimensions are described, so that heads and batches may have any (`describable`) strides.
    """
    strides = [*outer_strides(rows), 1]
    return TensorDescriptor(rows, list(rows.shape), strides, [1, 1, block, columns])


def outer_strides(rows: Tensor) -> list[int]:
    """The strides of batches, heads and rows; 8, which suits descriptors, where there is one only."""
    outer = zip(rows.shape[:3], rows.stride()[:3], strict=True)
    return [8 if size == 1 else stride for size, stride in outer]


#: Fewer keys come through pointers: a shorter call ends before the 25 us of its launch do (heuristic).
FEWEST_KEYS = 512


@triton.jit
def load_keys(
    rows, tiles, b, h, first, there, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    """`load_tile`; a full tile comes through the descriptor `tiles` of `rows`, unless that is None."""
    if (tiles is None) or (there is not None):
        tile = load_tile(rows, b, h, first, there, WIDTH, BLOCK, COLUMNS)
    else:
        tile = tiles.load([b, h, first, 0]).reshape(BLOCK, COLUMNS)
    return tile
