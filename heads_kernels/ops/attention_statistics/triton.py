"""Attention statistics on the `triton` backend, of the scores of either operator.

A tile of query rows goes over every tile of keys that it sees; what is kept of a row is a few sums.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.ops.attention_statistics import AttentionStatistics
from heads_kernels.ops.operator import Call
from heads_kernels.ops.triton.chunks import active_chunks, chunk_at, load_content_bias, mixed
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import load_columns, load_tile
from heads_kernels.ops.triton.operands import (
    bytes_of,
    content_bias_of,
    has_terms,
    mixing_of,
    rows_of,
    terms_of,
    visible_of,
    with_positive_scale,
)
from heads_kernels.ops.triton.scores import add_sink, finish, load_bias, scale_log2_of
from heads_kernels.ops.triton.softmax import LN2, SMALLEST, log_sum_exp, online_softmax, product
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import chunks_of, padded, tiles_for
from heads_kernels.ops.triton.visible import (
    full_tile,
    pairs_visible,
    partial_tile,
    ranges,
    tiles_seen,
)


def forward(call: Call, excluded: Tensor | None, results: AttentionStatistics) -> None:
    """Fill `results`."""
    (_gated if call.mixing is None else _collaborative)(call, excluded, results)


@triton.jit
def _gated_kernel(
    query, key, terms, visible, excluded, stride_excluded, lse, max_prob, argmax, entropy, H, T, S, GROUP, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program reads every key that BLOCK_M rows of a head see and keeps five numbers a row on chip."""
    tiles = tl.cdiv(T, BLOCK_M)
    pair = tl.program_id(0) // tiles
    b, h = pair // H, pair % H
    hk = h // GROUP
    first_row = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    lo, hi = ranges(visible, b, rows, T, S)  # [BLOCK_M]
    own = first_row // BLOCK_M
    start, full_start, full_end, end = tiles_seen(visible, b, h, own, lo, hi, rows, T, BLOCK_N)
    q = load_tile(query, b, h, first_row, rows < T, D, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    scale_log2 = tl.maximum(scale_log2_of(scale, terms), SMALLEST)
    kept = fresh_rows(BLOCK_M)
    zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for place in range(full_start, full_end):
        first = full_tile(visible, b, h, own, place) * BLOCK_N
        k = load_tile(key, b, hk, first, None, D, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        keys = first + tl.arange(0, BLOCK_N)
        bias = load_bias(terms, b, h, rows[:, None], keys[None, :], T, S)
        scores, _ = finish(product(q, tl.trans(k), zeros), bias, terms, scale)
        kept = see_tile(kept, scores, excluded, stride_excluded, b, keys, S, scale_log2, terms)
    for index in tl.range(0, full_start - start + end - full_end, num_stages=1):
        first = partial_tile(visible, b, h, own, index, start, full_start, full_end) * BLOCK_N
        keys = first + tl.arange(0, BLOCK_N)
        k = load_tile(key, b, hk, first, keys < S, D, BLOCK_N, BLOCK_D)
        bias = load_bias(terms, b, h, rows[:, None], keys[None, :], T, S)
        scores, _ = finish(product(q, tl.trans(k), zeros), bias, terms, scale)
        seen = pairs_visible(
            visible, terms, b, h, lo[:, None], hi[:, None], rows[:, None], keys[None, :], T, S, bias
        )
        scores = tl.where(seen, scores, float("-inf"))
        kept = see_tile(kept, scores, excluded, stride_excluded, b, keys, S, scale_log2, terms)
    at = pair.to(tl.int64) * T + rows
    store_rows(kept, terms, h, lse, max_prob, argmax, entropy, at, rows < T, scale_log2)


def _gated(call: Call, excluded: Tensor | None, statistics: AttentionStatistics) -> None:
    """Fill `statistics`."""
    query, key = call.query, call.key
    (B, H, T, D), (_, Hk, S, _) = query.shape, key.shape
    scale, query = with_positive_scale(call.scale, query)
    tiles = tiles_for("attention_statistics.gated", query, D, 0, has_terms(call))
    terms = terms_of(call)
    visible = visible_to_tiles(call, terms, visible_of(call.intervals), tiles)
    launch(
        _gated_kernel, B * H * -(-T // tiles.block_m), query, tiles,
        rows_of(query), rows_of(key), terms, visible, *bytes_of(excluded), *statistics,
        H, T, S, H // max(Hk, 1), scale,
        D=D, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=padded(D),
    )  # fmt: skip


@triton.jit
def _step(
    query, key, mixing, content_bias, terms, visible, excluded, stride_excluded, kept, scores, lo, hi, first_row,
    tile, place, count, numbers, b, h, T, S, scale, scale_log2,
    PARTIAL: tl.constexpr, DS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One chunk of one tile of keys; with the last chunk the rows see the tile."""
    column = chunk_at(numbers, place) * BLOCK_D
    first_key = tile * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_M)
    keys = first_key + tl.arange(0, BLOCK_N)
    q = load_columns(
        query, b, first_row, rows < T, column, DS, BLOCK_M, BLOCK_D
    )  # [BLOCK_M, BLOCK_D]
    k = load_columns(
        key, b, first_key, keys < S, column, DS, BLOCK_N, BLOCK_D
    )  # [BLOCK_N, BLOCK_D]
    scores = product(
        mixed(q, mixing, h, column + tl.arange(0, BLOCK_D), column + tl.arange(0, BLOCK_D) < DS),
        tl.trans(k),
        scores,
    )  # [BLOCK_M, BLOCK_N]
    if place == count - 1:
        if content_bias is not None:
            scores += load_content_bias(content_bias, b, h, keys, S)[None, :]
        bias = load_bias(terms, b, h, rows[:, None], keys[None, :], T, S)
        scores, _ = finish(scores, bias, terms, scale)
        if PARTIAL:
            seen = pairs_visible(
                visible, terms, b, h, lo[:, None], hi[:, None], rows[:, None], keys[None, :], T, S, bias,
            )  # fmt: skip
            scores = tl.where(seen, scores, float("-inf"))
        kept = see_tile(kept, scores, excluded, stride_excluded, b, keys, S, scale_log2, terms)
        scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    return kept, scores


@triton.jit
def _collaborative_kernel(
    query, key, mixing, content_bias, terms, visible, excluded, stride_excluded, lse, max_prob, argmax, entropy,
    H, T, S, scale,
    DS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A program reads every key that BLOCK_M rows of a head see and keeps five numbers a row on chip."""
    tiles = tl.cdiv(T, BLOCK_M)
    h = tl.program_id(0) % H
    b = tl.program_id(0) // (H * tiles)
    first_row = (tiles - 1 - tl.program_id(0) // H % tiles) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    lo, hi = ranges(visible, b, rows, T, S)  # [BLOCK_M]
    own = first_row // BLOCK_M
    start, full_start, full_end, end = tiles_seen(visible, b, h, own, lo, hi, rows, T, BLOCK_N)
    count, numbers = active_chunks(mixing, h, DS, BLOCK_D, CHUNKS)
    scale_log2 = tl.maximum(scale_log2_of(scale, terms), SMALLEST)
    kept = fresh_rows(BLOCK_M)
    scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range((full_end - full_start) * count):
        kept, scores = _step(
            query, key, mixing, content_bias, terms, visible, excluded, stride_excluded, kept, scores, lo, hi,
            first_row, full_tile(visible, b, h, own, full_start + step // count), step % count,
            count, numbers, b, h, T, S, scale, scale_log2, False, DS, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    for step in tl.range(0, (full_start - start + end - full_end) * count, num_stages=1):
        kept, scores = _step(
            query, key, mixing, content_bias, terms, visible, excluded, stride_excluded, kept, scores, lo, hi,
            first_row, partial_tile(visible, b, h, own, step // count, start, full_start, full_end), step % count,
            count, numbers, b, h, T, S, scale, scale_log2, True, DS, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    at = (b * H + h).to(tl.int64) * T + rows
    store_rows(kept, terms, h, lse, max_prob, argmax, entropy, at, rows < T, scale_log2)


def _collaborative(call: Call, excluded: Tensor | None, statistics: AttentionStatistics) -> None:
    """Fill `statistics`."""
    query, key = call.query, call.key
    mixing, (B, H, T, S), Ds = call.mixing, call.scores, query.shape[-1]
    scale, query, content_bias = with_positive_scale(call.scale, query, call.content_bias)
    tiles = tiles_for("attention_statistics.collaborative", query, Ds, 0, has_terms(call))
    terms = terms_of(call)
    visible = visible_to_tiles(call, terms, visible_of(call.intervals), tiles)
    launch(
        _collaborative_kernel, B * H * -(-T // tiles.block_m), query, tiles,
        rows_of(query), rows_of(key), mixing_of(mixing), content_bias_of(content_bias), terms, visible,
        *bytes_of(excluded), *statistics, H, T, S, scale,
        DS=Ds, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=tiles.block_d,
        CHUNKS=chunks_of(Ds, tiles.block_d),
    )  # fmt: skip


@triton.jit
def fresh_rows(BLOCK_M: tl.constexpr):
    """`row_max`, `row_sum`, `spread`, `best`, `where` of rows that have seen no key, [BLOCK_M] each.

    row_sum is the sum of `p = 2**(scale_log2 * (score - row_max))`, spread that of `p * scale_log2 * (score -
    row_max)`; best is the largest score of a key that is not excluded, where the first key that has it.
    """
    nothing = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    zeros = tl.zeros((BLOCK_M,), tl.float32)
    return nothing, zeros, zeros, nothing, tl.full((BLOCK_M,), 2147483647, tl.int32)


@triton.jit
def see_tile(rows, scores, excluded, stride_excluded, b, keys, S, scale_log2, terms):
    """The rows after `scores` [BLOCK_M, BLOCK_N], hidden ones -inf, of `keys` [BLOCK_N]."""
    row_max, row_sum, spread, best, where = rows
    old_max, old_sum = row_max, row_sum
    p, row_max, row_sum, alpha = online_softmax(scores, row_max, row_sum, scale_log2, terms)
    below = tl.where(old_sum > 0.0, (old_max - row_max) * scale_log2, 0.0)
    depth = tl.where(p > 0.0, (scores - row_max[:, None]) * scale_log2, 0.0)
    # Where alpha is 0, below may be -inf.
    spread = tl.where(alpha == 0.0, 0.0, alpha * (spread + old_sum * below)) + tl.sum(p * depth, 1)
    if excluded is not None:
        at = excluded + b.to(tl.int64) * stride_excluded + keys
        scores = tl.where(
            (tl.load(at, mask=keys < S, other=1) != 0)[None, :], float("-inf"), scores
        )
    tile_best = tl.max(scores, 1)
    here = tl.min(tl.where(scores == tile_best[:, None], keys[None, :], 2147483647), 1)
    # Tiles do not come in the order of their keys: among equals the smaller key counts.
    better = (tile_best > best) | ((tile_best == best) & (here < where))
    return row_max, row_sum, spread, tl.maximum(best, tile_best), tl.where(better, here, where)


@triton.jit
def store_rows(rows, terms, h, lse, max_prob, argmax, entropy, at, there, scale_log2):
    """Write the four statistics of rows at element `at` [BLOCK_M]."""
    row_max, row_sum, spread, best, where = rows
    sees = row_sum != 0.0
    counts = sees & (best > float("-inf"))
    share = 1.0 / tl.where(sees, row_sum, 1.0)
    largest = tl.exp2(tl.where(counts, (best - row_max) * scale_log2, 0.0)) * share
    row_lse = log_sum_exp(row_max, row_sum, scale_log2, terms)
    spent = tl.log(tl.where(sees, row_sum, 1.0)) - spread * share * LN2
    if terms.sinks is not None:
        # Probabilities p = w * q, of which q are those without the sink: -sum p ln p = w * (-sum q ln q - ln w).
        with_sink, of_keys = add_sink(row_lse, terms, h)
        largest = largest * of_keys
        spent = tl.where(of_keys == 0.0, 0.0, of_keys * (spent - (row_lse - with_sink)))
        row_lse = with_sink
    tl.store(lse + at, row_lse, mask=there)
    tl.store(
        max_prob + at,
        tl.where(row_sum == row_sum, tl.where(counts, largest, 0.0), row_sum),
        mask=there,
    )
    tl.store(argmax + at, tl.where(counts, where, -1).to(tl.int64), mask=there)
    tl.store(entropy + at, tl.where(sees, spent, 0.0), mask=there)
