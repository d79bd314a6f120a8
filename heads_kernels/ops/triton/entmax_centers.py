"""Entmax attention backward in Triton, what comes before the passes over keys and queries: sums over the keys of a row.

    dscores = slope * (dp - center)        center = sum(slope * dp) / sum(slope)

Softmax has p in the place of the slope, and its center is delta, which is known. The derivative of p by alpha is
(Correia, Niculae, Martins 2019, proposition 1)

    (p - share) / order^2 - (p ln p + share entropy) / order        share = slope / sum(slope)

a difference of large terms where alpha is near 1. With x = -order ln p, first = (e^x - 1) / order and second =
(e^x - 1 - x) / order^2 their first-order parts cancel:

    p (sum(p second) - second - ln p sum(p first) - first entropy) / (1 + order sum(p first))
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.call import Call
from heads_kernels.ops.triton.entmax import above_threshold, dropped, load_order, log1p, powers
from heads_kernels.ops.triton.entmax_forward import masked_scores
from heads_kernels.ops.triton.gate import head_gate, open_rows
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import load_tile
from heads_kernels.ops.triton.operands import Place, Support, sizes_of
from heads_kernels.ops.triton.rows import FirstPass, as_columns, load_row_terms
from heads_kernels.ops.triton.softmax import kept, product
from heads_kernels.ops.triton.tiles import tile_constants, tiles_for
from heads_kernels.ops.triton.visible import ranges, tile_at, tile_count, tiles_in_ranges


class CentersWritten(NamedTuple):
    """What the kernel writes."""

    centers: Tensor
    dalpha: Tensor | None
    support: Support
    end: None = None


@triton.jit
def _centers_kernel(of, reads, written, sizes, TILE: tl.constexpr):
    """A program writes the centers of BLOCK_M rows of a head, their part of dalpha, and which tiles of keys have a
    probability above 0."""
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    T, S = sizes.T, sizes.S
    tiles = tl.cdiv(T, BLOCK_M)
    pair = tl.program_id(0) // tiles
    b, h = pair // sizes.H, pair % sizes.H
    own = tiles - 1 - tl.program_id(0) % tiles
    first_row = own * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    place = Place(b, h, h // sizes.group, first_row, rows)
    taking_part = open_rows(reads.gate, b, h, T, TILE)
    lo, hi = ranges(of.visible, b, h, rows, taking_part, S)  # [BLOCK_M]
    visits = tiles_in_ranges(of.visible, b, h, lo, hi, rows, taking_part, BLOCK_N)
    order = load_order(of.terms, h)
    q = load_tile(of.query, b, h, first_row, rows < taking_part, TILE.d, BLOCK_M, TILE.block_d)
    do = load_tile(
        reads.dattended, b, h, first_row, rows < taking_part, TILE.dv, BLOCK_M, TILE.block_dv
    )
    of_head = head_gate(reads.gate, b, h, TILE)
    row_terms = load_row_terms(reads, of_head, b, h, rows, sizes, TILE)
    columns = as_columns(row_terms)
    slopes = tl.zeros((BLOCK_M,), tl.float32)
    slope_differences = tl.zeros((BLOCK_M,), tl.float32)
    if written.dalpha is not None:
        logs = tl.zeros((BLOCK_M,), tl.float32)  # of p ln p, p first, p second
        firsts = tl.zeros((BLOCK_M,), tl.float32)
        seconds = tl.zeros((BLOCK_M,), tl.float32)
        p_differences = tl.zeros((BLOCK_M,), tl.float32)  # of the same times the difference
        log_differences = tl.zeros((BLOCK_M,), tl.float32)
        first_differences = tl.zeros((BLOCK_M,), tl.float32)
        second_differences = tl.zeros((BLOCK_M,), tl.float32)
    at = written.support.ptr + (pair.to(tl.int64) * tiles + own) * tl.cdiv(S, BLOCK_N)
    for number in range(tile_count(visits)):
        tile = tile_at(visits, number)
        first = tile * BLOCK_N
        scores = masked_scores(of, q, lo, hi, first, place, sizes, TILE)
        y = above_threshold(scores, columns.lse, columns.above, order)
        if tl.max(tl.where(y == -1.0, 0, 1)) != 0:
            tl.store(at + tile, 1)
            there = first + tl.arange(0, BLOCK_N) < S
            v = load_tile(of.value, b, place.hk, first, there, TILE.dv, BLOCK_N, TILE.block_dv)
            dp = product(do, tl.trans(v), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
            keep = None
            if of.dropout is not None:
                keep = kept(of.dropout, b, h, rows, first, BLOCK_N)
            dp = dropped(dp, keep, of.dropout)
            p, slope = powers(y, order)
            difference = tl.where(slope == 0.0, 0.0, dp * columns.g - columns.delta)
            slopes += tl.sum(slope, 1)
            slope_differences += tl.sum(slope * difference, 1)
            if written.dalpha is not None:
                p_log, p_first, p_second = _terms_of_alpha(y, p, slope, order)
                logs += tl.sum(p_log, 1)
                firsts += tl.sum(p_first, 1)
                seconds += tl.sum(p_second, 1)
                p_differences += tl.sum(p * difference, 1)
                log_differences += tl.sum(p_log * difference, 1)
                first_differences += tl.sum(p_first * difference, 1)
                second_differences += tl.sum(p_second * difference, 1)
    sees = slopes != 0.0
    of_pair = pair.to(tl.int64) * T + rows
    center = row_terms.delta + slope_differences / tl.where(sees, slopes, 1.0)
    # Rows with a number that is not finite have lse nan, which is all that the other passes need.
    center = tl.where(row_terms.finite, center, 0.0)
    tl.store(written.centers + of_pair, center, mask=rows < T)
    if written.dalpha is not None:
        change = seconds * p_differences - second_differences
        change += logs * first_differences - firsts * log_differences
        tl.store(written.dalpha + of_pair, change / (1.0 + order * firsts), mask=rows < T)


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
    """`first` with the centers as delta, and with the support; fills `dalpha` unless it is empty."""
    (B, H, T, D), (_, _, S, Dv) = call.query.shape, call.value.shape
    tiles = tiles_for("entmax_attention.centers", call.query, D, Dv)
    row_tiles, key_tiles = -(-T // tiles.block_m), -(-S // tiles.block_n)
    flags = call.query.new_zeros((B, H, row_tiles, key_tiles), dtype=torch.uint8)
    support = Support(flags, tiles.block_m, tiles.block_n)
    centers = torch.empty_like(first.reads.delta)
    written = CentersWritten(centers, dalpha if dalpha.numel() else None, support)
    launch(
        _centers_kernel, B * H * row_tiles, call.query, tiles,
        first.operands, first.reads, written, sizes_of(call),
        TILE=tile_constants(tiles, D, Dv, gate=first.kind, activation=call.gate_activation),
    )  # fmt: skip
    return first._replace(reads=first.reads._replace(delta=centers), support=support)
