"""Entmax attention forward in Triton: a tile of query rows of a head against every key that it sees.

The threshold of a row is known only after all its scores, which do not fit on chip: they are recomputed in each pass
over the keys. A pass finds the largest score, about four search the threshold (Newton's method, as in
`heads_kernels.ops.entmax`), and one adds up the values. The threshold only increases, so a tile of keys below it in all
rows is out of reach for good: each program keeps a list of the tiles in reach and shortens it in every pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from heads_kernels.ops.triton.entmax import above_threshold, load_order, log1p, powers
from heads_kernels.ops.triton.load import load_tile
from heads_kernels.ops.triton.operands import Pairs
from heads_kernels.ops.triton.scores import finish, load_bias, natural
from heads_kernels.ops.triton.softmax import LOG2E, finite_part, kept, poison, product
from heads_kernels.ops.triton.visible import (
    pairs_visible,
    ranges,
    tile_at,
    tile_count,
    tiles_in_ranges,
)

#: About 4 are taken.
_MOST_STEPS: tl.constexpr = tl.constexpr(32)
#: 2 epsilon of float32.
_LEAST_STEP: tl.constexpr = tl.constexpr(2.0**-22)


@triton.jit
def masked_scores(of, q, lo, hi, first, place, sizes, TILE: tl.constexpr):
    """Scores [BLOCK_M, BLOCK_N] of keys `first` and on, -inf where they are hidden; `lo`, `hi` of rows [BLOCK_M]."""
    BLOCK_N: tl.constexpr = TILE.block_n
    keys = first + tl.arange(0, BLOCK_N)
    k = load_tile(
        of.key, place.b, place.hk, first, keys < sizes.S, TILE.d, BLOCK_N, TILE.block_d
    )  # [BLOCK_N, BLOCK_D]
    pairs = Pairs(place.b, place.h, place.at[:, None], keys[None, :])
    bias = load_bias(of.terms, pairs, sizes.T, sizes.S)
    raw = product(q, tl.trans(k), tl.zeros((TILE.block_m, BLOCK_N), tl.float32))
    scores, _ = finish(raw, bias, of.terms, sizes.scale)
    seen = pairs_visible(
        of.visible, of.terms, pairs, lo[:, None], hi[:, None], sizes.T, sizes.S, bias
    )
    return tl.where(seen, natural(scores, sizes.scale, of.terms), float("-inf"))


@triton.jit
def _newton(total, slopes, threshold, order):
    """The threshold after a step for `total ^ order = 1`, and whether rounding let one move.

    `total` and `slopes` are the sums of probabilities and of their slopes. The left side is a norm of what exceeds the
    threshold, so it is convex and falls, and thresholds only increase.
    """
    z = order * log1p(total - 1.0)
    series = tl.full(z.shape, 1.0, tl.float32)  # (1 - exp(-z)) / z
    for i in tl.static_range(6, 1, -1):
        series = 1.0 - z * series / i
    excess = tl.where(z < 0.25, z * series, 1.0 - tl.exp2(z * -LOG2E))
    sees = slopes != 0.0
    by = tl.where(sees, total * excess / tl.where(sees, slopes, 1.0) / order, 0.0)
    moved = by > tl.maximum(tl.abs(threshold), 1.0) * _LEAST_STEP
    return tl.where(sees, threshold + by, threshold), tl.max(moved.to(tl.int32)) != 0


@triton.jit
def attend_sparse(of, place, sizes, TILE: tl.constexpr):
    """`attended` [BLOCK_M, BLOCK_DV], the largest score, how far the threshold is above it and whether they see
    anything, of the rows of a head.

    Rows that see nothing have 0, -inf and 0. With T 0 (a closed head) no row and no key is read.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    b, h, rows, T, S = place.b, place.h, place.at, sizes.T, sizes.S
    lo, hi = ranges(of.visible, b, h, rows, T, S)  # [BLOCK_M]
    visits = tiles_in_ranges(of.visible, b, h, lo, hi, rows, T, BLOCK_N)
    in_reach = of.in_reach + tl.program_id(0).to(tl.int64) * tl.cdiv(S, BLOCK_N)
    order = load_order(of.terms, h)
    q = load_tile(
        of.query, b, h, place.first, rows < T, TILE.d, BLOCK_M, TILE.block_d
    )  # [BLOCK_M, BLOCK_D]
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # the largest score so far
    count = tile_count(visits)
    for number in range(count):
        tile = tile_at(visits, number)
        scores = masked_scores(of, q, lo, hi, tile * BLOCK_N, place, sizes, TILE)
        top = tl.maximum(top, tl.max(scores, 1))
        tl.store(in_reach + number, tile)
    # Nothing exceeds +inf; a row of nan alone, whose maximum may be -inf, stays nan.
    top = tl.where(top == float("-inf"), float("inf"), top)
    above = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    moving = count > 0
    step = 0
    while moving & (step < _MOST_STEPS):
        tl.debug_barrier()  # another thread of the program may have stored what this one reads
        total = tl.zeros((BLOCK_M,), tl.float32)
        slopes = tl.zeros((BLOCK_M,), tl.float32)
        left = 0
        for number in range(count):
            tile = tl.load(in_reach + number)
            scores = masked_scores(of, q, lo, hi, tile * BLOCK_N, place, sizes, TILE)
            y = above_threshold(scores, top[:, None], above[:, None], order)
            p, slope = powers(y, order)
            total += tl.sum(p, 1)
            slopes += tl.sum(slope, 1)
            # The maximum waits for all threads: what is stored has been read before.
            near = tl.max(tl.where(y == -1.0, 0, 1)) != 0
            tl.store(in_reach + left, tile, mask=near)
            left += near.to(tl.int32)
        count = left
        above, moving = _newton(total, slopes, above, order)
        step += 1
    sees = total != 0.0
    tl.debug_barrier()
    acc = tl.zeros((BLOCK_M, TILE.block_dv), tl.float32)
    for number in range(count):
        first = tl.load(in_reach + number) * BLOCK_N
        scores = masked_scores(of, q, lo, hi, first, place, sizes, TILE)
        p, slope = powers(above_threshold(scores, top[:, None], above[:, None], order), order)
        if of.dropout is not None:
            p = p * kept(of.dropout, b, h, rows, first, BLOCK_N).to(tl.float32)
        there = first + tl.arange(0, BLOCK_N) < S
        v = load_tile(
            of.value, b, place.hk, first, there, TILE.dv, BLOCK_N, TILE.block_dv
        )  # [BLOCK_N, BLOCK_DV]
        p = tl.where(p == 0.0, 0.0, p + poison(v)[None, :])
        acc = product(p.to(v.dtype), finite_part(v), acc)
    if of.dropout is not None:
        acc = acc * of.dropout.scale
    return acc, tl.where(sees, top, float("-inf")), above, sees
