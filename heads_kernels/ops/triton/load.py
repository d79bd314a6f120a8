"""Tiles of rows in memory: the one place where kernels form addresses of queries, keys, values and gradients.

On NVIDIA's sm_90 and newer, full tiles of keys and values are loaded through tensor descriptors: one thread requests a
whole tile. The copy needs no addresses, registers or instructions of the other threads, which leaves registers for two
tiles per step. Partial tiles, which would spill, and rows that no descriptor can describe are loaded through pointers.
So are those of collaborative attention in Triton's kernels: heads gather features of the key, and descriptors of the
value alone make two of three loops longer.

Descriptors are made on the host for each call: both take 25 us, most of it in Triton's launcher. Descriptors made in a
kernel would need `triton.set_allocator`, global state of the user's process. They are separate arguments, because
Triton 3.6 does not find them inside tuples.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

#: Fewer keys are loaded through pointers: a shorter call takes less than the 25 us of the descriptors (heuristic).
FEWEST_KEYS = 512


def describable(rows: Tensor) -> bool:
    """Whether a descriptor can describe rows `[B, H, L, W]`, or `[B, L, W]` shared by the heads, of 16 bits.

    The first address and the strides must be multiples of 16 bytes, and strides below 2**40. Dimensions of stride 0
    are left to pointers: CUDA's documentation of `cuTensorMapEncodeTiled` does not say that they may be described.
    """
    if rows.dtype.itemsize != 2 or not rows.numel() or rows.data_ptr() % 16:
        return False
    outer = list(zip(rows.shape, rows.stride(), strict=True))[:-1]
    return all(size == 1 or (0 < s < 1 << 39 and s % 8 == 0) for size, s in outer)


def tiles_in(rows: Tensor, block: int, columns: int) -> TensorDescriptor:
    """A descriptor of tiles `[block, columns]` of rows `[B, H, L, W]`; beyond rows and columns they are 0.

    All four dimensions are described, so that heads and batches may have any (`describable`) strides.
    """
    return TensorDescriptor(rows, list(rows.shape), described_strides(rows), [1, 1, block, columns])


def described_strides(rows: Tensor) -> list[int]:
    """The strides of `rows`; 8, which a descriptor can have, for dimensions of size 1."""
    outer = zip(rows.shape[:3], rows.stride()[:3], strict=True)
    return [*(8 if size == 1 else stride for size, stride in outer), 1]


@triton.jit
def load_keys(rows, tiles, b, h, first, there, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """`load_tile`; a full tile is loaded through the descriptor `tiles` of `rows`, unless that is None."""
    if (tiles is None) or (there is not None):
        tile = load_tile(rows, b, h, first, there, WIDTH, BLOCK, COLUMNS)
    else:
        tile = tiles.load([b, h, first, 0]).reshape(BLOCK, COLUMNS)
    return tile


@triton.jit
def head_of(rows, b, h):
    """Address of the first row of a head."""
    return rows.ptr + b.to(tl.int64) * rows.stride_b + h.to(tl.int64) * rows.stride_h


@triton.jit
def pair_addresses(cells, far, of_batch, pairs):
    """Addresses of the `cells` of a bias or dense mask at `pairs`; its batch begins at element `of_batch`."""
    start = cells.ptr + of_batch + pairs.h.to(tl.int64) * cells.stride_h
    rows, keys = pairs.rows, pairs.keys
    if far is not None:
        rows = rows.to(tl.int64)
        keys = keys.to(tl.int64)
    return start + (rows * cells.stride_t + keys * cells.stride_s)


@triton.jit
def tile_addresses(rows, b, h, first, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Addresses `[BLOCK, COLUMNS]` of the rows from `first` on; `first` is an int32 scalar."""
    start = head_of(rows, b, h) + first.to(tl.int64) * rows.stride_l
    return start + tl.arange(0, BLOCK)[:, None] * rows.stride_l + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def load_tile(rows, b, h, first, there, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """`[BLOCK, COLUMNS]` of the rows from `first` on; 0 in rows that are not `there` [BLOCK] and in columns from WIDTH.

    `there` None: all rows are.
    """
    inside = None
    if WIDTH != COLUMNS:
        inside = tl.arange(0, COLUMNS) < WIDTH
    return _load(tile_addresses(rows, b, h, first, BLOCK, COLUMNS), there, inside)


@triton.jit
def load_values(rows, b, h, first, there, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """`load_tile` [BLOCK, BLOCK_DV] of rows as wide as the value."""
    return load_tile(rows, b, h, first, there, TILE.dv, BLOCK, TILE.block_dv)


@triton.jit
def _load(at, there, inside):
    """Load `at` [BLOCK, W]; 0 in rows that are not `there` and in columns that are not `inside`; None: all are."""
    if (there is None) and (inside is None):
        tile = tl.load(at)
    elif there is None:
        tile = tl.load(at, mask=inside[None, :], other=0.0)
    elif inside is None:
        tile = tl.load(at, mask=there[:, None], other=0.0)
    else:
        tile = tl.load(at, mask=there[:, None] & inside[None, :], other=0.0)
    return tile


@triton.jit
def store_tile(rows, b, h, first, L, values, WIDTH: tl.constexpr):
    """Store `values` [BLOCK, COLUMNS], rounded to the dtype of the tensor, in rows below L and columns below WIDTH."""
    BLOCK: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    at = tile_addresses(rows, b, h, first, BLOCK, COLUMNS)
    there = (first + tl.arange(0, BLOCK) < L)[:, None] & (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    tl.store(at, values.to(rows.ptr.dtype.element_ty), mask=there)


# ---------------------------------------------------------------------- rows shared by the heads, with mixing
@triton.jit
def load_features(rows, b, first, there, columns, used, BLOCK: tl.constexpr):
    """`[BLOCK, W]`: the features `columns` of rows shared by the heads, where they are `used` (None: all); both [W].

    `there` is as in `load_tile`.
    """
    start = rows.ptr + b.to(tl.int64) * rows.stride_b + first.to(tl.int64) * rows.stride_l
    at = start + tl.arange(0, BLOCK)[:, None] * rows.stride_l + columns[None, :]
    return _load(at, there, used)


@triton.jit
def add_columns(rows, b, first, L, column, values, WIDTH: tl.constexpr):
    """Add `values` [BLOCK, COLUMNS] in memory, from `column` on; only to rows that the program owns."""
    BLOCK: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    start = rows.ptr + b.to(tl.int64) * rows.stride_b + first.to(tl.int64) * rows.stride_l + column
    at = start + tl.arange(0, BLOCK)[:, None] * rows.stride_l + tl.arange(0, COLUMNS)[None, :]
    of_columns = (column + tl.arange(0, COLUMNS) < WIDTH)[None, :]
    there = (first + tl.arange(0, BLOCK) < L)[:, None] & of_columns
    tl.debug_barrier()  # another thread of the program may have stored what this one reads
    tl.store(at, tl.load(at, mask=there, other=0.0) + values, mask=there)
