"""Collaborative attention backward for sm_90 in Gluon: the passes by tiles of keys and of query rows, one kernel.

    mixed_h = query * mixing_h        p = exp(scores - lse)        dp = dattended value^T
    dscores = p * (g * dp - delta) * (slope of the cap)
    keys:  dvalue = (g * p)^T dattended        dkey = scale * sum over h of dscores^T mixed_h
    rows:  dmixed_h = scale * dscores key        dquery = sum over h of mixing_h * dmixed_h
           dmixing_h = colsum(query * dmixed_h)

Both passes have the same tiles: 64 rows of their own for each consumer, 64 other rows in a ring. A wide tile has Ds
features (keys or mixed query rows), a narrow one Dv (values or dattended); in the pass by keys a program owns keys and
values, in the pass by rows query rows and dattended, and the others come in tiles.

    scores = own wide @ wide^T        dp = own narrow @ narrow^T
    wide sums += dscores @ wide       narrow sums += (g * p) @ narrow, by keys

Grid     One program owns 128 keys, or query rows, and goes through the heads, or a part of them (`splits`). Those with
         the most tiles under a causal mask come first. A closed head has no tiles.
Warps    Two consumers of 4 warps have 64 rows each. A producer of 1 warp loads tiles through tensor descriptors. A
         preparer of 2 warps mixes tiles of query rows in place, reads what else belongs to the other rows, and sets
         what is not finite to 0 in masked tiles.
Rings    STAGES pairs of a wide and a narrow tile: `landed` when they have been loaded, `ready` when prepared, `free`
         when both consumers have read them. `own_ready` and `own_free` are those of the program's own tiles, which
         change with the head.
Overlap  Scores and the first part of dp are issued together: 32 columns of dp at a time, 16 by keys beside a content
         bias or a cap, since registers have no room for more. The gradients of a part's scores are computed during the
         products of the part before.
Sums     dkey stays in registers for all heads, dvalue for those of a value head. The dmixed of a head is added to
         dquery in memory, in float32, by the one program that owns the rows.
Memory   Shared: own tiles and rings, 204 KiB with 256 features. Scores, probabilities and sums stay in registers: 240
         per thread of a consumer and 24 of the others, 64,512 for 384 threads. By keys, 160 are sums, 32 scores.

`backend` decides which calls run here. `tests/support/gluon_emulator.py` runs this file without a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from heads_kernels.call import Call
from heads_kernels.ops.attention import Gradients
from heads_kernels.ops.buffers import split_parts, splits_of, sum_parts
from heads_kernels.ops.triton.gate import head_gate, open_rows
from heads_kernels.ops.triton.gluon_row_tiles import next_place
from heads_kernels.ops.triton.gluon_tiles import CONSUMER_ROWS, barriers, load_tiles, store_rows, tiles_of
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import head_of
from heads_kernels.ops.triton.operands import Place, Splits, rows_of, sizes_of
from heads_kernels.ops.triton.rows import FirstPass, Written
from heads_kernels.ops.triton.score_tiles import halves, load_content_bias, load_mixing
from heads_kernels.ops.triton.scores import finish, probabilities
from heads_kernels.ops.triton.tiles import Tiles, padded, tile_constants
from heads_kernels.ops.triton.visible import (
    full_tile,
    listed_tiles,
    partial_tile,
    ranges,
    visible_keys,
    with_tile_lists,
)

#: Rows of a tile: the fewest that four warps can multiply.
_ROWS: gl.constexpr = CONSUMER_ROWS


class Global(NamedTuple):
    """Descriptors of tiles in global memory, of 64 rows."""

    own_wide: Any  # [1, 1, 64, BLOCK_D]
    own_narrow: Any  # [1, 1, 64, BLOCK_DV]
    wide: Any
    narrow: Any
    end: None = None


class Shared(NamedTuple):
    """Shared memory, in a kernel: tiles, and barriers."""

    own_wide: Any  # [2, 1, 1, 64, BLOCK_D], a tile for each consumer
    own_narrow: Any
    wide: Any  # [STAGES, 1, 1, 64, BLOCK_D]
    narrow: Any
    terms: Any  # float32 [2 * STAGES, 64]: lse of query rows, then delta; or content bias of keys
    bounds: Any  # int32 [2 * STAGES, 64]: the keys that rows see, from and to; or numbers of keys, -1 for hidden ones
    ready: Any  # [2 * STAGES + 2]: tiles landed, tiles ready, own narrow and own wide tiles
    free: Any  # [STAGES + 1]: tiles, own tiles


class Visit(NamedTuple):
    """A head of a program, in a kernel: the program's place, the tile that it owns, and the tiles that it visits."""

    place: Any
    own: Any
    visits: Any
    full: Any  # number of full tiles, which come first
    count: Any


@gluon.jit
def _share(sizes, splits, BY_KEYS: gl.constexpr):
    """The place of a program, the number of its heads, and the part of the sums that it writes.

    Every partition computes it: what another has computed would come from shared memory, and ptxas would not know that
    all threads have the same.
    """
    beside = splits.batches * splits.shares
    tiles = gl.num_programs(0) // beside
    own, other = gl.program_id(0) // beside, gl.program_id(0) % beside
    b, split = other % splits.batches, other // splits.batches
    unit = 1
    if BY_KEYS:  # each value head has one owner
        unit = sizes.group
    else:
        own = tiles - 1 - own
    share = gl.cdiv(sizes.H // unit, splits.shares) * unit
    heads = gl.minimum(share, sizes.H - split * share)
    return Place(b, split * share, b * 0, own * (2 * _ROWS), None), heads, split * splits.batches + b


@gluon.jit
def _visit(visible, gate, place, number, sizes, TILE: gl.constexpr):
    """The head at `number` of those of a program."""
    h = place.h + number
    own = place.first // (2 * _ROWS)
    visits = listed_tiles(visible, place.b, h, own, open_rows(gate, place.b, h, sizes.T, TILE))
    return Visit(Place(place.b, h, h // sizes.group, place.first, None), own, visits, visits.full_end, visits.end)


@gluon.jit
def _first_row(visible, visit, index):
    """The first row of the tile that is visited at `index`."""
    b, h = visit.place.b, visit.place.h
    if index < visit.full:
        tile = full_tile(visible, b, h, visit.own, index)
    else:
        tile = partial_tile(visible, b, h, visit.own, index - visit.full, visit.visits)
    return tile * _ROWS


@gluon.jit
def _load_own(memory, shared, place, head, loaded, BY_KEYS: gl.constexpr, TILE: gl.constexpr):
    """Load the program's own tiles for the next head, as soon as the one before is done; keys only once."""
    mbarrier.wait(shared.free.index(TILE.stages), (loaded & 1) ^ 1)
    narrow_ready, wide_ready = shared.ready.index(2 * TILE.stages), shared.ready.index(2 * TILE.stages + 1)
    wide = (loaded == 0) | (not BY_KEYS)
    mbarrier.expect(narrow_ready, 4 * _ROWS * TILE.block_dv)
    mbarrier.expect(wide_ready, 4 * _ROWS * TILE.block_d, pred=wide)
    for who in gl.static_range(2):
        first = place.first + who * _ROWS
        load_tiles(memory.own_narrow, [place.b, head, first, 0], narrow_ready, shared.own_narrow.index(who))
        load_tiles(memory.own_wide, [place.b, 0, first, 0], wide_ready, shared.own_wide.index(who), pred=wide)


@gluon.jit
def _producer(memory, of, reads, shared, sizes, splits, BY_KEYS: gl.constexpr, TILE: gl.constexpr):
    """Load the program's own tiles and those of others, as their places become free."""
    place, heads, _ = _share(sizes, splits, BY_KEYS)
    stage, phase, loaded = place.first * 0, place.first * 0, place.first * 0
    for number in range(heads):
        visit = _visit(of.visible, reads.gate, place, number, sizes, TILE)
        h, hk = visit.place.h, visit.place.hk
        own_head, other_head = (hk, h) if BY_KEYS else (h, hk)
        for index in range(visit.count):
            first = _first_row(of.visible, visit, index)
            mbarrier.wait(shared.free.index(stage), phase ^ 1)
            landed = shared.ready.index(stage)
            mbarrier.expect(landed, 2 * _ROWS * (TILE.block_d + TILE.block_dv))
            load_tiles(memory.wide, [place.b, 0, first, 0], landed, shared.wide.index(stage))
            load_tiles(memory.narrow, [place.b, other_head, first, 0], landed, shared.narrow.index(stage))
            stage, phase = next_place(stage, phase, TILE.stages)
            # The first tiles of a head are loaded while consumers are busy with the head before.
            if index == gl.minimum(TILE.stages - 1, visit.count) - 1:
                _load_own(memory, shared, visit.place, own_head, loaded, BY_KEYS, TILE)
                loaded += 1


@gluon.jit
def _times(tile, factors, dtype: gl.constexpr, NARROW_FACTORS: gl.constexpr):
    """`tile` times float32 `factors`, rounded to dtype.

    The preparer has to keep up with the consumers, and numbers of 16 bits are multiplied two at a time. So factors of
    that dtype are not widened, and in bfloat16 others are the sum of two of 8 bits each. The product is then
    off by up to 2**-17 of it before it is rounded: one in 250 is rounded to the other neighbour.
    """
    if NARROW_FACTORS:
        product = tile * factors.to(dtype)
    elif dtype == gl.bfloat16:
        first = factors.to(dtype)
        rest = (factors - first.to(gl.float32)).to(dtype)
        product = gl.fma(tile, gl.broadcast(tile, first)[1], (tile * rest).to(dtype))
    else:
        product = tile.to(gl.float32) * factors
    return product.to(dtype)


@gluon.jit
def _clear_rows(narrow, lse, PART: gl.constexpr):
    """Set dattended of query rows whose `lse` is not finite to 0."""
    for row in gl.static_range(0, _ROWS, 16):
        there = (gl.abs(lse.slice(row, 16).load(gl.SliceLayout(1, PART))) < float("inf"))[:, None]
        part = narrow.slice(row, 16)
        part.store(gl.where(there, part.load(PART), 0.0).to(narrow.dtype))


@gluon.jit
def _make_finite(wide, content, PART: gl.constexpr, TILE: gl.constexpr):
    """Set numbers that are not finite to 0, and the `content` of their rows to nan unless it is None.

    Most tiles have none, which the sum of `0 * number` shows.
    """
    OF_PART: gl.constexpr = gl.SliceLayout(1, PART)
    sums = gl.zeros([16, 64], gl.float32, layout=PART)
    for column in gl.static_range(0, TILE.block_d, 64):
        for row in gl.static_range(0, _ROWS, 16):
            sums += wide.slice(row, 16).slice(column, 64, dim=1).load(PART).to(gl.float32) * 0.0
    if gl.max(gl.max(gl.where(sums == 0.0, 0, 1), 1), 0) != 0:
        for row in gl.static_range(0, _ROWS, 8):
            poison = gl.zeros([8], gl.float32, layout=OF_PART)
            for column in gl.static_range(0, TILE.block_d, 64):
                part = wide.slice(row, 8).slice(column, 64, dim=1)
                numbers = part.load(PART).to(gl.float32)
                poison += gl.sum(numbers - numbers, 1)
                part.store(gl.where(numbers - numbers == 0.0, numbers, 0.0).to(wide.dtype))
            if content is not None:
                of_part = content.slice(row, 8)
                of_part.store(of_part.load(OF_PART) + poison)


@gluon.jit
def _preparer(of, reads, shared, sizes, splits, BY_KEYS: gl.constexpr, TILE: gl.constexpr):
    """Make tiles ready for consumers: mix query rows in place, and store what else belongs to the rows of a tile.

    In masked tiles, numbers that are not finite are set to 0. The lse of such query rows is nan, which makes the
    gradients of exactly the keys that they see nan (`rows.load_row_terms`), or the head does not mix the feature. The
    scores of such keys are made nan.
    """
    # Parts of 16 rows and 64 features: 16 numbers per thread.
    PART: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [2, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [2], [0])
    NARROW_FACTORS: gl.constexpr = of.mixing.ptr.dtype.element_ty == shared.wide.dtype
    place, heads, _ = _share(sizes, splits, BY_KEYS)
    stage, phase = place.first * 0, place.first * 0
    for number in range(heads):
        visit = _visit(of.visible, reads.gate, place, number, sizes, TILE)
        b, h = visit.place.b, visit.place.h
        for index in range(visit.count):
            rows = _first_row(of.visible, visit, index) + gl.arange(0, _ROWS, layout=LINE)
            masked = index >= visit.full
            wide = shared.wide.index(stage).reshape([_ROWS, TILE.block_d])
            narrow = shared.narrow.index(stage).reshape([_ROWS, TILE.block_dv])
            if BY_KEYS:
                at = (b * sizes.H + h).to(gl.int64) * sizes.T + rows
                lse = gl.load(reads.lse.ptr + at, mask=rows < sizes.T, other=float("inf"))
                delta = gl.load(reads.delta + at, mask=rows < sizes.T, other=0.0)
                lo, hi = rows, rows
                if masked:
                    lo, hi = ranges(of.visible, b, h, rows, sizes.T, sizes.S)
                mbarrier.wait(shared.free.index(stage), phase ^ 1)
                shared.terms.index(stage).store(lse)
                shared.terms.index(TILE.stages + stage).store(delta)
                shared.bounds.index(stage).store(lo)
                shared.bounds.index(TILE.stages + stage).store(hi)
                mbarrier.wait(shared.ready.index(stage), phase)
                for column in gl.static_range(0, TILE.block_d, 64):
                    columns = column + gl.arange(0, 64, layout=gl.SliceLayout(0, PART))
                    factors = load_mixing(of.mixing, h, columns, columns < TILE.d)[None, :]
                    for row in gl.static_range(0, _ROWS, 16):
                        part = wide.slice(row, 16).slice(column, 64, dim=1)
                        part.store(_times(part.load(PART), factors, wide.dtype, NARROW_FACTORS))
                if masked:
                    _make_finite(wide, None, PART, TILE)
                    finite = (gl.abs(lse) < float("inf")).to(gl.int32)
                    if gl.min(finite, 0) == 0:
                        _clear_rows(narrow, shared.terms.index(stage), PART)
                fence_async_shared()
            else:
                content = gl.zeros([_ROWS], gl.float32, layout=LINE)
                if of.content_bias is not None:
                    content = load_content_bias(of.content_bias, b, h, rows, sizes.S)
                at = visible_keys(of.visible, b, rows, sizes.S)
                mbarrier.wait(shared.free.index(stage), phase ^ 1)
                if masked or of.content_bias is not None:
                    shared.terms.index(stage).store(content)
                shared.bounds.index(stage).store(at)
                mbarrier.wait(shared.ready.index(stage), phase)
                if masked:
                    _make_finite(wide, shared.terms.index(stage), PART, TILE)
                    fence_async_shared()
            mbarrier.arrive(shared.ready.index(TILE.stages + stage), count=1)
            stage, phase = next_place(stage, phase, TILE.stages)


@gluon.jit
def _mix(tile, mixing, h, TILE: gl.constexpr):
    """Multiply a consumer's own query rows by the mixing vector of head `h`."""
    PART: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    columns = gl.arange(0, TILE.block_d, layout=gl.SliceLayout(0, PART))
    factors = load_mixing(mixing, h, columns, columns < TILE.d)
    tile.store((tile.load(PART).to(gl.float32) * factors[None, :]).to(tile.dtype))
    fence_async_shared()
    gl.barrier()


@gluon.jit
def _add_head(dmixed, sees, of, written, part, place, first, sizes, COLUMN: gl.constexpr, TILE: gl.constexpr):
    """Add mixing * `dmixed` [64, W] to `dquery`, and store the column sums of query * `dmixed` for `dmixing`.

    The rows are those of one consumer, from `first` on, and have a part of dmixing of their own. The features are those
    from COLUMN on. W is halved down to 64, since `dmixed` leaves few registers for the loads.
    """
    if dmixed.shape[1] > 64:
        low, high = halves(dmixed)
        _add_head(low, sees, of, written, part, place, first, sizes, COLUMN, TILE)
        _add_head(high, sees, of, written, part, place, first, sizes, COLUMN + dmixed.shape[1] // 2, TILE)
    else:
        SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
        dmixed = gl.convert_layout(dmixed, SUMS)
        sees = gl.convert_layout(sees, gl.SliceLayout(1, SUMS))
        at = first + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SUMS))
        columns = COLUMN + gl.arange(0, 64, layout=gl.SliceLayout(0, SUMS))
        rows = at.to(gl.int64)[:, None]
        there = (at < sizes.T)[:, None] & sees[:, None] & (columns < TILE.d)[None, :]
        sums = head_of(written.dquery, part, place.hk * 0) + rows * written.dquery.stride_l + columns[None, :]
        factors = load_mixing(of.mixing, place.h, columns, columns < TILE.d)[None, :]
        before = gl.load(sums, mask=there, other=0.0)
        if written.dmixing is not None:
            query = head_of(of.query, place.b, place.hk * 0) + rows * of.query.stride_l + columns[None, :]
            products = gl.load(query, mask=there, other=0.0).to(gl.float32) * gl.where(sees[:, None], dmixed, 0.0)
            tile = place.b * (gl.cdiv(sizes.T, 2 * _ROWS) * 2) + first // _ROWS
            to = written.dmixing + (tile * sizes.H + place.h).to(gl.int64) * TILE.d + columns
            gl.store(to, gl.sum(products, 0), mask=columns < TILE.d)
        gl.store(sums, before + factors * dmixed, mask=there)


@gluon.jit
def _columns(tile, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """WIDTH columns of `tile` from FIRST on."""
    if tile.shape[1] == WIDTH:
        columns = tile
    else:
        low, high = halves(tile)
        if tile.shape[1] // 2 > FIRST:
            columns = _columns(low, FIRST, WIDTH)
        else:
            columns = _columns(high, FIRST - tile.shape[1] // 2, WIDTH)
    return columns


@gluon.jit
def _dp_of_part(own, narrow, nothing, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """Issue dp of a consumer's rows and WIDTH rows of a tile from FIRST on."""
    other = narrow.slice(FIRST, WIDTH)
    return warpgroup_mma(own, other.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _sum_in_thread(tile):
    """The sums of the numbers of each row that a thread has, [64, 4]: a row of the layout of products has 4 threads."""
    return gl.sum(gl.sum(gl.reshape(tile, (_ROWS, tile.shape[1] // 8, 4, 2)), 3), 1)


@gluon.jit
def _consumer(
    of, reads, written, shared, sizes, splits, WHO: gl.constexpr, BY_KEYS: gl.constexpr, TILE: gl.constexpr
):  # fmt: skip
    """The 64 keys, or query rows, of a consumer against all tiles of all heads of its program."""
    BLOCK_D: gl.constexpr = TILE.block_d
    BLOCK_DV: gl.constexpr = TILE.block_dv
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _ROWS, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_D, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_DV, 16]
    )
    LEFT_WIDE: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=WIDE, k_width=2)
    LEFT_NARROW: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=NARROW, k_width=2)
    # Columns of scores whose gradients are in registers at once.
    TERMS: gl.constexpr = (of.content_bias is not None) or (of.terms.softcap is not None)
    WIDTH: gl.constexpr = 16 if BY_KEYS and TERMS and BLOCK_D > 128 else 32
    PART: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    OWN: gl.constexpr = gl.SliceLayout(1, PART)
    OTHER: gl.constexpr = gl.SliceLayout(0, PART)
    dtype: gl.constexpr = shared.wide.dtype
    place, heads, part = _share(sizes, splits, BY_KEYS)
    first = place.first + WHO * _ROWS
    own_wide = shared.own_wide.index(WHO).reshape([_ROWS, BLOCK_D])
    own_narrow = shared.own_narrow.index(WHO).reshape([_ROWS, BLOCK_DV])
    own = first + gl.arange(0, _ROWS, layout=OWN)
    nothing = gl.zeros([_ROWS, _ROWS], gl.float32, layout=SCORES)
    no_dp = gl.zeros([_ROWS, WIDTH], gl.float32, layout=PART)
    wide_sums = gl.zeros([_ROWS, BLOCK_D], gl.float32, layout=WIDE)
    narrow_sums = gl.zeros([_ROWS, BLOCK_DV], gl.float32, layout=NARROW)
    stage, phase, turn = place.first * 0, place.first * 0, place.first * 0
    for number in range(heads):
        visit = _visit(of.visible, reads.gate, place, number, sizes, TILE)
        b, h = visit.place.b, visit.place.h
        g = head_gate(reads.gate, b, h, TILE)
        any_tile = visit.count > 0
        if BY_KEYS:
            at = visible_keys(of.visible, b, own, sizes.S)
            if of.content_bias is not None:
                content = load_content_bias(of.content_bias, b, h, own, sizes.S)
            dcontent = _sum_in_thread(no_dp)
            narrow_sums = gl.where(h % sizes.group == 0, 0.0, narrow_sums)
            mbarrier.wait(shared.ready.index(2 * TILE.stages), turn & 1, pred=any_tile)
            mbarrier.wait(shared.ready.index(2 * TILE.stages + 1), 0, pred=any_tile)
        else:
            own_lo, own_hi = ranges(of.visible, b, h, own, sizes.T, sizes.S)
            of_head = (b * sizes.H + h).to(gl.int64) * sizes.T
            own_lse = gl.load(reads.lse.ptr + of_head + own, mask=own < sizes.T, other=float("inf"))
            own_delta = gl.load(reads.delta + of_head + own, mask=own < sizes.T, other=0.0)
            wide_sums = gl.zeros([_ROWS, BLOCK_D], gl.float32, layout=WIDE)
            if any_tile:
                mbarrier.wait(shared.ready.index(2 * TILE.stages), turn & 1)
                mbarrier.wait(shared.ready.index(2 * TILE.stages + 1), turn & 1)
                _mix(own_wide, of.mixing, h, TILE)
        for masked in gl.static_range(2):  # full tiles, then those with a mask
            if masked == 0:
                start, end = 0, visit.full
            else:
                start, end = visit.full, visit.count
            for _ in range(start, end):
                wide = shared.wide.index(stage).reshape([_ROWS, BLOCK_D])
                narrow = shared.narrow.index(stage).reshape([_ROWS, BLOCK_DV])
                mbarrier.wait(shared.ready.index(TILE.stages + stage), phase)
                scores = warpgroup_mma(own_wide, wide.permute((1, 0)), nothing, use_acc=False, is_async=True)
                dp = _dp_of_part(own_narrow, narrow, no_dp, 0, WIDTH)
                scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
                every = scores
                for column in gl.static_range(0, _ROWS, WIDTH):
                    scores = gl.convert_layout(_columns(every, column, WIDTH), PART)
                    if BY_KEYS:
                        if of.content_bias is not None:
                            scores += content[:, None]
                        lse = shared.terms.index(stage).slice(column, WIDTH).load(OTHER)[None, :]
                    else:
                        if of.content_bias is not None or masked == 1:
                            scores += shared.terms.index(stage).slice(column, WIDTH).load(OTHER)[None, :]
                        lse = own_lse[:, None]
                    scores, cap = finish(scores, 0.0, of.terms, sizes.scale)
                    p = probabilities(scores, lse, sizes.scale, of.terms)
                    if masked == 1:
                        lo = shared.bounds.index(stage).slice(column, WIDTH).load(OTHER)[None, :]
                        if BY_KEYS:
                            hi = shared.bounds.index(TILE.stages + stage).slice(column, WIDTH).load(OTHER)[None, :]
                            seen = (at[:, None] >= lo) & (at[:, None] < hi)
                        else:
                            seen = (lo >= own_lo[:, None]) & (lo < own_hi[:, None])
                        p = gl.where(seen, p, 0.0)
                    dp = warpgroup_mma_wait(num_outstanding=0 if column == 0 else 2 if BY_KEYS else 1, deps=(dp,))
                    if BY_KEYS:
                        delta = shared.terms.index(TILE.stages + stage).slice(column, WIDTH).load(OTHER)[None, :]
                    else:
                        delta = own_delta[:, None]
                    dscores = p * (dp * g - delta) * cap
                    if masked == 1:  # dp and cap may be nan
                        dscores = gl.where(seen, dscores, 0.0)
                    left = gl.convert_layout(dscores.to(dtype), LEFT_WIDE)
                    if BY_KEYS:
                        if written.dcontent_bias is not None:
                            dcontent += _sum_in_thread(dscores)
                        weights = gl.convert_layout((p * g).to(dtype), LEFT_NARROW)
                    if column + WIDTH < _ROWS:
                        dp = _dp_of_part(own_narrow, narrow, no_dp, column + WIDTH, WIDTH)
                    if BY_KEYS:
                        narrow_sums = warpgroup_mma(weights, narrow.slice(column, WIDTH), narrow_sums, is_async=True)
                    wide_sums = warpgroup_mma(left, wide.slice(column, WIDTH), wide_sums, is_async=True)
                if BY_KEYS:
                    wide_sums, narrow_sums = warpgroup_mma_wait(num_outstanding=0, deps=(wide_sums, narrow_sums))
                else:
                    wide_sums = warpgroup_mma_wait(num_outstanding=0, deps=(wide_sums,))
                mbarrier.arrive(shared.free.index(stage), count=1)
                stage, phase = next_place(stage, phase, TILE.stages)
        mbarrier.arrive(shared.free.index(TILE.stages), count=1, pred=any_tile)
        turn += any_tile.to(gl.int32)
        if BY_KEYS:
            at_narrow = first + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, NARROW))
            columns = gl.arange(0, BLOCK_DV, layout=gl.SliceLayout(0, NARROW))
            end_of_keys = gl.where((h + 1) % sizes.group == 0, sizes.S, 0)  # after the last head of a group
            store_rows(written.dvalue, narrow_sums, b, visit.place.hk, at_narrow, columns, end_of_keys, TILE.dv)
            if written.dcontent_bias is not None:
                to = written.dcontent_bias + (b * sizes.H + h).to(gl.int64) * sizes.S + own
                gl.store(to, gl.convert_layout(gl.sum(dcontent, 1), OWN) * sizes.scale, mask=own < sizes.S)
        else:
            if any_tile:
                sees = gl.convert_layout(own_lse, gl.SliceLayout(1, WIDE)) != float("inf")
                _add_head(wide_sums * sizes.scale, sees, of, written, part, visit.place, first, sizes, 0, TILE)
    if BY_KEYS:
        at_wide = first + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, WIDE))
        columns = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, WIDE))
        store_rows(written.dkey, wide_sums * sizes.scale, part, place.b * 0, at_wide, columns, sizes.S, TILE.d)


@gluon.jit
def _shared_backward_kernel(memory, of, reads, written, sizes, splits, BY_KEYS: gl.constexpr, TILE: gl.constexpr):
    """A program owns 128 keys (BY_KEYS) or query rows, and the heads of one of the `splits`."""
    STAGES: gl.constexpr = TILE.stages
    BLOCK_D: gl.constexpr = TILE.block_d
    BLOCK_DV: gl.constexpr = TILE.block_dv
    dtype: gl.constexpr = memory.wide.dtype
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = Shared(
        own_wide=gl.allocate_shared_memory(dtype, [2, 1, 1, _ROWS, BLOCK_D], memory.own_wide.layout),
        own_narrow=gl.allocate_shared_memory(dtype, [2, 1, 1, _ROWS, BLOCK_DV], memory.own_narrow.layout),
        wide=gl.allocate_shared_memory(dtype, [STAGES, 1, 1, _ROWS, BLOCK_D], memory.wide.layout),
        narrow=gl.allocate_shared_memory(dtype, [STAGES, 1, 1, _ROWS, BLOCK_DV], memory.narrow.layout),
        terms=gl.allocate_shared_memory(gl.float32, [2 * STAGES, _ROWS], PLAIN),
        bounds=gl.allocate_shared_memory(gl.int32, [2 * STAGES, _ROWS], PLAIN),
        ready=barriers(2 * STAGES + 2, 1),
        free=barriers(STAGES + 1, 2),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (of, reads, written, shared, sizes, splits, 0, BY_KEYS, TILE)),
            (_consumer, (of, reads, written, shared, sizes, splits, 1, BY_KEYS, TILE)),
            (_producer, (memory, of, reads, shared, sizes, splits, BY_KEYS, TILE)),
            (_preparer, (of, reads, shared, sizes, splits, BY_KEYS, TILE)),
        ],
        [4, 1, 2],
        [240, 24, 24],
    )


def specialized_pass(call: Call, first: FirstPass, gradients: Gradients, tiles: Tiles) -> None:
    """Fill dquery, dkey and dvalue, and dmixing and dcontent_bias unless they are empty."""
    dquery, dkey, dvalue = gradients.dquery, gradients.dkey, gradients.dvalue
    dmixing, dcontent = gradients.dmixing, gradients.dcontent_bias
    B, H, T, S = call.sizes
    sizes, reads = sizes_of(call), first.reads
    width, narrow = max(64, padded(call.D)), max(64, padded(call.Dv))
    wide_query, wide_key = (tiles_of(rows, _ROWS.value, width) for rows in (call.query, call.key))
    dattended, value = (tiles_of(rows, _ROWS.value, narrow) for rows in (reads.dattended.ptr, call.value))

    def of_pass(by_keys: bool, splits: int, written: Written) -> None:
        block_m, block_n = (tiles.block_m, tiles.block_n) if by_keys else (tiles.block_n, tiles.block_m)
        of_tiles = replace(tiles, block_m=block_m, block_n=block_n, block_d=width)
        of = with_tile_lists(call, first.operands, of_tiles, by_keys=by_keys, listed=True)
        own, other = (wide_key, value), (wide_query, dattended)
        memory = Global(*own, *other) if by_keys else Global(*other, *own)
        launch(
            _shared_backward_kernel, B * -(-(S if by_keys else T) // tiles.block_n) * splits, call.query, of_tiles,
            memory, of, reads, written, sizes, Splits(B, splits),
            BY_KEYS=by_keys, TILE=tile_constants(call, of_tiles, narrow),
        )  # fmt: skip

    key_tiles, row_tiles = -(-S // tiles.block_n), -(-T // tiles.block_n)
    splits = splits_of(call.Hv, B * key_tiles, call.query)
    part = split_parts(dkey, splits)
    to = dcontent if dcontent.numel() else None
    of_pass(True, splits, Written(dkey=rows_of(part), dvalue=rows_of(dvalue), dcontent_bias=to))
    sum_parts(part, dkey, splits)
    splits = splits_of(H, B * row_tiles, call.query)
    part = split_parts(dquery, splits, torch.float32).zero_()
    mixing_parts = dmixing.new_zeros((B, 2 * row_tiles, H, call.D)) if dmixing.numel() else None
    of_pass(False, splits, Written(rows_of(part), dmixing=mixing_parts))
    sum_parts(part, dquery, splits)
    if mixing_parts is not None:
        torch.sum(mixing_parts, 1, out=dmixing)
