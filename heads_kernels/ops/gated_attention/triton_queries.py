"""Gated attention backward in Triton: `dquery`, by tiles of query rows (the formulas stand in `triton_keys`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.ops.operator import Call
from heads_kernels.ops.triton.entmax import dscores_of, weigh
from heads_kernels.ops.triton.gate import head_gate, open_rows
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import load_tile, store_tile
from heads_kernels.ops.triton.operands import has_terms, operator_of, rows_of
from heads_kernels.ops.triton.rows import FirstPass, load_row_terms
from heads_kernels.ops.triton.scores import finish, load_bias
from heads_kernels.ops.triton.softmax import finite_part, kept, product
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import padded, tiles_for
from heads_kernels.ops.triton.visible import (
    full_tile,
    pairs_visible,
    partial_tile,
    ranges,
    tiles_seen,
)


@triton.jit
def _keys_tile(
    q, do, row_lse, above, row_delta, g, key, value, terms, visible, dropout, dquery, lo, hi, tile, b, h, hk, rows, T,
    S, scale,
    PARTIAL: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`dquery` [BLOCK_M, BLOCK_D] after one tile of keys."""
    first = tile * BLOCK_N
    keys = first + tl.arange(0, BLOCK_N)
    if PARTIAL:
        k = load_tile(key, b, hk, first, keys < S, D, BLOCK_N, q.shape[1])  # [BLOCK_N, BLOCK_D]
        v = load_tile(
            value, b, hk, first, keys < S, DV, BLOCK_N, do.shape[1]
        )  # [BLOCK_N, BLOCK_DV]
    else:
        k = load_tile(key, b, hk, first, None, D, BLOCK_N, q.shape[1])
        v = load_tile(value, b, hk, first, None, DV, BLOCK_N, do.shape[1])
    bias = load_bias(terms, b, h, rows[:, None], keys[None, :], T, S)
    zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    raw = product(q, tl.trans(k), zeros)
    scores, cap = finish(raw, bias, terms, scale)  # [BLOCK_M, BLOCK_N]
    seen = None
    if PARTIAL:
        seen = pairs_visible(
            visible, terms, b, h, lo[:, None], hi[:, None], rows[:, None], keys[None, :], T, S, bias
        )
    _, slope = weigh(scores, row_lse[:, None], above[:, None], seen, terms, h, scale)
    dp = product(do, tl.trans(v), zeros)
    if dropout is not None:
        dp = tl.where(kept(dropout, b, h, rows, first, BLOCK_N), dp * dropout.scale, 0.0)
    dscores = dscores_of(slope, dp * g[:, None], row_delta[:, None], cap, seen, terms)
    if PARTIAL:
        k = finite_part(k)
    return product(dscores.to(k.dtype), k, dquery)


@triton.jit
def _queries_kernel(
    query, key, value, dout, gate, lse, delta, terms, visible, dropout, dquery_out, H, T, S, GROUP, scale,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """A program owns BLOCK_M query rows of a head, in the order of the forward kernel. The rows of query and dout and
    the sum stay on chip; a closed head writes its zeros and is done."""
    tiles = tl.cdiv(T, BLOCK_M)
    pair = tl.program_id(0) // tiles
    b, h = pair // H, pair % H
    hk = h // GROUP
    first_row = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    taking_part = open_rows(gate, b, h, T, KIND, ACTIVATION)
    lo, hi = ranges(visible, b, rows, taking_part, S)  # [BLOCK_M]
    own = first_row // BLOCK_M
    start, full_start, full_end, end = tiles_seen(
        visible, b, h, own, lo, hi, rows, taking_part, BLOCK_N
    )
    q = load_tile(
        query, b, h, first_row, rows < taking_part, D, BLOCK_M, BLOCK_D
    )  # [BLOCK_M, BLOCK_D]
    do = load_tile(
        dout, b, h, first_row, rows < taking_part, DV, BLOCK_M, BLOCK_DV
    )  # [BLOCK_M, BLOCK_DV]
    row_lse, above, row_delta, g, _ = load_row_terms(
        lse,
        delta,
        gate,
        head_gate(gate, b, h, KIND, ACTIVATION),
        b,
        h,
        pair,
        rows,
        T,
        KIND,
        ACTIVATION,
    )
    dquery = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for place in range(full_start, full_end):
        tile = full_tile(visible, b, h, own, place)
        dquery = _keys_tile(
            q, do, row_lse, above, row_delta, g, key, value, terms, visible, dropout, dquery, lo, hi, tile, b, h, hk,
            rows, T, S, scale, False, D, DV, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    for index in tl.range(0, full_start - start + end - full_end, num_stages=1):
        tile = partial_tile(visible, b, h, own, index, start, full_start, full_end)
        dquery = _keys_tile(
            q, do, row_lse, above, row_delta, g, key, value, terms, visible, dropout, dquery, lo, hi, tile, b, h, hk,
            rows, T, S, scale, True, D, DV, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    # Rows that see nothing are 0, whatever stands in the keys beside them.
    dquery = tl.where((row_lse == float("inf"))[:, None], 0.0, dquery * scale)
    store_tile(dquery_out, b, h, first_row, T, dquery, D, BLOCK_M, BLOCK_D)


def queries_pass(call: Call, first: FirstPass, dquery: Tensor) -> None:
    """Fill `dquery` unless it is empty."""
    if not dquery.numel():
        return
    (B, H, T, D), (_, Hk, S, Dv) = call.query.shape, call.value.shape
    tiles = tiles_for(f"{operator_of(call)}.queries", call.query, D, Dv, has_terms(call))
    of = first.operands
    visible = visible_to_tiles(call, of.terms, of.visible, tiles, support=first.support)
    launch(
        _queries_kernel, B * H * -(-T // tiles.block_m), call.query, tiles,
        of.query, of.key, of.value, first.dattended, first.gate, first.lse, first.delta,
        of.terms, visible, of.dropout, rows_of(dquery),
        H, T, S, H // max(Hk, 1), call.scale,
        KIND=first.kind, ACTIVATION=call.gate_activation, D=D, DV=Dv,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=padded(D), BLOCK_DV=padded(Dv),
    )  # fmt: skip
