"""Tiles of query rows of the backward kernel in Gluon: which ones a program visits, and the warps that move them.

Consumers (`gluon_backward`) read rings of tiles in shared memory, full tiles first, then partial ones. `producer` (one
warp) and `reader` (one) load them; two copies of `adder` (one warp each) add tiles of dquery to global memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from heads_kernels.ops.triton.gate import open_rows
from heads_kernels.ops.triton.gluon_tiles import load_tiles, store_tiles
from heads_kernels.ops.triton.operands import Place, Visible
from heads_kernels.ops.triton.visible import full_tile, listed_tiles, partial_count, partial_tile, ranges, tiles_seeing


class Global(NamedTuple):
    """Descriptors of tiles in global memory."""

    query: Any  # [1, 1, BLOCK_M, BLOCK_D]
    key: Any  # [1, 1, BLOCK_N, BLOCK_D]
    value: Any
    dout: Any  # dattended: dout times the gates of rows
    dquery: Any  # float32, in global memory
    end: None = None


class Shared(NamedTuple):
    """Shared memory, in a kernel: tiles, and barriers."""

    key: Any  # [1, 1, BLOCK_N, BLOCK_D]
    value: Any
    query: Any  # [STAGES, 1, 1, BLOCK_M, BLOCK_D]
    dout: Any
    lse: Any  # float32 [STAGES, BLOCK_M]
    delta: Any
    lo: Any  # int32 [STAGES, BLOCK_M], of masked tiles
    hi: Any
    dscores: Any  # [BLOCK_N, BLOCK_M]
    dquery: Any  # float32 [2, 1, 1, BLOCK_M, BLOCK_D]
    keys_ready: Any  # [1]
    query_ready: Any  # [STAGES]
    dout_ready: Any
    terms_ready: Any
    free: Any
    dquery_ready: Any  # [2], of even and odd tiles
    dquery_free: Any


class Seen(NamedTuple):
    """`Visible` with lists of tiles of rows, and with those of keys."""

    by_keys: Visible
    by_rows: Visible
    end: None = None


class Visit(NamedTuple):
    """The `count` tiles of rows of a head, in a kernel: the first `full` are full, the first `plain` need no mask."""

    visits: Any
    full: Any
    plain: Any
    count: Any


@gluon.jit
def tiles_of_head(visible, gate, place, index, sizes, TILE: gl.constexpr):
    """The place of a program's keys in the query head at `index` of those that it owns, and its tiles of rows."""
    h = place.h + index
    own = Place(place.b, h, place.hk, place.first, None)
    visits = tiles_seeing(visible, own, sizes, TILE)
    taking_part = gl.minimum(open_rows(gate, place.b, h, sizes.T, TILE), 1)
    full = (visits.full_end - visits.full_start) * taking_part
    count = full + partial_count(visits) * taking_part
    # A tile with keys beyond the last one is masked, so that their dscores are 0.
    plain = gl.where(place.first + TILE.block_n <= sizes.S, full, 0)
    return own, Visit(visits, full, plain, count)


@gluon.jit
def _first_row(visible, place, visit, index, TILE: gl.constexpr):
    """The first row of the tile that is visited at `index`; full tiles in descending order, as in all programs."""
    own = place.first // TILE.block_n
    if index < visit.full:
        number = visit.visits.full_start + visit.full - 1 - index
        tile = full_tile(visible, place.b, place.h, own, number)
    else:
        tile = partial_tile(visible, place.b, place.h, own, index - visit.full, visit.visits)
    return tile * TILE.block_m


@gluon.jit
def next_place(stage, phase, STAGES: gl.constexpr):
    """The place in a ring of the next step, and the phase of its barriers."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def producer(memory, reads, shared, visible, place, heads, sizes, TILE: gl.constexpr):
    """Load the keys and values, and tiles of query and dattended as their places become free."""
    BYTES: gl.constexpr = 2 * TILE.block_m * TILE.block_d
    ready = shared.keys_ready.index(0)
    mbarrier.expect(ready, 4 * TILE.block_n * TILE.block_d)
    at = [place.b, place.hk, place.first, 0]
    load_tiles(memory.key, at, ready, shared.key)
    load_tiles(memory.value, at, ready, shared.value)
    stage, phase = place.first * 0, place.first * 0
    for number in range(heads):
        own, visit = tiles_of_head(visible, reads.gate, place, number, sizes, TILE)
        for index in range(visit.count):
            first = _first_row(visible, own, visit, index, TILE)
            mbarrier.wait(shared.free.index(stage), phase ^ 1)
            ready = shared.query_ready.index(stage)
            mbarrier.expect(ready, BYTES)
            load_tiles(memory.query, [own.b, own.h, first, 0], ready, shared.query.index(stage))
            ready = shared.dout_ready.index(stage)
            mbarrier.expect(ready, BYTES)
            load_tiles(memory.dout, [own.b, own.h, first, 0], ready, shared.dout.index(stage))
            stage, phase = next_place(stage, phase, TILE.stages)


@gluon.jit
def reader(reads, shared, visible, place, heads, sizes, TILE: gl.constexpr):
    """Load lse and delta of rows. In masked tiles, set rows with a number that is not finite to 0.

    Their lse is nan, which makes the gradients of exactly the keys that they see nan; see `rows.load_row_terms`.
    """
    BLOCK_M: gl.constexpr = TILE.block_m
    # Parts of 8 rows and 64 features: 16 numbers per thread.
    PART: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, PART)
    stage, phase = place.first * 0, place.first * 0
    for number in range(heads):
        own, visit = tiles_of_head(visible, reads.gate, place, number, sizes, TILE)
        of_head = (own.b * sizes.H + own.h).to(gl.int64) * sizes.T
        for index in range(visit.count):
            first = _first_row(visible, own, visit, index, TILE)
            rows = first + gl.arange(0, BLOCK_M, layout=ROWS)
            lse = gl.load(reads.lse.ptr + of_head + rows, mask=rows < sizes.T, other=float("inf"))
            delta = gl.load(reads.delta + of_head + rows, mask=rows < sizes.T, other=0.0)
            finite = gl.abs(lse) < float("inf")
            mbarrier.wait(shared.free.index(stage), phase ^ 1)
            shared.lse.index(stage).store(lse)
            shared.delta.index(stage).store(delta)
            if index >= visit.plain:
                lo, hi = ranges(visible, own.b, own.h, rows, sizes.T, sizes.S)
                shared.lo.index(stage).store(lo)
                shared.hi.index(stage).store(hi)
                mbarrier.wait(shared.query_ready.index(stage), phase)
                mbarrier.wait(shared.dout_ready.index(stage), phase)
                if gl.min(finite.to(gl.int32), 0) == 0:
                    query = shared.query.index(stage).reshape([BLOCK_M, TILE.block_d])
                    dout = shared.dout.index(stage).reshape([BLOCK_M, TILE.block_d])
                    for row in gl.static_range(0, BLOCK_M, 8):
                        of_part = shared.lse.index(stage).slice(row, 8).load(OF_ROWS)
                        there = (gl.abs(of_part) < float("inf"))[:, None]
                        for column in gl.static_range(0, TILE.block_d, 64):
                            part = query.slice(row, 8).slice(column, 64, dim=1)
                            part.store(gl.where(there, part.load(PART), 0.0).to(query.dtype))
                            part = dout.slice(row, 8).slice(column, 64, dim=1)
                            part.store(gl.where(there, part.load(PART), 0.0).to(query.dtype))
                    fence_async_shared()
            mbarrier.arrive(shared.terms_ready.index(stage), count=1)
            stage, phase = next_place(stage, phase, TILE.stages)


@gluon.jit
def adder(memory, counters, reads, shared, seen, place, heads, sizes, TURN: gl.constexpr, TILE: gl.constexpr):
    """Add every other tile of dquery in global memory, after the programs with smaller keys have added theirs.

    The first program of a tile of rows stores it, so that the sums need not start as zeros. Asking for the counter,
    the addition and the signal to the next program take longer than a consumer's round: two adders take turns.
    """
    tiles = gl.cdiv(sizes.T, TILE.block_m)
    buffer = shared.dquery.index(TURN)
    ready, free = shared.dquery_ready.index(TURN), shared.dquery_free.index(TURN)
    turn, phase = place.first * 0, place.first * 0
    for number in range(heads):
        own, visit = tiles_of_head(seen.by_keys, reads.gate, place, number, sizes, TILE)
        for index in range(visit.count):
            if turn == TURN:
                first = _first_row(seen.by_keys, own, visit, index, TILE)
                tile = first // TILE.block_m
                added = counters + 1 + (own.b * sizes.H + own.h).to(gl.int64) * tiles + tile
                before = _before(seen.by_rows, own, tile, sizes, TILE)
                while gl.atomic_add(added, 0, sem="acquire") != before:
                    pass
                mbarrier.wait(ready, phase)
                if before == 0:
                    store_tiles(memory.dquery, [own.b, own.h, first, 0], buffer)
                else:
                    tma.async_atomic_add(memory.dquery, [own.b, own.h, first, 0], buffer)
                tma.store_wait(0)
                mbarrier.arrive(free, count=1)
                tma.store_wait(0, read_only=False)
                gl.atomic_add(added, 1, sem="release")
                phase ^= 1
            turn ^= 1


@gluon.jit
def _before(visible, place, tile, sizes, TILE: gl.constexpr):
    """How many tiles of keys before that of `place` visit a `tile` of rows."""
    own = place.first // TILE.block_n
    if visible.lists is None:
        before = own - gl.maximum(tile * TILE.block_m + visible.band_lo, 0) // TILE.block_n
    else:
        KEYS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        visits = listed_tiles(visible, place.b, place.h, tile, sizes.T)
        before = own * 0
        for part in gl.static_range(2):  # full tiles, then partial ones
            count = visits.full_end if part == 0 else visits.end - visits.full_end
            for scan in range(0, count, 32):
                at = scan + gl.arange(0, 32, layout=KEYS)
                places = gl.minimum(at, count - 1)
                if part == 0:
                    numbers = full_tile(visible, place.b, place.h, tile, places)
                else:
                    numbers = partial_tile(visible, place.b, place.h, tile, places, visits)
                before += gl.sum(((numbers < own) & (at < count)).to(gl.int32), 0)
    return before
