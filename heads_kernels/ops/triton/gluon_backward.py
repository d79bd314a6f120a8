"""Gated attention backward for sm_90 in Gluon: `dquery`, `dkey` and `dvalue` in five products per tile.

    p = exp(scores - lse)        dp = dattended value^T        dscores = p * (g * dp - delta) * (slope of the cap)
    dvalue = (g * p)^T dattended        dkey = scale * dscores^T query        dquery = scale * dscores key

Grid     One program owns 128 keys of a key head and sums their dkey and dvalue over all query heads that read it (or
         over a part of them, `splits`), in tiles of 64 query rows. A closed head has no tiles. Programs draw their
         numbers when they start, so those with smaller numbers are running or done.
Order    dquery is summed in float32 by bulk copies that add, in ascending order of the keys: for every tile of rows, a
         counter says how many programs have added to it. So the same call gives the same bits. The first program of a
         tile stores it. Another kernel scales and rounds the sums, and writes 0 in tiles that no program has added to.
Warps    8 consumer warps compute transposed tiles, [keys, rows]: four warps each have 64 keys, and half of the columns
         of dquery. A producer of 1 warp loads tiles through tensor descriptors, a reader of 1 warp loads lse and delta
         of rows, two adders of 1 warp add dquery in turn.
Rings    STAGES tiles each of query and dattended, and lse and delta; two tiles of dquery, one for each adder.
         `query_ready`, `dout_ready` and `terms_ready` complete when these are loaded, `free` when they have been read.
         `dquery_ready` completes when a tile of dquery is in shared memory, `dquery_free` when it has been read there.
Overlap  Q K^T and dO V^T are issued together. Exponentials run during the second, the gradient of scores during the
         product for dvalue; dquery is stored during the product for dkey.
Memory   Shared: keys, values, rings, dscores, dquery. Scores, probabilities, both sums and, in heads of 64 features, a
         copy of the keys and values stay in registers: 232 per thread of a consumer and 32 of the others, 63,488 for
         384 threads.

`backend` decides which calls run here. `tests/support/gluon_emulator.py` runs this file without a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
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
from heads_kernels.ops.triton.gate import head_gate
from heads_kernels.ops.triton.gluon_row_tiles import (
    Global,
    Seen,
    Shared,
    adder,
    next_place,
    producer,
    reader,
    tiles_of_head,
)
from heads_kernels.ops.triton.gluon_tiles import CACHED, barriers, store_rows, tiles_of
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import load_tile, store_tile
from heads_kernels.ops.triton.operands import Place, Splits, rows_of, sizes_of
from heads_kernels.ops.triton.rows import FirstPass, Written
from heads_kernels.ops.triton.scores import finish, probabilities
from heads_kernels.ops.triton.tiles import Tiles, padded, tile_constants
from heads_kernels.ops.triton.visible import visible_keys, with_tile_lists


@gluon.jit
def _make_finite(rows, TILE: gl.constexpr):
    """Set numbers of keys or values that are not finite to 0; returns 1 for finite rows, nan for others.

    The product for dquery reads keys that a row does not see, and dp of such a pair is multiplied by 0. The scores of
    nan keys are nan for the rows that see them; rows that see such a value have lse nan.
    """
    PART: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    ones = gl.full([TILE.block_n], 1.0, gl.float32, layout=gl.SliceLayout(1, PART))
    for column in gl.static_range(0, TILE.block_d, 64):
        part = rows.slice(column, 64, dim=1)
        wide = part.load(PART).to(gl.float32)
        ones += gl.sum(wide - wide, 1)
        part.store(gl.where(wide - wide == 0.0, wide, 0.0).to(rows.dtype))
    fence_async_shared()
    return ones


@gluon.jit
def _consumers(reads, shared, written, terms, visible, place, part, heads, sizes, TILE: gl.constexpr):
    """The keys of a program against all of its tiles of rows."""
    BLOCK_M: gl.constexpr = TILE.block_m
    BLOCK_N: gl.constexpr = TILE.block_n
    BLOCK_D: gl.constexpr = TILE.block_d
    # Each group of four warps has half of the keys, and half of the columns of dquery.
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, BLOCK_M, 16]
    )
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, BLOCK_D, 16])
    OF_ROWS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, BLOCK_D // 2, 16]
    )
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    dtype: gl.constexpr = shared.key.dtype
    mbarrier.wait(shared.keys_ready.index(0), 0)
    keys = shared.key.reshape([BLOCK_N, BLOCK_D])
    values = shared.value.reshape([BLOCK_N, BLOCK_D])
    _make_finite(values, TILE)
    scale = gl.convert_layout(_make_finite(keys, TILE) * sizes.scale, KEY)[:, None]
    gl.barrier()
    left_keys, left_values = keys, values
    if BLOCK_D == 64:  # registers have room for the left operands of scores and dp: less is read of shared memory
        LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SCORES, k_width=2)
        left_keys, left_values = keys.load(LEFT), values.load(LEFT)
    at = visible_keys(visible, place.b, place.first + gl.arange(0, BLOCK_N, layout=KEY), sizes.S)[:, None]
    nothing = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=SCORES)
    no_rows = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, layout=OF_ROWS)
    dkey = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, layout=SUMS)
    dvalue = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, layout=SUMS)
    stage, phase = place.first * 0, place.first * 0
    turn, added = place.first * 0, place.first * 0
    for number in range(heads):
        own, visit = tiles_of_head(visible, reads.gate, place, number, sizes, TILE)
        g = head_gate(reads.gate, own.b, own.h, TILE)
        for masked in gl.static_range(2):  # full tiles, then those with a mask
            if masked == 0:
                start, end = 0, visit.plain
            else:
                start, end = visit.plain, visit.count
            for _ in range(start, end):
                query = shared.query.index(stage).reshape([BLOCK_M, BLOCK_D])
                dout = shared.dout.index(stage).reshape([BLOCK_M, BLOCK_D])
                mbarrier.wait(shared.terms_ready.index(stage), phase)
                mbarrier.wait(shared.query_ready.index(stage), phase)
                scores = warpgroup_mma(left_keys, query.permute((1, 0)), nothing, use_acc=False, is_async=True)
                mbarrier.wait(shared.dout_ready.index(stage), phase)
                dp = warpgroup_mma(left_values, dout.permute((1, 0)), nothing, use_acc=False, is_async=True)
                lse = shared.lse.index(stage).load(ROW)
                scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
                scores, cap = finish(scores, 0.0, terms, scale)
                p = probabilities(scores, lse[None, :], scale, terms)
                if masked == 1:
                    lo, hi = shared.lo.index(stage).load(ROW), shared.hi.index(stage).load(ROW)
                    seen = (at >= lo[None, :]) & (at < hi[None, :])
                    p = gl.where(seen, p, 0.0)
                    if terms.softcap is not None:  # it may be nan
                        cap = gl.where(seen, cap, 0.0)
                weights = gl.convert_layout((p * g).to(dtype), WEIGHTS)
                dvalue = warpgroup_mma(weights, dout, dvalue, is_async=True)
                dp = warpgroup_mma_wait(num_outstanding=1, deps=(dp,))
                delta = shared.delta.index(stage).load(ROW)
                dscores = (p * (dp * g - delta[None, :]) * cap).to(dtype)
                shared.dscores.store(dscores)
                fence_async_shared()
                gl.barrier()
                dquery = warpgroup_mma(shared.dscores.permute((1, 0)), keys, no_rows, use_acc=False, is_async=True)
                dkey = warpgroup_mma(gl.convert_layout(dscores, WEIGHTS), query, dkey, is_async=True)
                dquery, dvalue = warpgroup_mma_wait(num_outstanding=1, deps=(dquery, dvalue))
                mbarrier.wait(shared.dquery_free.index(turn), added ^ 1)
                shared.dquery.index(turn).reshape([BLOCK_M, BLOCK_D]).store(dquery)
                fence_async_shared()
                mbarrier.arrive(shared.dquery_ready.index(turn), count=1)
                turn, added = next_place(turn, added, 2)
                dkey = warpgroup_mma_wait(num_outstanding=0, deps=(dkey,))
                mbarrier.arrive(shared.free.index(stage), count=1)
                stage, phase = next_place(stage, phase, TILE.stages)
    at = place.first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SUMS))
    columns = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, SUMS))
    store_rows(written.dkey, dkey * sizes.scale, part, place.hk, at, columns, sizes.S, TILE.d)
    store_rows(written.dvalue, dvalue, part, place.hk, at, columns, sizes.S, TILE.dv)


@gluon.jit
def _backward_kernel(memory, terms, seen, reads, written, counters, sizes, splits, together, TILE: gl.constexpr):
    """A program computes `dkey` and `dvalue` of 128 keys, and adds their terms to `dquery`.

    `counters` are int32 and 0 at first: how many programs have started, and how many have added to a tile of dquery,
    `[B, H, tiles of rows]`.
    """
    STAGES: gl.constexpr = TILE.stages
    BLOCK_M: gl.constexpr = TILE.block_m
    BLOCK_N: gl.constexpr = TILE.block_n
    BLOCK_D: gl.constexpr = TILE.block_d
    dtype: gl.constexpr = memory.query.dtype
    # `together` owners run at once; the tiles of keys of each start one after the other.
    tiles = gl.cdiv(sizes.S, BLOCK_N)
    owners = gl.num_programs(0) // tiles
    ticket = gl.atomic_add(counters, 1, sem="relaxed")
    first_owner = ticket // (together * tiles) * together
    beside = gl.minimum(owners - first_owner, together)
    program = ticket - first_owner * tiles
    owner = first_owner + program % beside
    key_heads = sizes.H // sizes.group
    split = owner // (splits.batches * key_heads)
    b, hk = owner // key_heads % splits.batches, owner % key_heads
    share = gl.cdiv(sizes.group, splits.shares)
    heads = gl.minimum(share, sizes.group - split * share)
    place = Place(b, hk * sizes.group + split * share, hk, program // beside * BLOCK_N, None)

    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    DSCORES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    shared = Shared(
        key=gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, BLOCK_D], memory.key.layout),
        value=gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, BLOCK_D], memory.value.layout),
        query=gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_D], memory.query.layout),
        dout=gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_D], memory.dout.layout),
        lse=gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], PLAIN),
        delta=gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], PLAIN),
        lo=gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_M], PLAIN),
        hi=gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_M], PLAIN),
        dscores=gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], DSCORES),
        dquery=gl.allocate_shared_memory(gl.float32, [2, 1, 1, BLOCK_M, BLOCK_D], memory.dquery.layout),
        keys_ready=barriers(1, 1),
        query_ready=barriers(STAGES, 1),
        dout_ready=barriers(STAGES, 1),
        terms_ready=barriers(STAGES, 1),
        free=barriers(STAGES, 1),
        dquery_ready=barriers(2, 1),
        dquery_free=barriers(2, 1),
    )
    fence_async_shared()
    part = split * splits.batches + b
    visible = seen.by_keys
    gl.warp_specialize(
        [
            (_consumers, (reads, shared, written, terms, visible, place, part, heads, sizes, TILE)),
            (reader, (reads, shared, visible, place, heads, sizes, TILE)),
            (producer, (memory, reads, shared, visible, place, heads, sizes, TILE)),
            (adder, (memory, counters, reads, shared, seen, place, heads, sizes, 0, TILE)),
            (adder, (memory, counters, reads, shared, seen, place, heads, sizes, 1, TILE)),
        ],
        [1, 1, 1, 1],
        [32, 32, 32, 32],
    )


@triton.jit
def _dquery_kernel(sums, added, dquery, sizes, TILE: tl.constexpr):
    """A program writes a tile of rows of `dquery`: its `sums` times the scale; 0 if no program has added to it."""
    BLOCK_M: tl.constexpr = TILE.block_m
    program = tl.program_id(0)
    tiles = tl.cdiv(sizes.T, BLOCK_M)
    pair, first = program // tiles, program % tiles * BLOCK_M
    b, h = pair // sizes.H, pair % sizes.H
    end = tl.where(tl.load(added + program) > 0, sizes.T, 0)
    there = first + tl.arange(0, BLOCK_M) < end
    rows = load_tile(sums, b, h, first, there, TILE.d, BLOCK_M, TILE.block_d) * sizes.scale
    store_tile(dquery, b, h, first, sizes.T, rows, TILE.d)


def specialized_pass(call: Call, first: FirstPass, gradients: Gradients, tiles: Tiles) -> None:
    """Fill dquery, dkey and dvalue."""
    dquery, dkey, dvalue = gradients.dquery, gradients.dkey, gradients.dvalue
    (B, H, T, D), (_, Hk, S, Dv) = call.query.shape, call.value.shape
    sizes, of, reads = sizes_of(call), first.operands, first.reads
    width = max(64, padded(max(D, Dv)))
    constants = tile_constants(call, tiles, width)
    key_tiles, row_tiles = -(-S // tiles.block_n), -(-T // tiles.block_m)
    splits = splits_of(sizes.group, B * Hk * key_tiles, call.query)
    parts = [(grad, split_parts(grad, splits)) for grad in (dkey, dvalue)]
    of_key, of_value = (rows_of(part) for _, part in parts)
    counters = torch.zeros(1 + B * H * row_tiles, dtype=torch.int32, device=dquery.device)
    sums = torch.empty(dquery.shape, dtype=torch.float32, device=dquery.device)
    # How many programs add to a tile of rows: it follows from a band, else it is counted in lists.
    listed = of.visible.k_lo is not None or of.visible.key_visible is not None
    by_keys = with_tile_lists(call, of, tiles, by_keys=True, listed=listed).visible
    by_rows = with_tile_lists(call, of, tiles, listed=listed).visible
    rows, keys = ((block, width) for block in (tiles.block_m, tiles.block_n))
    of_owner = 8 * T * width * sizes.group  # bytes of query, dattended and dquery
    together = max(1, min(CACHED // of_owner, splits * B * Hk))
    memory = Global(
        tiles_of(call.query, *rows), tiles_of(call.key, *keys), tiles_of(call.value, *keys),
        tiles_of(reads.dattended.ptr, *rows), tiles_of(sums, *rows),
    )  # fmt: skip
    launch(
        _backward_kernel, splits * B * Hk * key_tiles, call.query, tiles,
        memory, of.terms, Seen(by_keys, by_rows), reads, Written(dkey=of_key, dvalue=of_value),
        counters, sizes, Splits(B, splits), together,
        TILE=constants,
    )  # fmt: skip
    launch(
        _dquery_kernel, B * H * row_tiles, call.query, tiles,
        rows_of(sums), counters[1:], rows_of(dquery), sizes, TILE=constants,
    )  # fmt: skip
    for grad, part in parts:
        sum_parts(part, grad, splits)
