"""Attention statistics on the `triton` backend, for the scores of both operators.

A tile of query rows visits every tile of keys that it sees and accumulates a few numbers per row. What keys receive is
summed in a second pass, over the tiles of rows that see a tile of keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.call import Call
from heads_kernels.ops.statistics import AttentionStatistics
from heads_kernels.ops.triton.attend import accumulate
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.operands import Place, operands_of, sizes_of, strides_of, with_positive_scale
from heads_kernels.ops.triton.score_tiles import (
    Features,
    KeyTiles,
    OwnKeys,
    active_chunks,
    load_content_bias,
    load_key,
    place_of_rows,
    scores_of_rows,
)
from heads_kernels.ops.triton.scores import LN2, add_sink, log_sum_exp, natural, softmax_scale, weights_over
from heads_kernels.ops.triton.tiles import tile_constants, tiles_of_pass
from heads_kernels.ops.triton.visible import full_tile, partial_count, partial_tile, tiles_seeing, with_tile_lists


class Shares(NamedTuple):
    """Results of the pass by rows for the pass by keys: `row_max` and `share`, `[B, H, T]` contiguous.

    The weight of a row times a probability is `2**(scale_log2 * (score - row_max)) * share`; a share of 0 leaves the
    row out. `weights` are the row weights of the call; their strides are 0 where they broadcast.
    """

    row_max: Tensor
    share: Tensor
    weights: Tensor
    stride_b: int
    stride_h: int
    stride_t: int


@triton.jit
def _statistics_kernel(of, results, shares, sizes, TILE: tl.constexpr):
    """A program reads every key that BLOCK_M rows of a head see; five numbers per row stay on chip.

    `shares` is None if `received` is not requested.
    """
    place = place_of_rows(of, sizes, TILE)
    seen = accumulate(of, KeyTiles(), place, None, None, sizes, TILE)
    terms = of.terms
    scale_log2 = softmax_scale(sizes.scale, terms)
    at = (place.b * sizes.H + place.h).to(tl.int64) * sizes.T + place.at  # [BLOCK_M]
    there = place.at < sizes.T
    row_max, row_sum, best = seen.row_max, seen.row_sum, seen.best
    sees = row_sum != 0.0
    counts = sees & (best > float("-inf"))
    share = 1.0 / tl.where(sees, row_sum, 1.0)
    largest = weights_over(tl.where(counts, best, 0.0), tl.where(counts, row_max, 0.0), scale_log2, terms) * share
    row_lse = log_sum_exp(row_max, row_sum, scale_log2, terms)
    spent = tl.log(tl.where(sees, row_sum, 1.0)) - seen.spread * share * LN2
    if terms.sinks is not None:
        # Probabilities p = w * q, of which q are those without the sink: -sum p ln p = w * (-sum q ln q - ln w).
        with_sink, of_keys = add_sink(row_lse, terms, place.h)
        largest = largest * of_keys
        share = share * of_keys
        spent = tl.where(of_keys == 0.0, 0.0, of_keys * (spent - (row_lse - with_sink)))
        row_lse = with_sink
    tl.store(results.lse + at, row_lse, mask=there)
    largest = tl.where(row_sum == row_sum, tl.where(counts, largest, 0.0), row_sum)
    score = natural(tl.where(counts, best, 0.0), sizes.scale, terms)
    score = tl.where(row_sum == row_sum, tl.where(counts, score, float("-inf")), row_sum)
    tl.store(results.max_score + at, score, mask=there)
    tl.store(results.max_prob + at, largest, mask=there)
    tl.store(results.argmax + at, tl.where(counts, seen.where, -1).to(tl.int64), mask=there)
    tl.store(results.entropy + at, tl.where(sees, spent, 0.0), mask=there)
    if shares is not None:
        of_row = shares.weights + place.b.to(tl.int64) * shares.stride_b
        of_row += place.h.to(tl.int64) * shares.stride_h + place.at.to(tl.int64) * shares.stride_t
        weight = tl.load(of_row, mask=there, other=0.0)
        share = tl.where(sees & (weight != 0.0), share * weight, 0.0)
        tl.store(shares.row_max + at, tl.where(sees, row_max, 0.0), mask=there)
        tl.store(shares.share + at, share, mask=there)


@triton.jit
def _received_tile(of, shares, keys, tile, sizes, PARTIAL: tl.constexpr, TILE: tl.constexpr):
    """What BLOCK_N keys receive from one tile of query rows, [BLOCK_N]; scores are transposed, [BLOCK_N, BLOCK_M]."""
    place = keys.place
    first_row = tile * TILE.block_m
    rows = first_row + tl.arange(0, TILE.block_m)
    there = rows < sizes.T
    at = (place.b * sizes.H + place.h).to(tl.int64) * sizes.T + rows
    row_max = tl.load(shares.row_max + at, mask=there, other=0.0)[None, :]
    share = tl.load(shares.share + at, mask=there, other=0.0)[None, :]
    row_tile = scores_of_rows(of, None, keys, first_row, there, sizes, PARTIAL, TILE)
    scale_log2 = softmax_scale(sizes.scale, of.terms)
    p = weights_over(row_tile.scores, row_max, scale_log2, of.terms)
    p = tl.where(share == 0.0, 0.0, p * share)
    if PARTIAL:
        p = tl.where(row_tile.seen, p, 0.0)
    return tl.sum(p, 1)


@triton.jit
def _received_kernel(of, shares, received, sizes, TILE: tl.constexpr):
    """A program owns BLOCK_N keys of a head and sums over the tiles of rows that see them, in a fixed order."""
    BLOCK_N: tl.constexpr = TILE.block_n
    H, S = sizes.H, sizes.S
    tiles = tl.cdiv(S, BLOCK_N)
    own = tl.program_id(0) % tiles
    h = tl.program_id(0) // tiles % H
    b = tl.program_id(0) // (tiles * H)
    first_key = own * BLOCK_N
    at = first_key + tl.arange(0, BLOCK_N)
    place = Place(b, h, h // sizes.group, first_key, at)
    visits = tiles_seeing(of.visible, place, sizes, TILE)
    k, content, chunks = None, None, None
    if of.mixing is not None:
        chunks = active_chunks(of.mixing, h, TILE)
    features = Features(chunks=chunks, scored=chunks)
    if of.mixing is None:
        k = load_key(of, None, features, b, place.hk, first_key, at < S, BLOCK_N, TILE)
    if of.content_bias is not None:
        content = load_content_bias(of.content_bias, b, h, at, S)
    keys = OwnKeys(place, k, None, content, features)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for number in range(visits.full_start, visits.full_end):
        tile = full_tile(of.visible, b, h, own, number)
        total += _received_tile(of, shares, keys, tile, sizes, False, TILE)
    for number in tl.range(0, partial_count(visits), num_stages=1):
        tile = partial_tile(of.visible, b, h, own, number, visits)
        total += _received_tile(of, shares, keys, tile, sizes, True, TILE)
    tl.store(received + (b * H + h).to(tl.int64) * S + at, total, mask=at < S)


def statistics_passes(call: Call, results: AttentionStatistics) -> None:
    """Fill `results`."""
    call = with_positive_scale(call)
    B, H, T, S = call.sizes
    tiles = tiles_of_pass(call, "gated" if call.mixing is None else "collaborative")
    of, sizes = operands_of(call), sizes_of(call)
    shares, weights = None, call.row_weights
    if weights is not None:
        row_max, share = weights.new_empty((2, B, H, T)).unbind()
        shares = Shares(row_max, share, weights, *strides_of(weights))
    launch(
        _statistics_kernel, B * H * -(-T // tiles.block_m), call.query, tiles,
        with_tile_lists(call, of, tiles), results, shares, sizes,
        TILE=tile_constants(call, tiles),
    )  # fmt: skip
    if shares is None:
        return
    # Keys stay on chip here, as rows do in the pass by rows, so the two sizes are exchanged.
    tiles = replace(tiles, block_m=tiles.block_n, block_n=tiles.block_m)
    launch(
        _received_kernel, B * H * -(-S // tiles.block_n), call.query, tiles,
        with_tile_lists(call, of, tiles, by_keys=True), shares,
        results.received, sizes, TILE=tile_constants(call, tiles),
    )  # fmt: skip
