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

import torch
import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.ops.entmax_attention.triton_forward import masked_scores
from heads_kernels.ops.operator import Call
from heads_kernels.ops.triton.entmax import above_threshold, load_order, log1p, powers
from heads_kernels.ops.triton.gate import head_gate, open_rows
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import load_tile
from heads_kernels.ops.triton.operands import Support
from heads_kernels.ops.triton.rows import FirstPass, load_row_terms
from heads_kernels.ops.triton.softmax import kept, product
from heads_kernels.ops.triton.tiles import padded, tiles_for
from heads_kernels.ops.triton.visible import ranges, tiles_in_ranges


@triton.jit
def _centers_kernel(
    query, key, value, dout, gate, lse, delta, terms, visible, dropout, centers, dalpha, support, H, T, S, GROUP, scale,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """A program writes the centers of BLOCK_M rows of a head, their part of dalpha, and which tiles of keys have a
    probability above 0."""
    tiles = tl.cdiv(T, BLOCK_M)
    pair = tl.program_id(0) // tiles
    b, h = pair // H, pair % H
    hk = h // GROUP
    own = tiles - 1 - tl.program_id(0) % tiles
    first_row = own * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    taking_part = open_rows(gate, b, h, T, KIND, ACTIVATION)
    lo, hi = ranges(visible, b, rows, taking_part, S)  # [BLOCK_M]
    start, _, _, end = tiles_in_ranges(visible, b, lo, hi, rows, taking_part, BLOCK_N)
    order = load_order(terms, h)
    q = load_tile(query, b, h, first_row, rows < taking_part, D, BLOCK_M, BLOCK_D)
    do = load_tile(dout, b, h, first_row, rows < taking_part, DV, BLOCK_M, BLOCK_DV)
    top, above, row_delta, g, finite = load_row_terms(
        lse, delta, gate, head_gate(gate, b, h, KIND, ACTIVATION), b, h, pair, rows, T, KIND, ACTIVATION
    )  # fmt: skip
    slopes = tl.zeros((BLOCK_M,), tl.float32)
    slope_differences = tl.zeros((BLOCK_M,), tl.float32)
    if dalpha is not None:
        logs = tl.zeros((BLOCK_M,), tl.float32)  # of p ln p, p first, p second
        firsts = tl.zeros((BLOCK_M,), tl.float32)
        seconds = tl.zeros((BLOCK_M,), tl.float32)
        p_differences = tl.zeros((BLOCK_M,), tl.float32)  # of the same times the difference
        log_differences = tl.zeros((BLOCK_M,), tl.float32)
        first_differences = tl.zeros((BLOCK_M,), tl.float32)
        second_differences = tl.zeros((BLOCK_M,), tl.float32)
    at = support.ptr + (pair.to(tl.int64) * tiles + own) * tl.cdiv(S, BLOCK_N)
    for place in range(end - start):
        tile = start + place
        first = tile * BLOCK_N
        scores = masked_scores(
            q, key, terms, visible, lo, hi, first, b, h, hk, rows, T, S, scale, D, BLOCK_N
        )  # fmt: skip
        y = above_threshold(scores, top[:, None], above[:, None], order)
        if tl.max(tl.where(y == -1.0, 0, 1)) != 0:
            tl.store(at + tile, 1)
            there = first + tl.arange(0, BLOCK_N) < S
            v = load_tile(value, b, hk, first, there, DV, BLOCK_N, BLOCK_DV)
            dp = product(do, tl.trans(v), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
            if dropout is not None:
                dp = tl.where(kept(dropout, b, h, rows, first, BLOCK_N), dp * dropout.scale, 0.0)
            p, slope = powers(y, order)
            difference = tl.where(slope == 0.0, 0.0, dp * g[:, None] - row_delta[:, None])
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
    of_pair = pair.to(tl.int64) * T + rows
    center = row_delta + slope_differences / tl.where(sees, slopes, 1.0)
    # Rows with a number that is not finite have lse nan, which is all that the other passes need.
    center = tl.where(finite, center, 0.0)
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
    """`first` with the centers as delta, and with the support; fills `dalpha` unless it is empty."""
    (B, H, T, D), (_, Hk, S, Dv) = call.query.shape, call.value.shape
    tiles = tiles_for("entmax_attention.centers", call.query, D, Dv)
    row_tiles, key_tiles = -(-T // tiles.block_m), -(-S // tiles.block_n)
    flags = call.query.new_zeros((B, H, row_tiles, key_tiles), dtype=torch.uint8)
    support = Support(flags, tiles.block_m, tiles.block_n)
    centers = torch.empty_like(first.delta)
    of = first.operands
    launch(
        _centers_kernel, B * H * row_tiles, call.query, tiles,
        of.query, of.key, of.value, first.dattended, first.gate, first.lse, first.delta,
        of.terms, of.visible, of.dropout,
        centers, dalpha if dalpha.numel() else None, support, H, T, S, H // max(Hk, 1), call.scale,
        KIND=first.kind, ACTIVATION=call.gate_activation, D=D, DV=Dv,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=padded(D), BLOCK_DV=padded(Dv),
    )  # fmt: skip
    return first._replace(delta=centers, support=support)
