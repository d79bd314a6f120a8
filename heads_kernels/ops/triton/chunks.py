"""Mixing vectors by chunks of BLOCK_D features: those of a head that are not all zero, and the steps over them.

Heads that use few features take few steps over a tile; how many is decided on the device. The forward stream counts the
steps of all tiles together (`step // count` is the tile, `step % count` the place of the chunk), so that the next
chunks are on their way during the softmax; the backward, short of registers, has a loop of chunks in its loop of tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Chunks that fit into the list: 16 of 4 bits each in one int64.
MOST_CHUNKS = 16


@triton.jit
def load_mixing(mixing, h, column, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """float32 `[BLOCK_D]`: features `column` and on of a head's mixing vector, 0 from WIDTH."""
    d = column + tl.arange(0, BLOCK_D)
    at = mixing.ptr + h.to(tl.int64) * mixing.stride_h + d.to(tl.int64) * mixing.stride_d
    return tl.load(at, mask=d < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def active_chunks(mixing, h, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, CHUNKS: tl.constexpr):
    """How many chunks of a head are not all zero, and their numbers as a list for `chunk_at`.

    A head without any has one step a tile all the same, over chunk 0: its scores are its content bias.
    """
    chunks = tl.arange(0, CHUNKS)
    d = chunks[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]  # [CHUNKS, BLOCK_D]
    at = mixing.ptr + h.to(tl.int64) * mixing.stride_h + d.to(tl.int64) * mixing.stride_d
    used = tl.load(at, mask=d < WIDTH, other=0.0) != 0.0  # in its own dtype
    active = tl.max(used.to(tl.int32), 1)  # [CHUNKS]
    place = (tl.cumsum(active) - active).to(tl.int64)
    numbers = tl.sum(tl.where(active != 0, chunks.to(tl.int64) << (4 * place), 0))
    return tl.maximum(tl.sum(active), 1), numbers


@triton.jit
def chunk_at(numbers, place):
    """The number of the chunk at `place` in the list."""
    return ((numbers >> (4 * place)) & 15).to(tl.int32)


@triton.jit
def mixed(tile, mixing, h, column, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """`tile` [M, BLOCK_D] of a shared query or key times the head's mixing, rounded to the dtype of the tile."""
    return (tile.to(tl.float32) * load_mixing(mixing, h, column, WIDTH, BLOCK_D)[None, :]).to(
        tile.dtype
    )


@triton.jit
def load_content_bias(content_bias, b, h, keys, S):
    """float32 `[N]`: the content bias of keys, 0 where there is none."""
    at = (
        content_bias.ptr
        + b.to(tl.int64) * content_bias.stride_b
        + h.to(tl.int64) * content_bias.stride_h
    )
    return tl.load(at + keys.to(tl.int64) * content_bias.stride_s, mask=keys < S, other=0.0).to(
        tl.float32
    )
