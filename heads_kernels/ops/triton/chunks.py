"""Mixing vectors by chunks of BLOCK_D features: those of a head that are not all zero, and the steps over them.

Heads that use few features take few steps over a tile; how many is decided on the device. The forward pass and the
passes for `dkey` and `dquery` gather few chunks into one tile; for many, and in the other passes, a loop over chunks is
inside the loop over tiles. Statistics count the steps of all tiles together (`step // count` is the tile,
`step % count` the place of the chunk), so that the next chunks are on their way during the softmax.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from heads_kernels.ops.triton.load import add_columns

#: Chunks that fit into the list: 16 of 4 bits each in one int64.
MOST_CHUNKS = 16
#: The list of all of them in order: 0xFEDCBA9876543210 as an int64.
ALL_CHUNKS: tl.constexpr = tl.constexpr(-0x0123456789ABCDF0)


class Chunks(NamedTuple):
    """A list of chunks, in a kernel: its length, and their numbers for `chunk_at`."""

    length: Any
    numbers: Any


@triton.jit
def load_mixing(mixing, h, columns, used):
    """float32 `[W]`: the features `columns` of a head's mixing vector, 0 where they are not `used`; [W] both."""
    at = mixing.ptr + h.to(tl.int64) * mixing.stride_h + columns.to(tl.int64) * mixing.stride_d
    return tl.load(at, mask=used, other=0.0).to(tl.float32)


@triton.jit
def active_chunks(mixing, h, TILE: tl.constexpr):
    """The chunks of a head that are not all zero.

    A head without any has one step a tile all the same, over chunk 0: its scores are its content bias.
    """
    chunks = tl.arange(0, TILE.chunks)
    d = chunks[:, None] * TILE.block_d + tl.arange(0, TILE.block_d)[None, :]  # [chunks, BLOCK_D]
    at = mixing.ptr + h.to(tl.int64) * mixing.stride_h + d.to(tl.int64) * mixing.stride_d
    used = tl.load(at, mask=d < TILE.d, other=0.0) != 0.0  # in its own dtype
    active = tl.max(used.to(tl.int32), 1)  # [chunks]
    place = (tl.cumsum(active) - active).to(tl.int64)
    numbers = tl.sum(tl.where(active != 0, chunks.to(tl.int64) << (4 * place), 0))
    return Chunks(tl.maximum(tl.sum(active), 1), numbers)


@triton.jit
def chunk_at(chunks, place):
    """The number of the chunk at `place` in the list."""
    return ((chunks.numbers >> (4 * place)) & 15).to(tl.int32)


@triton.jit
def active_features(chunks, first, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """The features of the chunks of a list from place `first` on, one chunk behind the other, and which of them there
    are: [COLUMNS] both."""
    place = first + tl.arange(0, COLUMNS) // TILE.block_d
    columns = chunk_at(chunks, place) * TILE.block_d + tl.arange(0, COLUMNS) % TILE.block_d
    return columns, (place < chunks.length) & (columns < TILE.d)


@triton.jit
def halves(tile):
    """The columns of `tile` [M, W] up to W / 2, and those from there on."""
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def add_chunks(rows, b, first, L, chunks, place, values, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Add `values` [BLOCK, W] to the features of the chunks of a list from `place` on; a program's own rows only.

    W is split in halves down to one chunk: what is read from memory needs registers beside `values`.
    """
    if values.shape[1] > TILE.block_d:
        low, high = halves(values)
        add_chunks(rows, b, first, L, chunks, place, low, BLOCK, TILE)
        place += low.shape[1] // TILE.block_d
        add_chunks(rows, b, first, L, chunks, place, high, BLOCK, TILE)
    else:
        end = tl.where(chunks.length > place, L, 0)
        column = chunk_at(chunks, place) * TILE.block_d
        add_columns(rows, b, first, end, column, values, TILE.d, BLOCK, TILE.block_d)


@triton.jit
def mixed(tile, mixing, h, columns, used):
    """`tile` [M, W] of features of a shared query or key times the head's mixing, rounded to the dtype of the tile."""
    return (tile.to(tl.float32) * load_mixing(mixing, h, columns, used)[None, :]).to(tile.dtype)


@triton.jit
def load_content_bias(content_bias, b, h, keys, S):
    """float32 `[N]`: the content bias of keys, 0 where there is none.

    Beyond 2^120 it counts as that, so that its product with the scale is finite. Products with a power of 2 are exact:
    equal ones are equal to their maximum in the softmax.
    """
    at = (
        content_bias.ptr
        + b.to(tl.int64) * content_bias.stride_b
        + h.to(tl.int64) * content_bias.stride_h
    )
    at += keys.to(tl.int64) * content_bias.stride_s
    values = tl.load(at, mask=keys < S, other=0.0).to(tl.float32)
    most: tl.constexpr = 2.0**120
    bounded = tl.minimum(tl.maximum(values, -most), most)
    return tl.where(tl.abs(values) < float("inf"), bounded, values)
