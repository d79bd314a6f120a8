"""Tiles of rows in memory: the one place where kernels form addresses of queries, keys, values and gradients."""

from __future__ import annotations

import triton
import triton.language as tl


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
    """Addresses `[BLOCK, COLUMNS]` of rows `first` and on; `first` is an int32 scalar."""
    start = head_of(rows, b, h) + first.to(tl.int64) * rows.stride_l
    return start + tl.arange(0, BLOCK)[:, None] * rows.stride_l + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def load_tile(
    rows, b, h, first, there, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    """`[BLOCK, COLUMNS]` of rows `first` and on; 0 in rows that are not `there` [BLOCK] and in columns from WIDTH.

    `there` is None where all rows are.
    """
    at = tile_addresses(rows, b, h, first, BLOCK, COLUMNS)
    inside = (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    if there is not None:
        read = there[:, None]
        if WIDTH != COLUMNS:
            read = read & inside
        tile = tl.load(at, mask=read, other=0.0)
    elif WIDTH != COLUMNS:
        tile = tl.load(at, mask=inside, other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def load_features(rows, b, first, there, columns, used, BLOCK: tl.constexpr):
    """`[BLOCK, W]`: the features `columns` of rows shared by the heads, where they are `used`; [W] both.

    `there` is as of `load_tile`.
    """
    start = rows.ptr + b.to(tl.int64) * rows.stride_b + first.to(tl.int64) * rows.stride_l
    at = start + tl.arange(0, BLOCK)[:, None] * rows.stride_l + columns[None, :]
    read = used[None, :]
    if there is not None:
        read = read & there[:, None]
    return tl.load(at, mask=read, other=0.0)


@triton.jit
def store_tile(
    rows, b, h, first, L, values, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    """Store `values` [BLOCK, COLUMNS], rounded to the dtype of the tensor."""
    at = tile_addresses(rows, b, h, first, BLOCK, COLUMNS)
    there = (first + tl.arange(0, BLOCK) < L)[:, None] & (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    tl.store(at, values.to(rows.ptr.dtype.element_ty), mask=there)


@triton.jit
def column_addresses(rows, b, first, column, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Addresses `[BLOCK, COLUMNS]` of rows shared by the heads, from row `first` and `column` on."""
    start = rows.ptr + b.to(tl.int64) * rows.stride_b + first.to(tl.int64) * rows.stride_l + column
    return start + tl.arange(0, BLOCK)[:, None] * rows.stride_l + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def load_columns(
    rows, b, first, there, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    """`[BLOCK, COLUMNS]` of rows shared by the heads, from `column` on; as `load_tile`."""
    read = there[:, None]
    if WIDTH == 0 or WIDTH % COLUMNS != 0:
        read = read & (column + tl.arange(0, COLUMNS) < WIDTH)[None, :]
    return tl.load(column_addresses(rows, b, first, column, BLOCK, COLUMNS), mask=read, other=0.0)


@triton.jit
def add_columns(
    rows, b, first, L, column, values, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Add `values` [BLOCK, COLUMNS] to what stands in memory from `column` on; a program's own rows only."""
    at = column_addresses(rows, b, first, column, BLOCK, COLUMNS)
    there = (first + tl.arange(0, BLOCK) < L)[:, None] & (column + tl.arange(0, COLUMNS) < WIDTH)[
        None, :
    ]
    tl.debug_barrier()  # another thread of the program may have stored what this one reads
    tl.store(at, tl.load(at, mask=there, other=0.0) + values, mask=there)
