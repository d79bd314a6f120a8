"""Attention statistics on the `triton` backend, of the scores of either operator.

A tile of query rows goes over every tile of keys that it sees; what is kept of a row is a few sums. What keys receive
is summed in a second pass, over the tiles of rows that see a tile of keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.call import Call
from heads_kernels.ops.statistics import Buffers
from heads_kernels.ops.triton.chunks import active_chunks, chunk_at, load_content_bias, mixed
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import load_columns, load_tile
from heads_kernels.ops.triton.operands import (
    ContentBias,
    Mixing,
    Pairs,
    Place,
    Rows,
    Sizes,
    Terms,
    Visible,
    bytes_of,
    content_bias_of,
    has_terms,
    mixing_of,
    rows_of,
    strides_of,
    terms_of,
    visible_of,
    with_positive_scale,
)
from heads_kernels.ops.triton.scores import add_sink, finish, load_bias, natural, scale_log2_of
from heads_kernels.ops.triton.softmax import (
    LN2,
    SMALLEST,
    log_sum_exp,
    online_softmax,
    product,
    weights_over,
)
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import tile_constants, tiles_for
from heads_kernels.ops.triton.visible import (
    full_tile,
    listed_tiles,
    pairs_visible,
    partial_count,
    partial_tile,
    ranges,
    tiles_seen,
    tiles_that_see,
)


class Excluded(NamedTuple):
    """Keys that `max_prob` and `argmax` leave out: bytes `[B or 1, S]`."""

    ptr: Tensor
    stride_b: int


class ScoreOperands(NamedTuple):
    """What scores are made of, and what hides them."""

    query: Rows
    key: Rows
    mixing: Mixing | None
    content_bias: ContentBias | None
    terms: Terms
    visible: Visible
    excluded: Excluded | None
    end: None = None


class Shares(NamedTuple):
    """What the pass by rows leaves to the pass by keys: a row's largest score, and its share, `[B, H, T]` contiguous.

    The product of a row's weight and a probability is `2**(scale_log2 * (score - row_max)) * share`; a share of 0
    leaves the row out. `weights` are those of rows, as the call has them; their strides are 0 where they broadcast.
    """

    row_max: Tensor
    share: Tensor
    weights: Tensor
    stride_b: int
    stride_h: int
    stride_t: int


class Written(NamedTuple):
    """What the pass by rows writes, `[B, H, T]` contiguous; `shares` is None where `received` is not asked for."""

    lse: Tensor
    max_score: Tensor
    max_prob: Tensor
    argmax: Tensor
    entropy: Tensor
    shares: Shares | None
    end: None = None


class RowStatistics(NamedTuple):
    """What is kept of rows, in a kernel, [BLOCK_M] each.

    row_sum is the sum of `p = 2**(scale_log2 * (score - row_max))`, spread that of `p * scale_log2 * (score -
    row_max)`; best is the largest score of a key that is not excluded, where the first key that has it.
    """

    row_max: Any
    row_sum: Any
    spread: Any
    best: Any
    where: Any


@triton.jit
def _gated_kernel(of, written, sizes, TILE: tl.constexpr):
    """A program reads every key that BLOCK_M rows of a head see and keeps five numbers a row on chip."""
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    T, S = sizes.T, sizes.S
    tiles = tl.cdiv(T, BLOCK_M)
    pair = tl.program_id(0) // tiles
    b, h = pair // sizes.H, pair % sizes.H
    first_row = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    place = Place(b, h, h // sizes.group, first_row, rows)
    lo, hi = ranges(of.visible, b, rows, T, S)  # [BLOCK_M]
    own = first_row // BLOCK_M
    visits = tiles_seen(of.visible, place, own, lo, hi, T, BLOCK_N)
    q = load_tile(
        of.query, b, h, first_row, rows < T, TILE.d, BLOCK_M, TILE.block_d
    )  # [BLOCK_M, BLOCK_D]
    scale_log2 = tl.maximum(scale_log2_of(sizes.scale, of.terms), SMALLEST)
    seen = nothing_seen(BLOCK_M)
    for number in range(visits.full_start, visits.full_end):
        first = full_tile(of.visible, b, h, own, number) * BLOCK_N
        seen = _see_keys(of, q, seen, None, None, first, place, sizes, scale_log2, TILE)
    for number in tl.range(0, partial_count(visits), num_stages=1):
        first = partial_tile(of.visible, b, h, own, number, visits) * BLOCK_N
        seen = _see_keys(of, q, seen, lo, hi, first, place, sizes, scale_log2, TILE)
    store_rows(seen, of.terms, place, written, sizes, scale_log2)


@triton.jit
def _see_keys(of, q, seen, lo, hi, first, place, sizes, scale_log2, TILE: tl.constexpr):
    """What is kept of the rows after BLOCK_N keys; pairs are masked one by one where the ranges of rows are given."""
    BLOCK_N: tl.constexpr = TILE.block_n
    keys = first + tl.arange(0, BLOCK_N)
    there = None
    if lo is not None:
        there = keys < sizes.S
    k = load_tile(
        of.key, place.b, place.hk, first, there, TILE.d, BLOCK_N, TILE.block_d
    )  # [BLOCK_N, BLOCK_D]
    pairs = Pairs(place.b, place.h, place.at[:, None], keys[None, :])
    bias = load_bias(of.terms, pairs, sizes.T, sizes.S)
    zeros = tl.zeros((TILE.block_m, BLOCK_N), tl.float32)
    scores, _ = finish(product(q, tl.trans(k), zeros), bias, of.terms, sizes.scale)
    if lo is not None:
        visible = pairs_visible(
            of.visible, of.terms, pairs, lo[:, None], hi[:, None], sizes.T, sizes.S, bias
        )
        scores = tl.where(visible, scores, float("-inf"))
    return see_tile(seen, scores, of.excluded, place.b, keys, sizes.S, scale_log2, of.terms)


@triton.jit
def _step(
    of, chunks, seen, scores, lo, hi, tile, number, place, sizes, scale_log2, TILE: tl.constexpr
):
    """One chunk, `number` of `chunks`, of one tile of keys; with the last chunk the rows see the tile.

    Pairs are masked one by one where the ranges of rows are given.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_D: tl.constexpr = TILE.block_d
    b, h, rows, T, S = place.b, place.h, place.at, sizes.T, sizes.S
    column = chunk_at(chunks, number) * BLOCK_D
    features = column + tl.arange(0, BLOCK_D)
    first_key = tile * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)
    q = load_columns(
        of.query, b, place.first, rows < T, column, TILE.d, BLOCK_M, BLOCK_D
    )  # [BLOCK_M, BLOCK_D]
    k = load_columns(
        of.key, b, first_key, keys < S, column, TILE.d, BLOCK_N, BLOCK_D
    )  # [BLOCK_N, BLOCK_D]
    q = mixed(q, of.mixing, h, features, features < TILE.d)
    scores = product(q, tl.trans(k), scores)  # [BLOCK_M, BLOCK_N]
    if number == chunks.length - 1:
        if of.content_bias is not None:
            scores += load_content_bias(of.content_bias, b, h, keys, S)[None, :]
        pairs = Pairs(b, h, rows[:, None], keys[None, :])
        bias = load_bias(of.terms, pairs, T, S)
        scores, _ = finish(scores, bias, of.terms, sizes.scale)
        if lo is not None:
            visible = pairs_visible(
                of.visible, of.terms, pairs, lo[:, None], hi[:, None], T, S, bias
            )
            scores = tl.where(visible, scores, float("-inf"))
        seen = see_tile(seen, scores, of.excluded, b, keys, S, scale_log2, of.terms)
        scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    return seen, scores


@triton.jit
def _collaborative_kernel(of, written, sizes, TILE: tl.constexpr):
    """A program reads every key that BLOCK_M rows of a head see and keeps five numbers a row on chip."""
    BLOCK_M: tl.constexpr = TILE.block_m
    H, T, S = sizes.H, sizes.T, sizes.S
    tiles = tl.cdiv(T, BLOCK_M)
    h = tl.program_id(0) % H
    b = tl.program_id(0) // (H * tiles)
    first_row = (tiles - 1 - tl.program_id(0) // H % tiles) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    place = Place(b, h, h, first_row, rows)
    lo, hi = ranges(of.visible, b, rows, T, S)  # [BLOCK_M]
    own = first_row // BLOCK_M
    visits = tiles_seen(of.visible, place, own, lo, hi, T, TILE.block_n)
    chunks = active_chunks(of.mixing, h, TILE)
    count = chunks.length
    scale_log2 = tl.maximum(scale_log2_of(sizes.scale, of.terms), SMALLEST)
    seen = nothing_seen(BLOCK_M)
    scores = tl.zeros((BLOCK_M, TILE.block_n), tl.float32)
    for step in range((visits.full_end - visits.full_start) * count):
        tile = full_tile(of.visible, b, h, own, visits.full_start + step // count)
        seen, scores = _step(
            of, chunks, seen, scores, None, None, tile, step % count, place, sizes, scale_log2, TILE
        )
    for step in tl.range(0, partial_count(visits) * count, num_stages=1):
        tile = partial_tile(of.visible, b, h, own, step // count, visits)
        seen, scores = _step(
            of, chunks, seen, scores, lo, hi, tile, step % count, place, sizes, scale_log2, TILE
        )
    store_rows(seen, of.terms, place, written, sizes, scale_log2)


@triton.jit
def _received_tile(
    of, shares, k, content, chunks, tile, place, sizes, scale_log2, PARTIAL: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """What BLOCK_N keys receive of one tile of query rows, [BLOCK_N]; scores are transposed, [BLOCK_N, BLOCK_M].

    With mixing, `k` is None and scores are computed chunk by chunk.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_D: tl.constexpr = TILE.block_d
    b, h, T, S = place.b, place.h, sizes.T, sizes.S
    first_row = tile * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    there = rows < T
    at = (b * sizes.H + h).to(tl.int64) * T + rows
    row_max = tl.load(shares.row_max + at, mask=there, other=0.0)[None, :]
    share = tl.load(shares.share + at, mask=there, other=0.0)[None, :]
    pairs = Pairs(b, h, rows[None, :], place.at[:, None])
    bias = load_bias(of.terms, pairs, T, S)
    raw = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if of.mixing is None:
        q = load_tile(of.query, b, h, first_row, there, TILE.d, BLOCK_M, BLOCK_D)
        raw = product(k, tl.trans(q), raw)
    else:
        for number in range(chunks.length):
            column = chunk_at(chunks, number) * BLOCK_D
            features = column + tl.arange(0, BLOCK_D)
            part = load_columns(
                of.key, b, place.first, place.at < S, column, TILE.d, BLOCK_N, BLOCK_D
            )
            q = load_columns(of.query, b, first_row, there, column, TILE.d, BLOCK_M, BLOCK_D)
            q = mixed(q, of.mixing, h, features, features < TILE.d)  # [BLOCK_M, BLOCK_D]
            raw = product(part, tl.trans(q), raw)
    if of.content_bias is not None:
        raw += content[:, None]
    scores, _ = finish(raw, bias, of.terms, sizes.scale)
    p = weights_over(scores, row_max, scale_log2, of.terms)
    p = tl.where(share == 0.0, 0.0, p * share)
    if PARTIAL:
        lo, hi = ranges(of.visible, b, rows, T, S)
        seen = pairs_visible(of.visible, of.terms, pairs, lo[None, :], hi[None, :], T, S, bias)
        p = tl.where(seen, p, 0.0)
    return tl.sum(p, 1)


@triton.jit
def _received_kernel(of, shares, received, sizes, TILE: tl.constexpr):
    """A program owns BLOCK_N keys of a head and sums over the tiles of rows that see them, in one order."""
    BLOCK_N: tl.constexpr = TILE.block_n
    H, T, S = sizes.H, sizes.T, sizes.S
    tiles = tl.cdiv(S, BLOCK_N)
    own = tl.program_id(0) % tiles
    h = tl.program_id(0) // tiles % H
    b = tl.program_id(0) // (tiles * H)
    first_key = own * BLOCK_N
    at = first_key + tl.arange(0, BLOCK_N)
    place = Place(b, h, h // sizes.group, first_key, at)
    if of.visible.lists is None:
        visits = tiles_that_see(of.visible, b, first_key, T, S, BLOCK_N, TILE.block_m)
    else:
        visits = listed_tiles(of.visible, b, h, own, T)
    scale_log2 = tl.maximum(scale_log2_of(sizes.scale, of.terms), SMALLEST)
    k, content, chunks = None, None, None
    if of.mixing is None:
        k = load_tile(of.key, b, place.hk, first_key, at < S, TILE.d, BLOCK_N, TILE.block_d)
    else:
        chunks = active_chunks(of.mixing, h, TILE)
    if of.content_bias is not None:
        content = load_content_bias(of.content_bias, b, h, at, S)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for number in range(visits.full_start, visits.full_end):
        tile = full_tile(of.visible, b, h, own, number)
        total += _received_tile(
            of, shares, k, content, chunks, tile, place, sizes, scale_log2, False, TILE
        )
    for number in tl.range(0, partial_count(visits), num_stages=1):
        tile = partial_tile(of.visible, b, h, own, number, visits)
        total += _received_tile(
            of, shares, k, content, chunks, tile, place, sizes, scale_log2, True, TILE
        )
    tl.store(received + (b * H + h).to(tl.int64) * S + at, total, mask=at < S)


def statistics(call: Call, results: Buffers) -> None:
    """Fill `results`."""
    (B, H, T, S), width, mixes = call.sizes, call.query.shape[-1], call.mixing is not None
    scale, query, content_bias = with_positive_scale(call.scale, call.query, call.content_bias)
    name = "attention_statistics.collaborative" if mixes else "attention_statistics.gated"
    tiles = tiles_for(name, query, width, 0, has_terms(call))
    terms = terms_of(call)
    bytes_, stride = bytes_of(call.exclude_keys)
    visible = visible_of(call.intervals)
    of = ScoreOperands(
        rows_of(query), rows_of(call.key), None if call.mixing is None else mixing_of(call.mixing),
        content_bias_of(content_bias), terms, visible_to_tiles(call, terms, visible, tiles),
        None if bytes_ is None else Excluded(bytes_, stride),
    )  # fmt: skip
    sizes = Sizes(H, T, S, 1 if mixes else H // max(call.key.shape[1], 1), scale)
    shares = None if call.row_weights is None else _shares_of(call, call.row_weights)
    launch(
        _collaborative_kernel if mixes else _gated_kernel, B * H * -(-T // tiles.block_m), query, tiles,
        of, Written(*results[:-1], shares), sizes, TILE=tile_constants(tiles, width, 0, mixes=mixes),
    )  # fmt: skip
    if shares is None or not results.received.numel():
        return
    # The keys of a program stay on chip as the rows do in the pass by rows, and rows come as keys do.
    tiles = replace(tiles, block_m=tiles.block_n, block_n=tiles.block_m)
    launch(
        _received_kernel, B * H * -(-S // tiles.block_n), query, tiles,
        of._replace(visible=visible_to_tiles(call, terms, visible, tiles, by_keys=True)), shares,
        results.received, sizes, TILE=tile_constants(tiles, width, 0, mixes=mixes),
    )  # fmt: skip


def _shares_of(call: Call, weights: Tensor) -> Shares:
    row_max, share = weights.new_empty((2, *call.sizes[:3])).unbind()
    return Shares(row_max, share, weights, *strides_of(weights))


@triton.jit
def nothing_seen(BLOCK_M: tl.constexpr):
    """Rows that have seen no key."""
    nothing = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    zeros = tl.zeros((BLOCK_M,), tl.float32)
    return RowStatistics(nothing, zeros, zeros, nothing, tl.full((BLOCK_M,), 2147483647, tl.int32))


@triton.jit
def see_tile(seen, scores, excluded, b, keys, S, scale_log2, terms):
    """The rows after `scores` [BLOCK_M, BLOCK_N], hidden ones -inf, of `keys` [BLOCK_N]."""
    old_max, old_sum = seen.row_max, seen.row_sum
    p, row_max, row_sum, alpha = online_softmax(scores, old_max, old_sum, scale_log2, terms)
    below = tl.where(old_sum > 0.0, (old_max - row_max) * scale_log2, 0.0)
    depth = tl.where(p > 0.0, (scores - row_max[:, None]) * scale_log2, 0.0)
    # Where alpha is 0, below may be -inf.
    spread = tl.where(alpha == 0.0, 0.0, alpha * (seen.spread + old_sum * below))
    spread = spread + tl.sum(p * depth, 1)
    if excluded is not None:
        at = excluded.ptr + b.to(tl.int64) * excluded.stride_b + keys
        scores = tl.where(
            (tl.load(at, mask=keys < S, other=1) != 0)[None, :], float("-inf"), scores
        )
    best = tl.max(scores, 1)
    here = tl.min(tl.where(scores == best[:, None], keys[None, :], 2147483647), 1)
    # Tiles do not come in the order of their keys: among equals the smaller key counts.
    better = (best > seen.best) | ((best == seen.best) & (here < seen.where))
    where = tl.where(better, here, seen.where)
    return RowStatistics(row_max, row_sum, spread, tl.maximum(seen.best, best), where)


@triton.jit
def store_rows(seen, terms, place, written, sizes, scale_log2):
    """Write the statistics of the rows of `place`."""
    at = (place.b * sizes.H + place.h).to(tl.int64) * sizes.T + place.at  # [BLOCK_M]
    there = place.at < sizes.T
    row_max, row_sum, best = seen.row_max, seen.row_sum, seen.best
    sees = row_sum != 0.0
    counts = sees & (best > float("-inf"))
    share = 1.0 / tl.where(sees, row_sum, 1.0)
    largest = tl.exp2(tl.where(counts, (best - row_max) * scale_log2, 0.0)) * share
    row_lse = log_sum_exp(row_max, row_sum, scale_log2, terms)
    spent = tl.log(tl.where(sees, row_sum, 1.0)) - seen.spread * share * LN2
    if terms.sinks is not None:
        # Probabilities p = w * q, of which q are those without the sink: -sum p ln p = w * (-sum q ln q - ln w).
        with_sink, of_keys = add_sink(row_lse, terms, place.h)
        largest = largest * of_keys
        share = share * of_keys
        spent = tl.where(of_keys == 0.0, 0.0, of_keys * (spent - (row_lse - with_sink)))
        row_lse = with_sink
    tl.store(written.lse + at, row_lse, mask=there)
    largest = tl.where(row_sum == row_sum, tl.where(counts, largest, 0.0), row_sum)
    score = natural(tl.where(counts, best, 0.0), sizes.scale, terms)
    score = tl.where(row_sum == row_sum, tl.where(counts, score, float("-inf")), row_sum)
    tl.store(written.max_score + at, score, mask=there)
    tl.store(written.max_prob + at, largest, mask=there)
    tl.store(written.argmax + at, tl.where(counts, seen.where, -1).to(tl.int64), mask=there)
    tl.store(written.entropy + at, tl.where(sees, spent, 0.0), mask=there)
    if written.shares is not None:
        shares = written.shares
        of_row = shares.weights + place.b.to(tl.int64) * shares.stride_b
        of_row += place.h.to(tl.int64) * shares.stride_h + place.at.to(tl.int64) * shares.stride_t
        weight = tl.load(of_row, mask=there, other=0.0)
        share = tl.where(sees & (weight != 0.0), share * weight, 0.0)
        tl.store(shares.row_max + at, tl.where(sees, row_max, 0.0), mask=there)
        tl.store(shares.share + at, share, mask=there)
