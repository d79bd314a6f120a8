"""A tile of query rows of a head against every key that it sees: the online softmax of the forward pass and statistics.

With gated attention each head has its own query, with collaborative attention it mixes a shared one (`score_tiles`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from heads_kernels.ops.triton.entmax import attend_sparse
from heads_kernels.ops.triton.operands import Sizes
from heads_kernels.ops.triton.score_tiles import (
    Features,
    QueryRows,
    active_chunks,
    fill,
    gathered,
    load_query,
    scores_of_keys,
)
from heads_kernels.ops.triton.scores import (
    add_sink,
    finite_part,
    kept,
    log_sum_exp,
    online_softmax,
    poison,
    product,
    softmax_scale,
)
from heads_kernels.ops.triton.visible import (
    Visits,
    full_tile,
    partial_count,
    partial_tile,
    ranges,
    tiles_of_split,
    tiles_seen,
)


class Attended(NamedTuple):
    """Results for the rows of a head, in a kernel; see `attend`."""

    rows: Any  # [BLOCK_M, BLOCK_DV]
    lse: Any
    above: Any
    sees: Any


class SoftmaxSums(NamedTuple):
    """Sums of `online_softmax` for rows of a head, in a kernel: `acc` [BLOCK_M, BLOCK_DV], others [BLOCK_M]."""

    acc: Any
    row_max: Any
    row_sum: Any


class RowStatistics(NamedTuple):
    """Running statistics of rows, in a kernel, [BLOCK_M] each.

    row_sum is the sum of `p = 2**(scale_log2 * (score - row_max))`, spread that of `p * scale_log2 * (score -
    row_max)`; best is the largest score of a key that is not excluded, and where is the first key with that score.
    """

    row_max: Any
    row_sum: Any
    spread: Any
    best: Any
    where: Any


@triton.jit
def attend(of, tiles, place, sizes, TILE: tl.constexpr):
    """`attended` of the rows of a head, `lse`, `above` and whether they see any key.

    Rows that see no key have 0, and lse -inf or their sink. With T 0 (a closed head) no row and no key is read, and lse
    is -inf. With entmax, lse is the largest score, and the threshold is `above` it. Full tiles of keys are loaded
    through the descriptors `tiles`, unless those are None. The scale is not negative. The query tile, scores,
    probabilities and the accumulator stay on chip.
    """
    if of.terms.alpha is None:
        sums = accumulate(of, tiles, place, None, None, sizes, TILE)
        attended = normalized(sums, of.terms, of.dropout, place, sizes)
    else:
        rows, lse, above, sees = attend_sparse(of, place, sizes, TILE)
        attended = Attended(rows, lse, above, sees)
    return attended


@triton.jit
def opened(sizes, T):
    """The sizes with `T` in place of the number of rows: 0 for a closed head."""
    return Sizes(sizes.H, T, sizes.S, sizes.group, sizes.scale)


@triton.jit
def normalized(sums, terms, dropout, place, sizes):
    """The results of `attend` from the sums over all keys that the rows see."""
    row_sum = sums.row_sum
    share = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    if dropout is not None:
        share = share * dropout.scale
    scale_log2 = softmax_scale(sizes.scale, terms)
    lse, sees = log_sum_exp(sums.row_max, row_sum, scale_log2, terms), row_sum != 0.0
    if terms.sinks is not None:
        lse, of_keys = add_sink(lse, terms, place.h)
        share = share * of_keys
        lse = tl.where(place.at < sizes.T, lse, float("-inf"))
    return Attended(sums.acc * share[:, None], lse, lse, sees)


@triton.jit
def no_sums(of_values, ROWS: tl.constexpr, TILE: tl.constexpr):
    """The initial sums, over no key; statistics have no values."""
    nothing = tl.full((ROWS,), float("-inf"), tl.float32)
    zeros = tl.zeros((ROWS,), tl.float32)
    if of_values is None:
        sums = RowStatistics(nothing, zeros, zeros, nothing, tl.full((ROWS,), 2147483647, tl.int32))
    else:
        sums = SoftmaxSums(tl.zeros((ROWS, TILE.block_dv), tl.float32), nothing, zeros)  # type: ignore[assignment]
    return sums


@triton.jit
def accumulate(of, tiles, place, split, splits, sizes, TILE: tl.constexpr):
    """The sums over the tiles of keys that the rows of `place` see: over all if `split` is None, else over its share.

    The head of `place` is that of all rows, or [BLOCK_M] if the rows are heads that share a key head.
    """
    BLOCK_D: tl.constexpr = TILE.block_d
    if of.mixing is None:
        sums = _stream(of, tiles, Features(), place, split, splits, sizes, TILE)
    else:
        chunks = active_chunks(of.mixing, place.h, TILE)
        sums = no_sums(of.value, TILE.block_m, TILE)
        for doubling in tl.static_range(0, TILE.doublings):
            if fill(chunks, 1 << doubling):
                columns, used = gathered(chunks, 0, BLOCK_D << doubling, TILE)
                features = Features(columns, used, chunks)
                sums = _stream(of, tiles, features, place, split, splits, sizes, TILE)
        if TILE.chunks * BLOCK_D > TILE.resident and chunks.length * BLOCK_D > TILE.resident:
            features = Features(chunks=chunks, scored=chunks)
            sums = _stream(of, tiles, features, place, split, splits, sizes, TILE)
    return sums


@triton.jit
def _stream(of, tiles, features, place, split, splits, sizes, TILE: tl.constexpr):
    """The sums of `accumulate`, with the `features` of the query."""
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    b, h = place.b, place.h
    head = place.hk if of.grouped is not None else h
    q = None
    if features.scored is None:
        q = load_query(of, features, b, head, place.first, place.at < sizes.T, BLOCK_M, TILE)
    lo, hi = ranges(of.visible, b, h, place.at, sizes.T, sizes.S)  # [BLOCK_M]
    query = QueryRows(place, q, features, lo, hi)
    own = place.first // BLOCK_M
    start, full_start, full_end, end, front = tiles_seen(of.visible, place, own, lo, hi, sizes.T, BLOCK_N)
    if (of.visible.lists is None) and ((of.visible.dense is not None) or (of.terms.bias is not None)):
        full_end = full_start  # single pairs may be hidden
    visits = Visits(start, full_start, full_end, end, front)
    if split is not None:
        visits = tiles_of_split(visits, split, splits.shares)
    STEP_N: tl.constexpr = BLOCK_N if tiles.key is None else tiles.key.block_shape[2]
    STEP: tl.constexpr = STEP_N // BLOCK_N
    # Full tiles that do not fill a step are visited as partial ones.
    full = (visits.full_end - visits.full_start) // STEP * STEP
    full_end = visits.full_start + full
    visits = Visits(visits.start, visits.full_start, full_end, visits.end, visits.front)
    sums = no_sums(of.value, BLOCK_M, TILE)
    for number in range(visits.full_start, visits.full_end, STEP):
        first = full_tile(of.visible, b, h, own, number) * BLOCK_N
        sums = _add_keys(of, tiles, query, sums, first, sizes, False, STEP_N, TILE)
    for number in tl.range(0, partial_count(visits), num_stages=TILE.partial_stages):
        first = partial_tile(of.visible, b, h, own, number, visits) * BLOCK_N
        sums = _add_keys(of, tiles, query, sums, first, sizes, True, BLOCK_N, TILE)
    return sums


@triton.jit
def _add_keys(of, tiles, query, sums, first, sizes, PARTIAL: tl.constexpr, BLOCK_N: tl.constexpr, TILE: tl.constexpr):
    """The sums after adding BLOCK_N keys, from `first` on."""
    place = query.place
    tile = scores_of_keys(of, tiles, query, first, sizes, PARTIAL, BLOCK_N, TILE)
    scores, v = tile.scores, tile.weighed  # [BLOCK_M, BLOCK_N], [BLOCK_N, BLOCK_DV]
    scale_log2 = softmax_scale(sizes.scale, of.terms)
    if of.value is None:
        if PARTIAL:
            scores = tl.where(tile.seen, scores, float("-inf"))
        keys = first + tl.arange(0, BLOCK_N)
        sums = _see_keys(sums, scores, of.excluded, place.b, keys, sizes.S, scale_log2, of.terms)
    else:
        if PARTIAL:
            scores = tl.where(tile.seen, scores + poison(v)[None, :], float("-inf"))
            v = finite_part(v)
        p, row_max, row_sum, alpha = online_softmax(scores, sums.row_max, sums.row_sum, scale_log2, of.terms)
        if of.dropout is not None:
            heads = place.h
            if of.grouped is not None:
                heads = heads[:, None]
            p = tl.where(kept(of.dropout, place.b, heads, place.at, first, BLOCK_N), p, 0.0)
        acc = product(p.to(v.dtype), v, sums.acc * alpha[:, None])
        sums = SoftmaxSums(acc, row_max, row_sum)
    return sums


@triton.jit
def _see_keys(seen, scores, excluded, b, keys, S, scale_log2, terms):
    """The statistics after adding the `scores` [BLOCK_M, BLOCK_N] of `keys` [BLOCK_N]; hidden ones are -inf."""
    old_max, old_sum = seen.row_max, seen.row_sum
    p, row_max, row_sum, alpha = online_softmax(scores, old_max, old_sum, scale_log2, terms)
    below = tl.where(old_sum > 0.0, (old_max - row_max) * scale_log2, 0.0)
    depth = tl.where(p > 0.0, (scores - row_max[:, None]) * scale_log2, 0.0)
    # Where alpha is 0, below may be -inf.
    spread = tl.where(alpha == 0.0, 0.0, alpha * (seen.spread + old_sum * below))
    spread = spread + tl.sum(p * depth, 1)
    if excluded is not None:
        at = excluded.ptr + b.to(tl.int64) * excluded.stride_b + keys
        left_out = tl.load(at, mask=keys < S, other=1) != 0
        scores = tl.where(left_out[None, :], float("-inf"), scores)
    best = tl.max(scores, 1)
    here = tl.min(tl.where(scores == best[:, None], keys[None, :], 2147483647), 1)
    # Tiles are not visited in the order of their keys: of equal scores, the smaller key counts.
    better = (best > seen.best) | ((best == seen.best) & (here < seen.where))
    where = tl.where(better, here, seen.where)
    return RowStatistics(row_max, row_sum, spread, tl.maximum(seen.best, best), where)
