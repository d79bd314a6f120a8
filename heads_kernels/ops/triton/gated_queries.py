"""Gated attention backward in Triton: `dquery`, by tiles of query rows (formulas as in `gated_keys`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.call import Call
from heads_kernels.ops.triton.entmax import gradient_of_tile, weigh
from heads_kernels.ops.triton.gate import head_gate, open_rows
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import load_tile, store_tile
from heads_kernels.ops.triton.operands import (
    Pairs,
    Place,
    has_terms,
    operator_of,
    rows_of,
    sizes_of,
)
from heads_kernels.ops.triton.rows import FirstPass, as_columns, load_row_terms
from heads_kernels.ops.triton.scores import finish, load_bias
from heads_kernels.ops.triton.softmax import finite_part, kept, product
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import tile_constants, tiles_for
from heads_kernels.ops.triton.visible import (
    full_tile,
    pairs_visible,
    partial_count,
    partial_tile,
    ranges,
    tiles_seen,
)


class OwnRows(NamedTuple):
    """The query rows of a program, in a kernel: query and dout, what else is read of them, the keys that they see."""

    q: Any  # [BLOCK_M, BLOCK_D]
    do: Any  # [BLOCK_M, BLOCK_DV]
    terms: Any  # RowTerms, as columns
    lo: Any  # [BLOCK_M, 1]
    hi: Any


@triton.jit
def _keys_tile(of, queries, dquery, tile, place, sizes, PARTIAL: tl.constexpr, TILE: tl.constexpr):
    """`dquery` [BLOCK_M, BLOCK_D] after one tile of keys."""
    BLOCK_N: tl.constexpr = TILE.block_n
    b, h, hk = place.b, place.h, place.hk
    first = tile * BLOCK_N
    keys = first + tl.arange(0, BLOCK_N)
    there = None
    if PARTIAL:
        there = keys < sizes.S
    k = load_tile(of.key, b, hk, first, there, TILE.d, BLOCK_N, TILE.block_d)  # [BLOCK_N, BLOCK_D]
    v = load_tile(
        of.value, b, hk, first, there, TILE.dv, BLOCK_N, TILE.block_dv
    )  # [BLOCK_N, BLOCK_DV]
    pairs = Pairs(b, h, place.at[:, None], keys[None, :])
    bias = load_bias(of.terms, pairs, sizes.T, sizes.S)
    zeros = tl.zeros((TILE.block_m, BLOCK_N), tl.float32)
    scores, cap = finish(
        product(queries.q, tl.trans(k), zeros), bias, of.terms, sizes.scale
    )  # [BLOCK_M, BLOCK_N]
    seen = None
    if PARTIAL:
        seen = pairs_visible(
            of.visible, of.terms, pairs, queries.lo, queries.hi, sizes.T, sizes.S, bias
        )
    _, slope = weigh(scores, queries.terms, seen, of.terms, h, sizes.scale)
    dp = product(queries.do, tl.trans(v), zeros)
    keep = None
    if of.dropout is not None:
        keep = kept(of.dropout, b, h, place.at, first, BLOCK_N)
    dscores = gradient_of_tile(slope, dp, keep, cap, seen, queries.terms, of)
    if PARTIAL:
        k = finite_part(k)
    return product(dscores.to(k.dtype), k, dquery)


@triton.jit
def _queries_kernel(of, reads, dquery_out, sizes, TILE: tl.constexpr):
    """A program owns BLOCK_M query rows of a head, in the order of the forward kernel. The rows of query and dout and
    the sum stay on chip; a closed head writes its zeros and is done."""
    BLOCK_M: tl.constexpr = TILE.block_m
    tiles = tl.cdiv(sizes.T, BLOCK_M)
    pair = tl.program_id(0) // tiles
    b, h = pair // sizes.H, pair % sizes.H
    first_row = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    place = Place(b, h, h // sizes.group, first_row, rows)
    taking_part = open_rows(reads.gate, b, h, sizes.T, TILE)
    lo, hi = ranges(of.visible, b, h, rows, taking_part, sizes.S)  # [BLOCK_M]
    own = first_row // BLOCK_M
    visits = tiles_seen(of.visible, place, own, lo, hi, taking_part, TILE.block_n)
    row_terms = load_row_terms(reads, head_gate(reads.gate, b, h, TILE), b, h, rows, sizes, TILE)
    queries = OwnRows(
        load_tile(of.query, b, h, first_row, rows < taking_part, TILE.d, BLOCK_M, TILE.block_d),
        load_tile(reads.dattended, b, h, first_row, rows < taking_part, TILE.dv, BLOCK_M, TILE.block_dv),
        as_columns(row_terms), lo[:, None], hi[:, None],
    )  # fmt: skip
    dquery = tl.zeros((BLOCK_M, TILE.block_d), tl.float32)
    for number in range(visits.full_start, visits.full_end):
        tile = full_tile(of.visible, b, h, own, number)
        dquery = _keys_tile(of, queries, dquery, tile, place, sizes, False, TILE)
    for number in tl.range(0, partial_count(visits), num_stages=1):
        tile = partial_tile(of.visible, b, h, own, number, visits)
        dquery = _keys_tile(of, queries, dquery, tile, place, sizes, True, TILE)
    # Rows that see nothing are 0, whatever stands in the keys beside them.
    dquery = tl.where((row_terms.lse == float("inf"))[:, None], 0.0, dquery * sizes.scale)
    store_tile(dquery_out, b, h, first_row, sizes.T, dquery, TILE.d, BLOCK_M, TILE.block_d)


def queries_pass(call: Call, first: FirstPass, dquery: Tensor) -> None:
    """Fill `dquery` unless it is empty."""
    if not dquery.numel():
        return
    (B, H, T, D), Dv = call.query.shape, call.value.shape[3]
    tiles = tiles_for(f"{operator_of(call)}.queries", call.query, D, Dv, has_terms(call))
    of = first.operands
    visible = visible_to_tiles(call, of.terms, of.visible, tiles, support=first.support)
    launch(
        _queries_kernel, B * H * -(-T // tiles.block_m), call.query, tiles,
        of._replace(visible=visible), first.reads, rows_of(dquery), sizes_of(call),
        TILE=tile_constants(tiles, D, Dv, gate=first.kind, activation=call.gate_activation),
    )  # fmt: skip
