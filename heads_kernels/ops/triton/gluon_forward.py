"""The forward pass of both operators for sm_90 in Gluon, with specialized warps; formulas in `forward`.

Grid     One program computes 128 query rows of one head. Heads are grouped so that their keys and values share the L2
         cache; in a group, the tiles with the last rows (the longest under a causal mask) come first. A closed head
         visits no tile.
Warps    Two consumers of 4 warps have 64 rows each. A producer of 1 warp loads tiles through tensor descriptors. An
         inspector of 2 warps reads the values of partial tiles before consumers do (`gluon_tiles`).
Rings    KEY_STAGES tiles of keys and STAGES of values. A barrier `ready` completes when a tile has landed, `free` when
         both consumers have read it. Values of partial tiles are `landed` first, and `ready` when they have been
         inspected.
Overlap  A consumer issues Q K^T of a tile, then P V of the previous tile, and computes the softmax of the first product
         while the second runs. Consumers take `turns` to issue, so that the softmax of one runs during the products of
         the other.
Mixing   In collaborative attention, query and keys come in chunks as wide as the value, without those in which the
         mixing vector of the head is 0. A consumer multiplies its query by the vector once. A place in the ring of keys
         has a chunk and the content bias of its keys, and Q K^T is the sum over the chunks; a chunk is free when the
         next one is being multiplied. If a tile has more chunks than the ring, both consumers must read a chunk before
         a later one can be loaded, so they take no turns.
Memory   Shared: the query (later the output in its place), then two rings. With 512 shared features the query has 128
         KiB, which leaves 3 chunks of keys and 2 tiles of values: of 128 keys with 64 features, of 64 keys with 128.
         Scores, probabilities and sums stay in registers: 232 per thread of a consumer and 40 of the others, 64,512 for
         384 threads.

`backend` decides which calls run here. Functions of Triton's kernels that create no tiles run in Gluon unchanged; a
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
from heads_kernels.ops.triton.attend import SoftmaxSums, normalized, opened
from heads_kernels.ops.triton.gate import open_rows, times_gate
from heads_kernels.ops.triton.gluon_tiles import (
    CACHED,
    CONSUMER_ROWS,
    Global,
    Others,
    Shared,
    barrier,
    barriers,
    chunk_count,
    first_column,
    first_key,
    inspector,
    place_of,
    producer,
    store_tiles,
    tiles_of,
)
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.operands import Pairs, Place, cells_of, operands_of, row_lse_of, sizes_of
from heads_kernels.ops.triton.score_tiles import QueryRows, are_active, listed, load_mixing
from heads_kernels.ops.triton.scores import finish, online_softmax, softmax_scale
from heads_kernels.ops.triton.tiles import Tiles, padded, tile_constants
from heads_kernels.ops.triton.visible import SCAN, pairs_visible, partial_count, ranges, tiles_seen, with_tile_lists

#: The width of a swizzled tile of 16 bits.
_NARROWEST: Final = 64


@gluon.jit
def _chunks_of(mixing, h, TILE: gl.constexpr):
    """The list of chunks of head `h`."""
    FEATURES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    PLAIN: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    chunks = gl.arange(0, TILE.chunks, layout=gl.SliceLayout(1, FEATURES))
    features = gl.arange(0, TILE.block_d, layout=gl.SliceLayout(0, FEATURES))
    active = gl.convert_layout(are_active(mixing, h, chunks, features, TILE), PLAIN)
    return listed(active, gl.arange(0, TILE.chunks, layout=PLAIN))


@gluon.jit
def _mix(shared, of, h, WHO: gl.constexpr, TILE: gl.constexpr):
    """Multiply a consumer's rows of the shared query by the mixing vector of head `h`, chunk by chunk."""
    CHUNKS: gl.constexpr = shared.query.shape[0] // 2
    PART: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for chunk in range(chunk_count(of)):
        mbarrier.wait(shared.query_ready.index(WHO * CHUNKS + chunk), 0)
        tile = shared.query.index(WHO * CHUNKS + chunk).reshape([CONSUMER_ROWS, TILE.block_d])
        columns = gl.arange(0, TILE.block_d, layout=gl.SliceLayout(0, PART))
        columns += first_column(of, chunk, TILE)
        factors = load_mixing(of.mixing, h, columns, columns < TILE.d)
        tile.store((tile.load(PART).to(gl.float32) * factors[None, :]).to(tile.dtype))
    fence_async_shared()
    barrier()


@gluon.jit
def _product_of_chunk(shared, chunk, number, acc, FIRST: gl.constexpr, WHO: gl.constexpr, TILE: gl.constexpr):
    """Issue Q K^T of a chunk of keys, at `number` in their ring. It is added to `acc`, unless it is the FIRST."""
    CHUNKS: gl.constexpr = shared.query.shape[0] // 2
    query = shared.query.index(WHO * CHUNKS + chunk).reshape([CONSUMER_ROWS, TILE.block_d])
    keys = shared.key.index(number % shared.key.shape[0]).reshape([TILE.block_n, TILE.block_d])
    return warpgroup_mma(query, keys.permute((1, 0)), acc, use_acc=not FIRST, is_async=True)


@gluon.jit
def _scores(shared, index, nothing, of, WHO: gl.constexpr, TILE: gl.constexpr):
    """Issue Q K^T of a tile of keys, without waiting for the last chunk; the first one has been waited for."""
    KEY_STAGES: gl.constexpr = shared.key.shape[0]
    chunks = chunk_count(of)
    first = index * chunks
    scores = _product_of_chunk(shared, 0, first, nothing, True, WHO, TILE)
    if of.chunks is not None:
        scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
        for chunk in range(1, chunks):
            number = first + chunk
            mbarrier.wait(shared.key_ready.index(number % KEY_STAGES), (number // KEY_STAGES) & 1)
            scores = _product_of_chunk(shared, chunk, number, scores, False, WHO, TILE)
            scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
            mbarrier.arrive(shared.key_free.index((number - 1) % KEY_STAGES), count=1)
    return scores


@gluon.jit
def _finished(scores, shared, index, of, sizes, COLUMNS: gl.constexpr):
    """The scores of a tile whose products are done; its last chunk of keys becomes free."""
    chunks = chunk_count(of)
    stage = (index * chunks + chunks - 1) % shared.key.shape[0]
    if shared.content is not None:
        scores += shared.content.index(stage).load(COLUMNS)[None, :]
    mbarrier.arrive(shared.key_free.index(stage), count=1)
    scores, _ = finish(scores, 0.0, of.terms, sizes.scale)
    return scores


@gluon.jit
def _wait_for_keys(shared, index, of, there):
    """Wait for the first chunk of the tile of keys at `index`, if it is `there`."""
    number = index * chunk_count(of)
    KEY_STAGES: gl.constexpr = shared.key.shape[0]
    mbarrier.wait(shared.key_ready.index(number % KEY_STAGES), (number // KEY_STAGES) & 1, pred=there)


@gluon.jit
def _masked(scores, index, query, shared, of, visits, sizes, COLUMNS: gl.constexpr, TILE: gl.constexpr):
    """The scores of a partial tile: -inf where a row does not see the key, NaN where it sees a poisoned one."""
    stage = index % TILE.stages
    mbarrier.wait(shared.value_ready.index(stage), (index // TILE.stages) & 1)
    poison = shared.poison.index(stage).load(COLUMNS)
    place = query.place
    first = first_key(of.visible, place, index, visits, TILE)
    keys = first + gl.arange(0, TILE.block_n, layout=COLUMNS)
    pairs = Pairs(place.b, place.h, place.at[:, None], keys[None, :])
    lo, hi = query.lo[:, None], query.hi[:, None]
    seen = pairs_visible(of.visible, of.terms, pairs, lo, hi, sizes.T, sizes.S, 0.0)
    return gl.where(seen, scores + poison[None, :], float("-inf"))


@gluon.jit
def _consumer(memory, shared, of, place, visits, taking_part, sizes, WHO: gl.constexpr, TILE: gl.constexpr):
    """Compute ROWS rows of a program over all of its tiles, and their output."""
    STAGES: gl.constexpr = TILE.stages
    ROWS: gl.constexpr = CONSUMER_ROWS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE.block_n, 16]
    )
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE.block_dv, 16]
    )
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    dtype: gl.constexpr = memory.out.dtype
    first_row = place.first + WHO * ROWS
    own = Place(place.b, place.h, place.hk, place.first, first_row + gl.arange(0, ROWS, layout=ROW))
    lo, hi = ranges(of.visible, own.b, own.h, own.at, taking_part, sizes.S)
    query = QueryRows(own, None, None, lo, hi)
    scale_log2 = softmax_scale(sizes.scale, of.terms)
    full = visits.full_end - visits.full_start
    count = full + partial_count(visits)
    acc = gl.zeros([ROWS, TILE.block_dv], gl.float32, layout=SUMS)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=ROW)
    row_sum = gl.zeros([ROWS], gl.float32, layout=ROW)
    nothing = gl.zeros([ROWS, TILE.block_n], gl.float32, layout=SCORES)
    in_turns = chunk_count(of) <= shared.key.shape[0]
    if count > 0:
        if of.chunks is None:
            mbarrier.wait(shared.query_ready.index(WHO), 0)
        else:
            _mix(shared, of, place.h, WHO, TILE)
        # Before the first tile there is none whose product could run meanwhile.
        _wait_for_keys(shared, 0, of, True)
        scores = _scores(shared, 0, nothing, of, WHO, TILE)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
        scores = _finished(scores, shared, 0, of, sizes, COLUMNS)
        if full == 0:
            scores = _masked(scores, 0, query, shared, of, visits, sizes, COLUMNS, TILE)
        p, row_max, row_sum, alpha = online_softmax(scores, row_max, row_sum, scale_log2, of.terms)
        weights = gl.convert_layout(p.to(dtype), WEIGHTS)
        _wait_for_keys(shared, 1, of, count > 1)
        for part in gl.static_range(2):  # full tiles, then partial ones
            if part == 0:
                start, end = 1, gl.maximum(full, 1)
            else:
                start, end = gl.maximum(full, 1), count
            for index in range(start, end):
                before = (index - 1) % STAGES
                mbarrier.wait(shared.turns.index(WHO), (index - 1) & 1, pred=in_turns)
                scores = _scores(shared, index, nothing, of, WHO, TILE)
                mbarrier.wait(shared.value_ready.index(before), ((index - 1) // STAGES) & 1)
                values = shared.value.index(before).reshape([TILE.block_n, TILE.block_dv])
                acc = warpgroup_mma(weights, values, acc, is_async=True)
                mbarrier.arrive(shared.turns.index(1 - WHO), count=1, pred=in_turns)
                scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
                scores = _finished(scores, shared, index, of, sizes, COLUMNS)
                if part == 1:
                    scores = _masked(scores, index, query, shared, of, visits, sizes, COLUMNS, TILE)
                p, row_max, row_sum, alpha = online_softmax(scores, row_max, row_sum, scale_log2, of.terms)
                weights = gl.convert_layout(p.to(dtype), WEIGHTS)
                # ptxas moves the softmax behind the wait for P V, unless the wait includes the weights and comes after
                # another wait (for the next keys).
                _wait_for_keys(shared, index + 1, of, index + 1 < count)
                acc, weights = warpgroup_mma_wait(num_outstanding=0, deps=(acc, weights))
                mbarrier.arrive(shared.value_free.index(before), count=1)
                acc = acc * gl.convert_layout(alpha, SUM_ROW)[:, None]
        last = count - 1
        mbarrier.wait(shared.value_ready.index(last % STAGES), (last // STAGES) & 1)
        values = shared.value.index(last % STAGES).reshape([TILE.block_n, TILE.block_dv])
        acc = warpgroup_mma(weights, values, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    at = first_row + gl.arange(0, ROWS, layout=SUM_ROW)
    sums = SoftmaxSums(acc, gl.convert_layout(row_max, SUM_ROW), gl.convert_layout(row_sum, SUM_ROW))
    own = Place(place.b, place.h, place.hk, first_row, at)
    attended = normalized(sums, of.terms, None, own, opened(sizes, taking_part))
    CHUNKS: gl.constexpr = shared.query.shape[0] // 2
    buffer = shared.query.index(WHO * CHUNKS)
    _write(attended, memory, buffer, of, own, sizes, SUMS, TILE)


@gluon.jit
def _write(attended, memory, buffer, of, own, sizes, SUMS: gl.constexpr, TILE: gl.constexpr):
    """Store the rows of a consumer and their lse; `buffer` is shared memory for a tile of them."""
    b, h, first_row, rows, T = own.b, own.h, own.first, own.at, sizes.T
    tile = buffer.reshape([CONSUMER_ROWS, TILE.block_dv])
    if of.lse.ptr is not None:
        at = (b * sizes.H + h).to(gl.int64) * T + rows
        gl.store(of.lse.ptr + at, attended.lse, mask=rows < T)
    if memory.attended is not None:
        tile.store(attended.rows.to(memory.attended.dtype))
        fence_async_shared()
        store_tiles(memory.attended, [b, h, first_row, 0], buffer)
        tma.store_wait(0)
    columns = gl.arange(0, TILE.block_dv, layout=gl.SliceLayout(0, SUMS))
    gated = times_gate(attended.rows, of.gate, b, h, rows, columns, T, TILE)
    # Rows that see no key are 0, even if their gate is NaN.
    gated = gl.where(attended.sees[:, None], gated, 0.0)
    tile.store(gated.to(memory.out.dtype))
    fence_async_shared()
    store_tiles(memory.out, [b, h, first_row, 0], buffer)
    tma.store_wait(0)


@gluon.jit
def _specialized_kernel(
    query_tiles, key_tiles, value_tiles, out_tiles, attended_tiles, of, sizes, together, TILE: gl.constexpr
):
    """A program computes 128 rows of `out` of one head. For a closed head it only writes zeros."""
    CHUNKS: gl.constexpr = -(-TILE.d // TILE.block_d)
    KEY_STAGES: gl.constexpr = TILE.key_stages
    STAGES: gl.constexpr = TILE.stages
    ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = query_tiles.dtype
    place = place_of(sizes, together, TILE, ROWS)
    taking_part = open_rows(of.gate, place.b, place.h, sizes.T, TILE)
    lo, hi = ranges(of.visible, place.b, place.h, place.at, taking_part, sizes.S)
    own, scanned = place.first // TILE.block_m, gl.arange(0, SCAN, layout=ROWS)
    visits = tiles_seen(of.visible, place, own, lo, hi, taking_part, TILE.block_n, scanned)
    if of.mixing is not None:
        chunks = _chunks_of(of.mixing, place.h, TILE)
        of = Others(of.terms, of.visible, of.gate, of.lse, of.mixing, of.content_bias, chunks)

    content = None
    if of.content_bias is not None:
        content = gl.allocate_shared_memory(gl.float32, [KEY_STAGES, TILE.block_n], PLAIN)
    shared = Shared(
        query=gl.allocate_shared_memory(dtype, [2 * CHUNKS, 1, 1, CONSUMER_ROWS, TILE.block_d], query_tiles.layout),
        key=gl.allocate_shared_memory(dtype, [KEY_STAGES, 1, 1, TILE.block_n, TILE.block_d], key_tiles.layout),
        content=content,
        value=gl.allocate_shared_memory(dtype, [STAGES, 1, 1, TILE.block_n, TILE.block_dv], value_tiles.layout),
        poison=gl.allocate_shared_memory(gl.float32, [STAGES, TILE.block_n], PLAIN),
        query_ready=barriers(2 * CHUNKS, 1),
        key_ready=barriers(KEY_STAGES, 1),
        key_free=barriers(KEY_STAGES, 2),
        value_landed=barriers(STAGES, 1),
        value_ready=barriers(STAGES, 1),
        value_free=barriers(STAGES, 2),
        turns=barriers(2, 1),
    )
    fence_async_shared()
    mbarrier.arrive(shared.turns.index(0), count=1)  # the first turn
    memory = Global(query_tiles, key_tiles, value_tiles, out_tiles, attended_tiles)
    # The other partitions cannot take a tensor with the layout of this one.
    place = Place(place.b, place.h, place.hk, place.first, None)
    gl.warp_specialize(
        [
            (_consumer, (memory, shared, of, place, visits, taking_part, sizes, 0, TILE)),
            (_consumer, (memory, shared, of, place, visits, taking_part, sizes, 1, TILE)),
            (producer, (memory, shared, of, place, visits, sizes, TILE)),
            (inspector, (shared, visits, TILE)),
        ],
        [4, 1, 2],
        [232, 40, 40],
    )


def specialized_pass(call: Call, outputs: Results, tiles: Tiles) -> None:
    """Fill `outputs` (out, attended, lse), except empty ones. The scale is not negative."""
    out, attended, lse = outputs
    B, H, T, S = call.sizes
    of, sizes = with_tile_lists(call, operands_of(call), tiles), sizes_of(call)
    if call.mixing is None:
        width = max(_NARROWEST, padded(max(call.D, call.Dv)))
        of_head = 2 * width  # features of the key and of the value
    else:
        of_head = width = tiles.block_d
    constants = tile_constants(call, tiles, width)
    queries, keys = ((block, width) for block in (CONSUMER_ROWS.value, tiles.block_n))
    together = CACHED // (2 * max(S, 1) * of_head) * sizes.group
    launch(
        _specialized_kernel, B * H * -(-T // tiles.block_m), call.query, tiles,
        tiles_of(call.query, *queries), tiles_of(call.key, *keys), tiles_of(call.value, *keys),
        tiles_of(out, *queries), tiles_of(attended, *queries) if attended.numel() else None,
        Others(of.terms, of.visible, cells_of(call.gate), row_lse_of(lse), of.mixing, of.content_bias),
        sizes, max(1, min(together, B * H)), TILE=constants,
    )  # fmt: skip
