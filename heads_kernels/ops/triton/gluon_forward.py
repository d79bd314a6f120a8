"""Gated attention forward for sm_90 in Gluon: `out = act(gate) * softmax(scores under the mask) V`, specialized warps.

Grid     One program computes 128 query rows of one head; of heads whose keys and values share the L2 cache, the tiles
         with the last rows (of a causal mask the longest) come first. A closed head visits no tile.
Warps    Two consumers of 4 warps have 64 rows each. A producer of 1 warp asks for tiles through tensor descriptors. An
         inspector of 2 warps reads the values of partial tiles before consumers do (see `_inspector`).
Rings    Of STAGES tiles of keys, and of values. A barrier `ready` completes when a tile has landed, `free` when both
         consumers have read it. Values of partial tiles are `landed` first, and `ready` when they have been inspected.
Overlap  A consumer issues Q K^T of a tile, then P V of the tile before, and computes the softmax of the one while the
         other runs. Consumers take `turns` to issue, so that the softmax of one runs during the products of the other.
Memory   The query, and in its place the output, then two rings. Scores, probabilities and sums stay in registers: 232
         a thread of a consumer, 40 of the others: 64,512 for 384 threads.

`forward` decides what comes here (`warp_tiles`). Functions of Triton's kernels that make no tiles of their own run in
Gluon as they are; tiles have a layout here. `tests/support/gluon_emulator.py` runs this file without a GPU.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from heads_kernels.call import Call
from heads_kernels.ops.attention import Results
from heads_kernels.ops.triton.attend import SoftmaxSums, normalized, softmax_scale
from heads_kernels.ops.triton.descriptors import outer_strides
from heads_kernels.ops.triton.gate import activate, open_rows, row_gates
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.operands import (
    Pairs,
    Place,
    Sizes,
    gate_kind,
    gate_of,
    row_lse_of,
    sizes_of,
    terms_of,
    visible_of,
)
from heads_kernels.ops.triton.scores import finish
from heads_kernels.ops.triton.softmax import online_softmax
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import Tiles, padded, tile_constants
from heads_kernels.ops.triton.visible import (
    full_tile,
    listed_tiles,
    ordered,
    pairs_visible,
    partial_count,
    partial_tile,
    ranges,
    tiles_of_ranges,
)

# Other names until Triton 3.6.
_load: Final = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_store: Final = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

#: Query rows of a consumer: the fewest that four warps multiply.
_ROWS: gl.constexpr = gl.constexpr(64)
#: The width of a swizzled tile of 16 bits.
_NARROWEST: Final = 64
#: Keys looked at together for a hidden one. Heuristic: 8 a thread, as of `visible`.
_SCAN: gl.constexpr = gl.constexpr(1024)
#: Keys and values of heads in work at once: of the 50 MiB of L2, what the output leaves (heuristic).
_CACHED: Final = 32 << 20


class Shared(NamedTuple):
    """Shared memory, in a kernel: tiles, and barriers."""

    query: Any  # [2, 1, 1, ROWS, BLOCK_D], a tile for each consumer; then its output
    key: Any  # [STAGES, 1, 1, BLOCK_N, BLOCK_D]
    value: Any  # [STAGES, 1, 1, BLOCK_N, BLOCK_DV]
    poison: Any  # float32 [STAGES, BLOCK_N], of partial tiles
    query_ready: Any  # [2]
    key_ready: Any  # [STAGES], as the others
    key_free: Any
    value_landed: Any
    value_ready: Any
    value_free: Any
    turns: Any  # [2]


class OutputTiles(NamedTuple):
    """Descriptors of the output and of what it is before the gate, in a kernel; None: it is not kept."""

    out: Any
    attended: Any


@gluon.jit
def _place_of(sizes, together, TILE: gl.constexpr, ROWS: gl.constexpr):
    """The place of a program among `together` heads that are in work at once; `sizes.T` rows have tiles."""
    tiles = gl.cdiv(sizes.T, TILE.block_m)
    heads = gl.num_programs(0) // tiles
    first = gl.program_id(0) // (together * tiles) * together
    beside = gl.minimum(heads - first, together)
    program = gl.program_id(0) - first * tiles
    pair = first + program % beside
    b, h = pair // sizes.H, pair % sizes.H
    first_row = (tiles - 1 - program // beside) * TILE.block_m
    return Place(
        b, h, h // sizes.group, first_row, first_row + gl.arange(0, TILE.block_m, layout=ROWS)
    )


@gluon.jit
def _visits_of(visible, place, T, S, TILE: gl.constexpr, ROWS: gl.constexpr):
    """The tiles of keys that the rows of `place` see; see `visible`."""
    BLOCK_N: gl.constexpr = TILE.block_n
    if visible.lists is not None:
        visits = listed_tiles(visible, place.b, place.h, place.first // TILE.block_m, T)
    else:
        lo, hi = ranges(visible, place.b, place.at, T, S)
        start, full_start, full_end, end = tiles_of_ranges(lo, hi, place.at, T, BLOCK_N)
        if visible.key_visible is not None:
            # Full tiles end at the first hidden key.
            hole = full_end * BLOCK_N
            at = visible.key_visible + place.b.to(gl.int64) * visible.stride_keys
            for scan in range(full_start * BLOCK_N, gl.minimum(full_end, end) * BLOCK_N, _SCAN):
                keys = scan + gl.arange(0, _SCAN, layout=ROWS)
                seen = gl.load(at + keys, mask=keys < hole, other=1) != 0
                hole = gl.minimum(hole, gl.min(gl.where(seen, 2147483647, keys), 0))
            full_end = hole // BLOCK_N
        visits = ordered(start, full_start, full_end, end)
    return visits


@gluon.jit
def _first_key(visible, place, index, visits, TILE: gl.constexpr):
    """The first key of the tile that is visited at `index`: full tiles come first."""
    own = place.first // TILE.block_m
    full = visits.full_end - visits.full_start
    if index < full:
        number = full_tile(visible, place.b, place.h, own, visits.full_start + index)
    else:
        number = partial_tile(visible, place.b, place.h, own, index - full, visits)
    return number * TILE.block_n


@gluon.jit
def _producer(
    query_tiles, key_tiles, value_tiles, shared, visible, place, visits, TILE: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Ask for the query, and for the tiles of keys and values as their places become free."""
    ROWS: gl.constexpr = _ROWS
    KEY_BYTES: gl.constexpr = 2 * TILE.block_n * TILE.block_d
    VALUE_BYTES: gl.constexpr = 2 * TILE.block_n * TILE.block_dv
    b, h, hk = place.b, place.h, place.hk
    full = visits.full_end - visits.full_start
    count = full + partial_count(visits)
    if count > 0:
        for who in gl.static_range(2):
            ready = shared.query_ready.index(who)
            mbarrier.expect(ready, 2 * ROWS * TILE.block_d)
            _load(query_tiles, [b, h, place.first + who * ROWS, 0], ready, shared.query.index(who))
    for index in range(count):
        stage = index % STAGES
        free = (index // STAGES + 1) & 1
        first = _first_key(visible, place, index, visits, TILE)
        mbarrier.wait(shared.key_free.index(stage), free)
        ready = shared.key_ready.index(stage)
        mbarrier.expect(ready, KEY_BYTES)
        _load(key_tiles, [b, hk, first, 0], ready, shared.key.index(stage))
        mbarrier.wait(shared.value_free.index(stage), free)
        if index < full:
            ready = shared.value_ready.index(stage)
            mbarrier.expect(ready, VALUE_BYTES)
            _load(value_tiles, [b, hk, first, 0], ready, shared.value.index(stage))
        else:
            landed = shared.value_landed.index(stage)
            mbarrier.expect(landed, VALUE_BYTES)
            _load(value_tiles, [b, hk, first, 0], landed, shared.value.index(stage))


@gluon.jit
def _inspector(shared, visits, TILE: gl.constexpr, STAGES: gl.constexpr):
    """Of partial tiles: 0 for values that are not finite, and NaN as the `poison` of their keys.

    The product reads values of keys that a row does not see, and 0 times NaN is NaN. Poison is added to the scores of
    the rows that do see the key (`softmax.poison`). Most tiles are finite: only sums of `0 * value` are formed of them.
    """
    # Parts of 8 rows and 64 features: 8 numbers a thread.
    PART: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    OF_KEYS: gl.constexpr = gl.SliceLayout(1, PART)
    BLOCK_N: gl.constexpr = TILE.block_n
    BLOCK_DV: gl.constexpr = TILE.block_dv
    full = visits.full_end - visits.full_start
    for index in range(full, full + partial_count(visits)):
        stage = index % STAGES
        mbarrier.wait(shared.value_landed.index(stage), ((index - full) // STAGES) & 1)
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
def _scores(query, shared, stage, nothing, TILE: gl.constexpr):
    """Q K^T of a tile of keys, under way."""
    keys = shared.key.index(stage).reshape([TILE.block_n, TILE.block_d]).permute((1, 0))
    return warpgroup_mma(query, keys, nothing, use_acc=False, is_async=True)


@gluon.jit
def _weighed(weights, shared, stage, acc, TILE: gl.constexpr):
    """`acc + P V` of a tile of values, under way."""
    values = shared.value.index(stage).reshape([TILE.block_n, TILE.block_dv])
    return warpgroup_mma(weights, values, acc, is_async=True)


@gluon.jit
def _masked(
    scores, index, lo, hi, place, shared, visible, terms, visits, sizes, COLUMNS: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The scores of a partial tile: -inf where a row does not see the key, NaN where it sees one with poison."""
    stage = index % STAGES
    mbarrier.wait(shared.value_ready.index(stage), (index // STAGES) & 1)
    poison = shared.poison.index(stage).load(COLUMNS)
    first = _first_key(visible, place, index, visits, TILE)
    keys = first + gl.arange(0, TILE.block_n, layout=COLUMNS)
    pairs = Pairs(place.b, place.h, place.at[:, None], keys[None, :])
    seen = pairs_visible(visible, terms, pairs, lo[:, None], hi[:, None], sizes.T, sizes.S, 0.0)
    return gl.where(seen, scores + poison[None, :], float("-inf"))


@gluon.jit
def _consumer(
    out_tiles, attended_tiles, shared, visible, terms, gate, lse, place, visits, taking_part, sizes,
    WHO: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """ROWS rows of a program against all of its tiles, and their output."""
    ROWS: gl.constexpr = _ROWS
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
    lo, hi = ranges(visible, own.b, own.at, taking_part, sizes.S)
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
        # The first tile has no other before it, whose product could run meanwhile.
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
                # ptxas moves the softmax behind the wait for P V unless the weights are among what is waited for and a
                # wait for something else (the next keys) stands in front of it.
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
    _write(
        attended,
        out_tiles,
        attended_tiles,
        shared.query.index(WHO),
        gate,
        lse,
        own,
        sizes,
        SUMS,
        TILE,
    )


@gluon.jit
def _write(
    attended, out_tiles, attended_tiles, buffer, gate, lse, own, sizes, SUMS: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Store the rows of a consumer and their lse; `buffer` is shared memory for a tile of them."""
    b, h, first_row, rows, T = own.b, own.h, own.first, own.at, sizes.T
    tile = buffer.reshape([_ROWS, TILE.block_dv])
    if lse.ptr is not None:
        at = (b * sizes.H + h).to(gl.int64) * T + rows
        gl.store(lse.ptr + at, attended.lse, mask=rows < T)
    if attended_tiles is not None:
        tile.store(attended.rows.to(attended_tiles.dtype))
        fence_async_shared()
        _store(attended_tiles, [b, h, first_row, 0], buffer)
        tma.store_wait(0)
    gated = attended.rows
    if TILE.gate == "elements":
        columns = gl.arange(0, TILE.block_dv, layout=gl.SliceLayout(0, SUMS))
        of_rows = h.to(gl.int64) * gate.stride_h + rows.to(gl.int64) * gate.stride_t
        at = gate.ptr + b.to(gl.int64) * gate.stride_b + of_rows[:, None]
        at = at + (columns.to(gl.int64) * gate.stride_d)[None, :]
        there = (rows < T)[:, None] & (columns < TILE.dv)[None, :]
        values = gl.load(at, mask=there, other=0.0).to(gl.float32)
        gated = gated * activate(values, TILE.activation)
    elif TILE.gate != "none":
        gated = gated * row_gates(gate, b, h, rows, T, TILE)[:, None]
    # Rows that see nothing are 0, whatever their gate.
    gated = gl.where(attended.sees[:, None], gated, 0.0)
    tile.store(gated.to(out_tiles.dtype))
    fence_async_shared()
    _store(out_tiles, [b, h, first_row, 0], buffer)
    tma.store_wait(0)


@gluon.jit
def _specialized_kernel(
    query_tiles, key_tiles, value_tiles, out_tiles, attended_tiles, terms, visible, gate, lse, sizes, together,
    TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A program computes 128 rows of `out` of one head. A closed head writes its zeros and is done."""
    ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    dtype: gl.constexpr = query_tiles.dtype
    place = _place_of(sizes, together, TILE, ROWS)
    taking_part = open_rows(gate, place.b, place.h, sizes.T, TILE)
    visits = _visits_of(visible, place, taking_part, sizes.S, TILE, ROWS)

    query = gl.allocate_shared_memory(dtype, [2, 1, 1, _ROWS, TILE.block_d], query_tiles.layout)
    key = gl.allocate_shared_memory(
        dtype, [STAGES, 1, 1, TILE.block_n, TILE.block_d], key_tiles.layout
    )
    value = gl.allocate_shared_memory(
        dtype, [STAGES, 1, 1, TILE.block_n, TILE.block_dv], value_tiles.layout
    )
    poison = gl.allocate_shared_memory(
        gl.float32, [STAGES, TILE.block_n], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    BARRIERS: gl.constexpr = mbarrier.MBarrierLayout()
    query_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS)
    key_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    value_landed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    value_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIERS)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIERS)
    for i in gl.static_range(2):
        mbarrier.init(query_ready.index(i), count=1)
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(key_ready.index(i), count=1)
        mbarrier.init(key_free.index(i), count=2)
        mbarrier.init(value_landed.index(i), count=1)
        mbarrier.init(value_ready.index(i), count=1)
        mbarrier.init(value_free.index(i), count=2)
    fence_async_shared()
    mbarrier.arrive(turns.index(0), count=1)  # the first turn
    shared = Shared(
        query, key, value, poison, query_ready, key_ready, key_free, value_landed, value_ready, value_free, turns
    )  # fmt: skip
    # A worker takes no tensors of this partition's layout.
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
            (_producer, (query_tiles, key_tiles, value_tiles, shared, visible, place, visits, TILE, STAGES)),
            (_inspector, (shared, visits, TILE, STAGES)),
        ],
        [4, 1, 2],
        [232, 40, 40],
    )  # fmt: skip


def specialized_pass(call: Call, outputs: Results, tiles: Tiles) -> None:
    """Fill `outputs` (out, attended, lse); empty ones are not kept. The scale is not negative."""
    out, attended, lse = outputs
    B, H, T, S = call.sizes
    terms, visible, sizes = terms_of(call), visible_of(call.intervals), sizes_of(call)
    width = max(_NARROWEST, padded(max(call.D, call.Dv)))
    gate = gate_of(call.gate)
    constants = tile_constants(
        tiles, call.D, call.Dv, gate=gate_kind(call.gate), activation=call.gate_activation, width=width
    )  # fmt: skip
    queries, keys = ((block, width) for block in (_ROWS.value, tiles.block_n))
    together = _CACHED // (4 * max(S, 1) * width) * sizes.group
    launch(
        _specialized_kernel, B * H * -(-T // tiles.block_m), call.query, tiles,
        _tiles_in(call.query, *queries), _tiles_in(call.key, *keys), _tiles_in(call.value, *keys),
        _tiles_in(out, *queries), _tiles_in(attended, *queries) if attended.numel() else None,
        terms, visible_to_tiles(call, terms, visible, tiles), gate, row_lse_of(lse), sizes,
        max(1, min(together, B * H)), TILE=constants, STAGES=tiles.num_stages,
    )  # fmt: skip


def _tiles_in(rows: Tensor, block: int, columns: int) -> TensorDescriptor:
    """`descriptors.tiles_in`, with the layout that products read."""
    shape = [1, 1, block, columns]
    layout = gl.NVMMASharedLayout.get_default_for(shape, getattr(gl, str(rows.dtype).split(".")[1]))
    return TensorDescriptor(rows, list(rows.shape), [*outer_strides(rows), 1], shape, layout)
