"""Gated attention forward for sm_90 in Gluon: `out = act(gate) * softmax(scores under the mask) V`, specialized warps.

Grid     One program computes 128 query rows of one head. Heads are grouped so that their keys and values share the L2
         cache; in a group, the tiles with the last rows (the longest under a causal mask) come first. A closed head
         visits no tile.
Warps    Two consumers of 4 warps have 64 rows each. A producer of 1 warp loads tiles through tensor descriptors. An
         inspector of 2 warps reads the values of partial tiles before consumers do (`gluon_tiles`).
Rings    STAGES tiles each of keys and of values. A barrier `ready` completes when a tile has landed, `free` when both
         consumers have read it. Values of partial tiles are `landed` first, and `ready` when they have been inspected.
Overlap  A consumer issues Q K^T of a tile, then P V of the previous tile, and computes the softmax of the first product
         while the second runs. Consumers take `turns` to issue, so that the softmax of one runs during the products of
         the other.
Memory   Shared: the query (later the output in its place), then two rings. Scores, probabilities and sums stay in
         registers: 232 per thread of a consumer and 40 of the others, 64,512 for 384 threads.

`specialized` decides which calls run here. Functions of Triton's kernels that create no tiles run in Gluon unchanged; a
tile that is created here needs a layout. `tests/support/gluon_emulator.py` runs both files without a GPU.
"""

from __future__ import annotations

from typing import Final

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from heads_kernels.call import Call
from heads_kernels.ops.attention import Results
from heads_kernels.ops.triton.attend import SoftmaxSums, normalized
from heads_kernels.ops.triton.gate import open_rows, times_gate
from heads_kernels.ops.triton.gluon_tiles import (
    CACHED,
    CONSUMER_ROWS,
    Shared,
    barriers,
    first_key,
    inspector,
    place_of,
    producer,
    store_tiles,
    tiles_of,
    visits_of,
)
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.operands import (
    Pairs,
    Place,
    Sizes,
    gate_kind,
    gate_of,
    operands_of,
    row_lse_of,
    sizes_of,
)
from heads_kernels.ops.triton.scores import finish, online_softmax, softmax_scale
from heads_kernels.ops.triton.tiles import Tiles, padded, tile_constants
from heads_kernels.ops.triton.visible import (
    pairs_visible,
    partial_count,
    ranges,
    with_tile_lists,
)

#: The width of a swizzled tile of 16 bits.
_NARROWEST: Final = 64


@gluon.jit
def _scores(query, shared, stage, nothing, TILE: gl.constexpr):
    """Issue Q K^T of a tile of keys, without waiting for it."""
    keys = shared.key.index(stage).reshape([TILE.block_n, TILE.block_d]).permute((1, 0))
    return warpgroup_mma(query, keys, nothing, use_acc=False, is_async=True)


@gluon.jit
def _weighed(weights, shared, stage, acc, TILE: gl.constexpr):
    """Issue `acc + P V` of a tile of values, without waiting for it."""
    values = shared.value.index(stage).reshape([TILE.block_n, TILE.block_dv])
    return warpgroup_mma(weights, values, acc, is_async=True)


@gluon.jit
def _masked(
    scores, index, lo, hi, place, shared, visible, terms, visits, sizes, COLUMNS: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The scores of a partial tile: -inf where a row does not see the key, NaN where it sees a poisoned one."""
    stage = index % STAGES
    mbarrier.wait(shared.value_ready.index(stage), (index // STAGES) & 1)
    poison = shared.poison.index(stage).load(COLUMNS)
    first = first_key(visible, place, index, visits, TILE)
    keys = first + gl.arange(0, TILE.block_n, layout=COLUMNS)
    pairs = Pairs(place.b, place.h, place.at[:, None], keys[None, :])
    seen = pairs_visible(visible, terms, pairs, lo[:, None], hi[:, None], sizes.T, sizes.S, 0.0)
    return gl.where(seen, scores + poison[None, :], float("-inf"))


@gluon.jit
def _consumer(
    out_tiles, attended_tiles, shared, visible, terms, gate, lse, place, visits, taking_part, sizes,
    WHO: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute ROWS rows of a program over all of its tiles, and their output."""
    ROWS: gl.constexpr = CONSUMER_ROWS
    BLOCK_N: gl.constexpr = TILE.block_n
    BLOCK_DV: gl.constexpr = TILE.block_dv
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_DV, 16]
    )
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    dtype: gl.constexpr = out_tiles.dtype
    first_row = place.first + WHO * ROWS
    own = Place(place.b, place.h, place.hk, place.first, first_row + gl.arange(0, ROWS, layout=ROW))
    lo, hi = ranges(visible, own.b, own.h, own.at, taking_part, sizes.S)
    scale_log2 = softmax_scale(sizes.scale, terms)
    full = visits.full_end - visits.full_start
    count = full + partial_count(visits)
    acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, layout=SUMS)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=ROW)
    row_sum = gl.zeros([ROWS], gl.float32, layout=ROW)
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    if count > 0:
        mbarrier.wait(shared.query_ready.index(WHO), 0)
        query = shared.query.index(WHO).reshape([ROWS, TILE.block_d])
        # Before the first tile there is none whose product could run meanwhile.
        mbarrier.wait(shared.key_ready.index(0), 0)
        scores = _scores(query, shared, 0, nothing, TILE)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
        mbarrier.arrive(shared.key_free.index(0), count=1)
        scores, _ = finish(scores, 0.0, terms, sizes.scale)
        if full == 0:
            scores = _masked(
                scores, 0, lo, hi, own, shared, visible, terms, visits, sizes, COLUMNS, TILE, STAGES
            )
        p, row_max, row_sum, alpha = online_softmax(scores, row_max, row_sum, scale_log2, terms)
        weights = gl.convert_layout(p.to(dtype), WEIGHTS)
        mbarrier.wait(shared.key_ready.index(1), 0, pred=count > 1)
        for part in gl.static_range(2):  # full tiles, then partial ones
            if part == 0:
                start, end = 1, gl.maximum(full, 1)
            else:
                start, end = gl.maximum(full, 1), count
            for index in range(start, end):
                stage = index % STAGES
                before = (index - 1) % STAGES
                after = index + 1
                mbarrier.wait(shared.turns.index(WHO), (index - 1) & 1)
                scores = _scores(query, shared, stage, nothing, TILE)
                mbarrier.wait(shared.value_ready.index(before), ((index - 1) // STAGES) & 1)
                acc = _weighed(weights, shared, before, acc, TILE)
                mbarrier.arrive(shared.turns.index(1 - WHO), count=1)
                scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
                mbarrier.arrive(shared.key_free.index(stage), count=1)
                scores, _ = finish(scores, 0.0, terms, sizes.scale)
                if part == 1:
                    scores = _masked(
                        scores, index, lo, hi, own, shared, visible, terms, visits, sizes, COLUMNS, TILE, STAGES
                    )  # fmt: skip
                p, row_max, row_sum, alpha = online_softmax(
                    scores, row_max, row_sum, scale_log2, terms
                )
                weights = gl.convert_layout(p.to(dtype), WEIGHTS)
                # ptxas moves the softmax behind the wait for P V, unless the wait includes the weights and comes after
                # another wait (for the next keys).
                mbarrier.wait(
                    shared.key_ready.index(after % STAGES),
                    (after // STAGES) & 1,
                    pred=after < count,
                )
                acc, weights = warpgroup_mma_wait(num_outstanding=0, deps=(acc, weights))
                mbarrier.arrive(shared.value_free.index(before), count=1)
                acc = acc * gl.convert_layout(alpha, SUM_ROW)[:, None]
        last = count - 1
        mbarrier.wait(shared.value_ready.index(last % STAGES), (last // STAGES) & 1)
        acc = _weighed(weights, shared, last % STAGES, acc, TILE)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    at = first_row + gl.arange(0, ROWS, layout=SUM_ROW)
    sums = SoftmaxSums(
        acc, gl.convert_layout(row_max, SUM_ROW), gl.convert_layout(row_sum, SUM_ROW)
    )
    own = Place(place.b, place.h, place.hk, first_row, at)
    opened = Sizes(sizes.H, taking_part, sizes.S, sizes.group, sizes.scale)
    attended = normalized(sums, terms, None, own, opened)
    buffer = shared.query.index(WHO)
    _write(attended, out_tiles, attended_tiles, buffer, gate, lse, own, sizes, SUMS, TILE)


@gluon.jit
def _write(
    attended, out_tiles, attended_tiles, buffer, gate, lse, own, sizes, SUMS: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Store the rows of a consumer and their lse; `buffer` is shared memory for a tile of them."""
    b, h, first_row, rows, T = own.b, own.h, own.first, own.at, sizes.T
    tile = buffer.reshape([CONSUMER_ROWS, TILE.block_dv])
    if lse.ptr is not None:
        at = (b * sizes.H + h).to(gl.int64) * T + rows
        gl.store(lse.ptr + at, attended.lse, mask=rows < T)
    if attended_tiles is not None:
        tile.store(attended.rows.to(attended_tiles.dtype))
        fence_async_shared()
        store_tiles(attended_tiles, [b, h, first_row, 0], buffer)
        tma.store_wait(0)
    columns = gl.arange(0, TILE.block_dv, layout=gl.SliceLayout(0, SUMS))
    gated = times_gate(attended.rows, gate, b, h, rows, columns, T, TILE)
    # Rows that see no key are 0, even if their gate is NaN.
    gated = gl.where(attended.sees[:, None], gated, 0.0)
    tile.store(gated.to(out_tiles.dtype))
    fence_async_shared()
    store_tiles(out_tiles, [b, h, first_row, 0], buffer)
    tma.store_wait(0)


@gluon.jit
def _specialized_kernel(
    query_tiles, key_tiles, value_tiles, out_tiles, attended_tiles, terms, visible, gate, lse, sizes, together,
    TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A program computes 128 rows of `out` of one head. For a closed head it only writes zeros."""
    ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    dtype: gl.constexpr = query_tiles.dtype
    place = place_of(sizes, together, TILE, ROWS)
    taking_part = open_rows(gate, place.b, place.h, sizes.T, TILE)
    visits = visits_of(visible, place, taking_part, sizes.S, TILE, ROWS)

    query = gl.allocate_shared_memory(
        dtype, [2, 1, 1, CONSUMER_ROWS, TILE.block_d], query_tiles.layout
    )
    key = gl.allocate_shared_memory(
        dtype, [STAGES, 1, 1, TILE.block_n, TILE.block_d], key_tiles.layout
    )
    value = gl.allocate_shared_memory(
        dtype, [STAGES, 1, 1, TILE.block_n, TILE.block_dv], value_tiles.layout
    )
    poison = gl.allocate_shared_memory(
        gl.float32, [STAGES, TILE.block_n], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    query_ready = barriers(2, 1)
    key_ready = barriers(STAGES, 1)
    key_free = barriers(STAGES, 2)
    value_landed = barriers(STAGES, 1)
    value_ready = barriers(STAGES, 1)
    value_free = barriers(STAGES, 2)
    turns = barriers(2, 1)
    fence_async_shared()
    mbarrier.arrive(turns.index(0), count=1)  # the first turn
    shared = Shared(
        query, key, value, poison, query_ready, key_ready, key_free, value_landed, value_ready, value_free, turns
    )  # fmt: skip
    # The other partitions cannot take a tensor with the layout of this one.
    place = Place(place.b, place.h, place.hk, place.first, None)
    gl.warp_specialize(
        [
            (_consumer, (
                out_tiles, attended_tiles, shared, visible, terms, gate, lse, place, visits, taking_part, sizes, 0,
                TILE, STAGES,
            )),
            (_consumer, (
                out_tiles, attended_tiles, shared, visible, terms, gate, lse, place, visits, taking_part, sizes, 1,
                TILE, STAGES,
            )),
            (producer, (query_tiles, key_tiles, value_tiles, shared, visible, place, visits, TILE, STAGES)),
            (inspector, (shared, visits, TILE, STAGES)),
        ],
        [4, 1, 2],
        [232, 40, 40],
    )  # fmt: skip


def specialized_pass(call: Call, outputs: Results, tiles: Tiles) -> None:
    """Fill `outputs` (out, attended, lse), except empty ones. The scale is not negative."""
    out, attended, lse = outputs
    B, H, T, S = call.sizes
    of, sizes = with_tile_lists(call, operands_of(call), tiles), sizes_of(call)
    width = max(_NARROWEST, padded(max(call.D, call.Dv)))
    gate = gate_of(call.gate)
    constants = tile_constants(call, tiles, gate_kind(call.gate), width)
    queries, keys = ((block, width) for block in (CONSUMER_ROWS.value, tiles.block_n))
    together = CACHED // (4 * max(S, 1) * width) * sizes.group
    launch(
        _specialized_kernel, B * H * -(-T // tiles.block_m), call.query, tiles,
        tiles_of(call.query, *queries), tiles_of(call.key, *keys), tiles_of(call.value, *keys),
        tiles_of(out, *queries), tiles_of(attended, *queries) if attended.numel() else None,
        of.terms, of.visible, gate, row_lse_of(lse), sizes,
        max(1, min(together, B * H)), TILE=constants, STAGES=tiles.num_stages,
    )  # fmt: skip
