"""Tiles of keys of the forward kernel in Gluon: which ones a program visits, and the warps that load and inspect them.

Consumers (`gluon_forward`) read rings of tiles of keys and values in shared memory, full tiles first, then partial
ones. `producer` (one warp) loads them, and `inspector` (two warps) reads partial ones first. In collaborative attention
a tile of keys is as many tiles of the ring as its head has chunks of features.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from heads_kernels.ops.triton.load import described_strides, head_of
from heads_kernels.ops.triton.operands import Cells, Mixing, Place, RowLse, Rows, Terms, Visible
from heads_kernels.ops.triton.score_tiles import chunk_at, load_content_bias
from heads_kernels.ops.triton.visible import full_tile, partial_count, partial_tile

# Older names until Triton 3.7.
load_tiles: Final = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tiles: Final = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
# An older name until Triton 3.6.
barrier: Final = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

#: Bytes that the heads that run at once may read: what other data leave of the 50 MiB of L2 (heuristic).
CACHED: Final = 32 << 20
#: Query rows of a consumer: the fewest that four warps can multiply.
CONSUMER_ROWS: gl.constexpr = gl.constexpr(64)


class Shared(NamedTuple):
    """Shared memory, in a kernel: tiles, and barriers."""

    query: Any  # [2 * CHUNKS, 1, 1, ROWS, BLOCK_D], CHUNKS tiles for each consumer; then its output
    key: Any  # [KEY_STAGES, 1, 1, BLOCK_N, BLOCK_D]
    content: Any  # float32 [KEY_STAGES, BLOCK_N], the content bias; None without one
    value: Any  # [STAGES, 1, 1, BLOCK_N, BLOCK_DV]
    poison: Any  # float32 [STAGES, BLOCK_N], of partial tiles
    query_ready: Any  # [2 * CHUNKS]
    key_ready: Any  # [KEY_STAGES]
    key_free: Any
    value_landed: Any  # [STAGES]
    value_ready: Any
    value_free: Any
    turns: Any  # [2]


class Global(NamedTuple):
    """Descriptors of tiles in global memory, in a kernel."""

    query: Any  # [1, 1, ROWS, BLOCK_D]
    key: Any  # [1, 1, BLOCK_N, BLOCK_D]
    value: Any  # [1, 1, BLOCK_N, BLOCK_DV]
    out: Any  # [1, 1, ROWS, BLOCK_DV]
    attended: Any  # None if it is not requested


class Others(NamedTuple):
    """What is not read or written through descriptors; mixing, content bias and chunks are None in gated attention."""

    terms: Terms
    visible: Visible
    gate: Cells | None
    lse: RowLse
    mixing: Mixing | None
    content_bias: Rows | None
    chunks: Any = None  # in a kernel: those of the program's head


@gluon.jit
def barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """NUMBER barriers, each of which completes after ARRIVALS arrivals."""
    added = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(added.index(i), count=ARRIVALS)
    return added


@gluon.jit
def place_of(sizes, together, TILE: gl.constexpr, ROWS: gl.constexpr):
    """The place of a program among `together` heads that run at once; `sizes.T` rows have tiles."""
    tiles = gl.cdiv(sizes.T, TILE.block_m)
    heads = gl.num_programs(0) // tiles
    first = gl.program_id(0) // (together * tiles) * together
    beside = gl.minimum(heads - first, together)
    program = gl.program_id(0) - first * tiles
    pair = first + program % beside
    b, h = pair // sizes.H, pair % sizes.H
    first_row = (tiles - 1 - program // beside) * TILE.block_m
    return Place(b, h, h // sizes.group, first_row, first_row + gl.arange(0, TILE.block_m, layout=ROWS))


@gluon.jit
def first_key(visible, place, index, visits, TILE: gl.constexpr):
    """The first key of the tile that is visited at `index`: full tiles come first."""
    own = place.first // TILE.block_m
    full = visits.full_end - visits.full_start
    if index < full:
        number = full_tile(visible, place.b, place.h, own, visits.full_start + index)
    else:
        number = partial_tile(visible, place.b, place.h, own, index - full, visits)
    return number * TILE.block_n


@gluon.jit
def chunk_count(of):
    """The number of tiles that the rows of a query, or of a tile of keys, are loaded in."""
    count = 1
    if of.chunks is not None:
        count = of.chunks.length
    return count


@gluon.jit
def first_column(of, chunk, TILE: gl.constexpr):
    """The first feature of a head's tile at `chunk`."""
    column = 0
    if of.chunks is not None:
        column = chunk_at(of.chunks, chunk) * TILE.block_d
    return column


@gluon.jit
def producer(memory, shared, of, place, visits, sizes, TILE: gl.constexpr):
    """Load the query, and tiles of keys and values as their places become free; of keys also the content bias."""
    ROWS: gl.constexpr = CONSUMER_ROWS
    KEY_BYTES: gl.constexpr = 2 * TILE.block_n * TILE.block_d
    VALUE_BYTES: gl.constexpr = 2 * TILE.block_n * TILE.block_dv
    CHUNKS: gl.constexpr = shared.query.shape[0] // 2
    KEY_STAGES: gl.constexpr = shared.key.shape[0]
    KEYS: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    b, h, hk = place.b, place.h, place.hk
    full = visits.full_end - visits.full_start
    count = full + partial_count(visits)
    chunks = chunk_count(of)
    of_query, of_key = h, hk
    if of.chunks is not None:
        of_query, of_key = 0, 0
    if count > 0:
        for who in gl.static_range(2):
            first_row = place.first + who * ROWS
            for chunk in range(chunks):
                tile = who * CHUNKS + chunk
                ready = shared.query_ready.index(tile)
                mbarrier.expect(ready, 2 * ROWS * TILE.block_d)
                at = [b, of_query, first_row, first_column(of, chunk, TILE)]
                load_tiles(memory.query, at, ready, shared.query.index(tile))
    for index in range(count):
        first = first_key(of.visible, place, index, visits, TILE)
        if shared.content is not None:
            keys = first + gl.arange(0, TILE.block_n, layout=KEYS)
            content = load_content_bias(of.content_bias, b, h, keys, sizes.S)
        for chunk in range(chunks):
            number = index * chunks + chunk
            stage = number % KEY_STAGES
            mbarrier.wait(shared.key_free.index(stage), (number // KEY_STAGES + 1) & 1)
            if shared.content is not None:
                shared.content.index(stage).store(content)
            ready = shared.key_ready.index(stage)
            mbarrier.expect(ready, KEY_BYTES)
            at = [b, of_key, first, first_column(of, chunk, TILE)]
            load_tiles(memory.key, at, ready, shared.key.index(stage))
        stage = index % TILE.stages
        mbarrier.wait(shared.value_free.index(stage), (index // TILE.stages + 1) & 1)
        if index < full:
            ready = shared.value_ready.index(stage)
            mbarrier.expect(ready, VALUE_BYTES)
            load_tiles(memory.value, [b, hk, first, 0], ready, shared.value.index(stage))
        else:
            landed = shared.value_landed.index(stage)
            mbarrier.expect(landed, VALUE_BYTES)
            load_tiles(memory.value, [b, hk, first, 0], landed, shared.value.index(stage))


@gluon.jit
def inspector(shared, visits, TILE: gl.constexpr):
    """In partial tiles, set values that are not finite to 0, and the `poison` of their keys to NaN.

    The product reads values of keys that a row does not see, and 0 times NaN is NaN. Poison is added to the scores of
    the rows that do see the key (`scores.poison`). Most tiles are finite, which the sum of `0 * value` shows.
    """
    # Parts of 8 rows and 64 features: 8 numbers per thread.
    PART: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    OF_KEYS: gl.constexpr = gl.SliceLayout(1, PART)
    BLOCK_N: gl.constexpr = TILE.block_n
    BLOCK_DV: gl.constexpr = TILE.block_dv
    full = visits.full_end - visits.full_start
    for index in range(full, full + partial_count(visits)):
        stage = index % TILE.stages
        mbarrier.wait(shared.value_landed.index(stage), ((index - full) // TILE.stages) & 1)
        tile = shared.value.index(stage).reshape([BLOCK_N, BLOCK_DV])
        poison = shared.poison.index(stage)
        sums = gl.zeros([8, 64], gl.float32, layout=PART)
        for first in gl.static_range(0, BLOCK_N, 8):
            poison.slice(first, 8).store(gl.zeros([8], gl.float32, layout=OF_KEYS))
            for column in gl.static_range(0, BLOCK_DV, 64):
                part = tile.slice(first, 8).slice(column, 64, dim=1)
                sums += part.load(PART).to(gl.float32) * 0.0
        if gl.max(gl.max(gl.where(sums == 0.0, 0, 1), 1), 0) != 0:
            for first in gl.static_range(0, BLOCK_N, 8):
                of_keys = gl.zeros([8], gl.float32, layout=OF_KEYS)
                for column in gl.static_range(0, BLOCK_DV, 64):
                    part = tile.slice(first, 8).slice(column, 64, dim=1)
                    values = part.load(PART).to(gl.float32)
                    of_keys += gl.sum(values - values, 1)
                    part.store(gl.where((values - values) == 0.0, values, 0.0).to(tile.dtype))
                poison.slice(first, 8).store(of_keys)
            fence_async_shared()
        mbarrier.arrive(shared.value_ready.index(stage), count=1)


@gluon.jit
def store_rows(rows, values, part, head, at, columns, S, WIDTH: gl.constexpr):
    """Store `values` of the rows `at` of a head, in one `part` of the sums."""
    to = head_of(rows, part, head) + at.to(gl.int64)[:, None] * rows.stride_l + columns[None, :]
    there = (at < S)[:, None] & (columns < WIDTH)[None, :]
    gl.store(to, values.to(rows.ptr.dtype.element_ty), mask=there)


def tiles_of(rows: Tensor, block: int, columns: int) -> TensorDescriptor:
    """`load.tiles_in`, with the layout that products read; rows that heads share are those of one head."""
    rows = rows if rows.dim() == 4 else rows.unsqueeze(1)
    shape = [1, 1, block, columns]
    strides, layout = described_strides(rows), _layout(*shape, rows.dtype)
    return TensorDescriptor(rows, list(rows.shape), strides, shape, layout)


@functools.cache
def _layout(*shape: Any) -> gl.NVMMASharedLayout:
    """The layout of a tile in shared memory, from its sizes and dtype."""
    *sizes, dtype = shape
    return gl.NVMMASharedLayout.get_default_for(sizes, getattr(gl, str(dtype).split(".")[1]))
