"""Entmax attention: its forward pass, and the first pass of its backward pass, before those over keys and queries.

The threshold of a row depends on all its scores, which do not fit on chip, so they are recomputed in each pass over the
keys. One pass finds the largest score, about four find the threshold (Newton's method, as in
`heads_kernels.ops.entmax`), and one adds up the values. The threshold only increases, so a tile of keys that is below
it in all rows stays below: each program has a list of the tiles in reach and shortens it in every pass.

Backward:

    dscores = slope * (dp - center)        center = sum(slope * dp) / sum(slope)

With softmax, p is the slope, and the center is delta, which is already known. The derivative of p by alpha is that of
`heads_kernels.ops.entmax.alpha_derivative`: with x = -order ln p, first = (e^x - 1) / order and second =
(e^x - 1 - x) / order^2,

    p (sum(p second) - second - ln p sum(p first) - first entropy) / (1 + order sum(p first))
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.call import Call
from heads_kernels.ops.triton.gate import head_gate, open_rows
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import load_values
from heads_kernels.ops.triton.operands import Support, sizes_of
from heads_kernels.ops.triton.rows import FirstPass, along, load_row_terms
from heads_kernels.ops.triton.score_tiles import (
    Features,
    KeyTiles,
    QueryRows,
    load_query,
    place_of_rows,
    scores_of_keys,
)
from heads_kernels.ops.triton.scores import (
    LOG2E,
    above_threshold,
    dropped,
    finite_part,
    kept,
    load_order,
    log1p,
    natural,
    poison,
    powers,
    product,
)
from heads_kernels.ops.triton.tiles import tile_constants, tiles_for
from heads_kernels.ops.triton.visible import ranges, tile_at, tile_count, tiles_in_ranges

#: A limit; about 4 steps are usual.
_MOST_STEPS: tl.constexpr = tl.constexpr(32)
#: 2 epsilon of float32.
_LEAST_STEP: tl.constexpr = tl.constexpr(2.0**-22)


@triton.jit
def _masked_scores(of, query, first, sizes, TILE: tl.constexpr):
    """Scores [BLOCK_M, BLOCK_N] of the keys from `first` on, hidden ones -inf, and the values of the keys."""
    tile = scores_of_keys(of, KeyTiles(), query, first, sizes, True, TILE.block_n, TILE)
    scores = natural(tile.scores, sizes.scale, of.terms)
    return tl.where(tile.seen, scores, float("-inf")), tile.weighed


@triton.jit
def _newton(total, slopes, threshold, order):
    """The thresholds after a step of Newton's method for `total ^ order = 1`, and whether any of them changed.

    `total` and `slopes` are the sums of probabilities and of their slopes. The left side is a norm of the excess over
    the threshold, so it is convex and decreasing, and thresholds only increase.
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
    """`attended` [BLOCK_M, BLOCK_DV] of the rows of a head, their largest score, the distance of the threshold above
    it, and whether they see any key.

    Rows that see no key have 0, -inf and 0. With T 0 (a closed head) no row and no key is read.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    b, h, rows, T, S = place.b, place.h, place.at, sizes.T, sizes.S
    lo, hi = ranges(of.visible, b, h, rows, T, S)  # [BLOCK_M]
    visits = tiles_in_ranges(of.visible, b, h, lo, hi, rows, T, BLOCK_N)
    in_reach = of.in_reach + tl.program_id(0).to(tl.int64) * tl.cdiv(S, BLOCK_N)
    order = load_order(of.terms, h)
    q = load_query(of, Features(), b, h, place.first, rows < T, BLOCK_M, TILE)
    query = QueryRows(place, q, Features(), lo, hi)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # the largest score so far
    count = tile_count(visits)
    for number in range(count):
        tile = tile_at(visits, number)
        scores, _ = _masked_scores(of, query, tile * BLOCK_N, sizes, TILE)
        top = tl.maximum(top, tl.max(scores, 1))
        tl.store(in_reach + number, tile)
    # No score exceeds +inf, and a row of only nan, whose maximum may be -inf, stays nan.
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
            scores, _ = _masked_scores(of, query, tile * BLOCK_N, sizes, TILE)
            y = above_threshold(scores, top[:, None], above[:, None], order)
            p, slope = powers(y, order)
            total += tl.sum(p, 1)
            slopes += tl.sum(slope, 1)
            # The maximum synchronises all threads: they have read the list before it is overwritten.
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
        scores, v = _masked_scores(of, query, first, sizes, TILE)
        p, slope = powers(above_threshold(scores, top[:, None], above[:, None], order), order)
        if of.dropout is not None:
            p = p * kept(of.dropout, b, h, rows, first, BLOCK_N).to(tl.float32)
        p = tl.where(p == 0.0, 0.0, p + poison(v)[None, :])
        acc = product(p.to(v.dtype), finite_part(v), acc)
    if of.dropout is not None:
        acc = acc * of.dropout.scale
    return acc, tl.where(sees, top, float("-inf")), above, sees


@triton.jit
def _centers_kernel(of, reads, centers, dalpha, support, sizes, TILE: tl.constexpr):
    """A program writes the centers of BLOCK_M rows of a head, their part of dalpha, and which tiles of keys have a
    probability above 0."""
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    T, S = sizes.T, sizes.S
    tiles = tl.cdiv(T, BLOCK_M)
    place = place_of_rows(of, sizes, TILE)
    b, h, first_row, rows = place.b, place.h, place.first, place.at
    taking_part = open_rows(reads.gate, b, h, T, TILE)
    lo, hi = ranges(of.visible, b, h, rows, taking_part, S)  # [BLOCK_M]
    visits = tiles_in_ranges(of.visible, b, h, lo, hi, rows, taking_part, BLOCK_N)
    order = load_order(of.terms, h)
    q = load_query(of, Features(), b, h, first_row, rows < taking_part, BLOCK_M, TILE)
    query = QueryRows(place, q, Features(), lo, hi)
    do = load_values(reads.dattended, b, h, first_row, rows < taking_part, BLOCK_M, TILE)
    of_head = head_gate(reads.gate, b, h, TILE)
    row_terms = load_row_terms(reads, of_head, b, h, rows, sizes, TILE)
    columns = along(row_terms, 1)
    nothing = tl.zeros((BLOCK_M,), tl.float32)
    slopes, slope_differences = nothing, nothing
    if dalpha is not None:
        logs, firsts, seconds = nothing, nothing, nothing  # of p ln p, p first, p second
        p_differences, log_differences = nothing, nothing  # of p and the same, times the difference
        first_differences, second_differences = nothing, nothing
    pair = (b * sizes.H + h).to(tl.int64)
    at = support.ptr + (pair * tiles + first_row // BLOCK_M) * tl.cdiv(S, BLOCK_N)
    for number in range(tile_count(visits)):
        tile = tile_at(visits, number)
        first = tile * BLOCK_N
        scores, _ = _masked_scores(of, query, first, sizes, TILE)
        y = above_threshold(scores, columns.lse, columns.above, order)
        if tl.max(tl.where(y == -1.0, 0, 1)) != 0:
            tl.store(at + tile, 1)
            there = first + tl.arange(0, BLOCK_N) < S
            v = load_values(of.value, b, place.hk, first, there, BLOCK_N, TILE)
            dp = product(do, tl.trans(v), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
            keep = None
            if of.dropout is not None:
                keep = kept(of.dropout, b, h, rows, first, BLOCK_N)
            dp = dropped(dp, keep, of.dropout)
            p, slope = powers(y, order)
            difference = tl.where(slope == 0.0, 0.0, dp * columns.g - columns.delta)
            slopes += tl.sum(slope, 1)
            slope_differences += tl.sum(slope * difference, 1)
            if dalpha is not None:
                p_log, p_first, p_second = _terms_of_alpha(y, p, slope, order)
                logs += tl.sum(p_log, 1)
                firsts += tl.sum(p_first, 1)
                seconds += tl.sum(p_second, 1)
                p_differences += tl.sum(p * difference, 1)
                log_differences += tl.sum(p_log * difference, 1)
                first_differences += tl.sum(p_first * difference, 1)
                second_differences += tl.sum(p_second * difference, 1)
    sees = slopes != 0.0
    of_pair = pair * T + rows
    center = row_terms.delta + slope_differences / tl.where(sees, slopes, 1.0)
    # Rows with a number that is not finite have lse nan, from which the other passes know them.
    center = tl.where(row_terms.finite, center, 0.0)
    tl.store(centers + of_pair, center, mask=rows < T)
    if dalpha is not None:
        change = seconds * p_differences - second_differences
        change += logs * first_differences - firsts * log_differences
        tl.store(dalpha + of_pair, change / (1.0 + order * firsts), mask=rows < T)


@triton.jit
def _terms_of_alpha(y, p, slope, order):
    """`p ln p`, `p first` and `p second` of probabilities `p = (1 + y) ^ (1 / order)`."""
    inverse = 1.0 / order
    x = -log1p(y)
    p_first = slope * -y * inverse
    series = tl.full(x.shape, 1.0, tl.float32)  # (e^x - 1 - x) 2 / x^2
    for i in tl.static_range(7, 2, -1):
        series = 1.0 + x * series / i
    small = p * (x * inverse) * (x * inverse) * series * 0.5
    p_second = tl.where(x < 0.5, small, (p_first - p * x * inverse) * inverse)
    return p * -x * inverse, p_first, p_second


def centers_pass(call: Call, first: FirstPass, dalpha: Tensor) -> FirstPass:
    """`first` with the centers as delta, and the support; fills `dalpha` unless it is empty."""
    B, H, T, S = call.sizes
    tiles = tiles_for("entmax_attention.centers", call.query, call.D, call.Dv)
    row_tiles, key_tiles = -(-T // tiles.block_m), -(-S // tiles.block_n)
    flags = call.query.new_zeros((B, H, row_tiles, key_tiles), dtype=torch.uint8)
    support = Support(flags, tiles.block_m, tiles.block_n)
    centers = torch.empty_like(first.reads.delta)
    launch(
        _centers_kernel, B * H * row_tiles, call.query, tiles,
        first.operands, first.reads, centers, dalpha if dalpha.numel() else None, support, sizes_of(call),
        TILE=tile_constants(call, tiles),
    )  # fmt: skip
    return first._replace(reads=first.reads._replace(delta=centers), support=support)
