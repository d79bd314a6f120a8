"""Collaborative attention backward in Triton: `dquery` and `dmixing`, by tiles of query rows.

    dmixed_h = dscores_h key
    dquery = sum over h of mixing_h * dmixed_h        dmixing_h = colsum(query * dmixed_h)

The other formulas stand in `triton_keys`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.ops.buffers import split_parts, splits_of, sum_parts
from heads_kernels.ops.operator import Call
from heads_kernels.ops.triton.chunks import (
    active_chunks,
    chunk_at,
    load_content_bias,
    load_mixing,
    mixed,
)
from heads_kernels.ops.triton.gate import head_gate, open_rows
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import add_columns, load_columns, load_tile
from heads_kernels.ops.triton.operands import (
    has_terms,
    rows_of,
)
from heads_kernels.ops.triton.rows import FirstPass, load_row_terms
from heads_kernels.ops.triton.scores import finish, load_bias, scale_log2_of
from heads_kernels.ops.triton.softmax import finite_part, kept, probabilities, product
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import chunks_of, padded, tiles_for
from heads_kernels.ops.triton.visible import (
    full_tile,
    listed_tiles,
    pairs_visible,
    partial_tile,
    ranges,
    tiles_in_ranges,
)


@triton.jit
def _keys_tile(
    query, key, value, do, row_lse, row_delta, g, mixing, content_bias, terms, visible, dropout, dmixed, lo, hi, rows,
    first_row, tile, count, numbers, slice_column, b, h, T, S, GROUP, scale,
    PARTIAL: tl.constexpr, DS: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """`dmixed` [BLOCK_M, SLICE] of head h after one tile of keys."""
    first_key = tile * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)
    there = keys < S
    bias = load_bias(terms, b, h, rows[:, None], keys[None, :], T, S)
    raw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for place in range(count):
        column = chunk_at(numbers, place) * BLOCK_D
        q = load_columns(
            query, b, first_row, rows < T, column, DS, BLOCK_M, BLOCK_D
        )  # [BLOCK_M, BLOCK_D]
        k = load_columns(
            key, b, first_key, there, column, DS, BLOCK_N, BLOCK_D
        )  # [BLOCK_N, BLOCK_D]
        raw = product(
            mixed(
                q, mixing, h, column + tl.arange(0, BLOCK_D), column + tl.arange(0, BLOCK_D) < DS
            ),
            tl.trans(k),
            raw,
        )
    v = load_tile(
        value, b, h // GROUP, first_key, there, DV, BLOCK_N, do.shape[1]
    )  # [BLOCK_N, BLOCK_DV]
    k_slice = load_columns(
        key, b, first_key, there, slice_column, DS, BLOCK_N, SLICE
    )  # [BLOCK_N, SLICE]
    if content_bias is not None:
        raw += load_content_bias(content_bias, b, h, keys, S)[None, :]
    scores, slope = finish(raw, bias, terms, scale)  # [BLOCK_M, BLOCK_N]
    p = probabilities(scores, row_lse[:, None], scale_log2_of(scale, terms))
    dp = product(do, tl.trans(v), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
    if dropout is not None:
        dp = tl.where(kept(dropout, b, h, rows, first_key, BLOCK_N), dp * dropout.scale, 0.0)
    dscores = p * (dp * g[:, None] - row_delta[:, None]) * slope
    if PARTIAL:
        seen = pairs_visible(
            visible, terms, b, h, lo[:, None], hi[:, None], rows[:, None], keys[None, :], T, S, bias
        )
        dscores = tl.where(seen, dscores, 0.0)
    if PARTIAL:
        k_slice = finite_part(k_slice)
    return product(dscores.to(k_slice.dtype), k_slice, dmixed)


@triton.jit
def _queries_kernel(
    query, key, value, dout, mixing, content_bias, gate, lse, delta, terms, visible, dropout, dquery_out, dmixing_out,
    B, H, T, S, GROUP, SPLITS, SKIPS, scale,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, DS: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNKS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """A program owns a SLICE of features of BLOCK_M query rows and goes through the heads, or a SPLITS-th of them.

    What a head adds to `dquery` is added in memory, in float32, once a head: `dmixing` asks for the sum of the head
    alone, and both do not fit on chip. The program writes its part of `dmixing`, `[B, tiles, H, Ds]`. With
    SKIPS 1 a head that does not use the slice is left out: its `dmixing` there is not asked for.
    """
    tiles = tl.cdiv(T, BLOCK_M)
    slices = tl.cdiv(DS, SLICE)
    tile_of_rows = tiles - 1 - tl.program_id(0) // slices % tiles
    column = (tl.program_id(0) % slices) * SLICE
    b = tl.program_id(0) // (tiles * slices) % B
    split = tl.program_id(0) // (tiles * slices * B)
    first_row = tile_of_rows * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    lo, hi = ranges(visible, b, rows, T, S)  # [BLOCK_M]
    if visible.lists is None:
        start, full_start, full_end, end = tiles_in_ranges(visible, b, lo, hi, rows, T, BLOCK_N)
    heads = tl.cdiv(H, SPLITS)
    for index in range(tl.minimum(heads, H - split * heads)):
        h = split * heads + index
        count, numbers = active_chunks(mixing, h, DS, BLOCK_D, CHUNKS)
        if visible.lists is not None:
            start, full_start, full_end, end = listed_tiles(visible, b, h, tile_of_rows, T)
        slice_mixing = load_mixing(
            mixing, h, column + tl.arange(0, SLICE), column + tl.arange(0, SLICE) < DS
        )  # [SLICE]
        used = tl.where(SKIPS == 0, 1, tl.max((slice_mixing != 0.0).to(tl.int32)))
        taking_part = tl.minimum(open_rows(gate, b, h, T, KIND, ACTIVATION), used)
        do = load_tile(
            dout, b, h, first_row, rows < T, DV, BLOCK_M, BLOCK_DV
        )  # [BLOCK_M, BLOCK_DV]
        row_lse, row_delta, g, _ = load_row_terms(
            lse,
            delta,
            gate,
            head_gate(gate, b, h, KIND, ACTIVATION),
            b,
            h,
            b * H + h,
            rows,
            T,
            KIND,
            ACTIVATION,
        )
        dmixed = tl.zeros((BLOCK_M, SLICE), tl.float32)
        for place in range(full_start, full_start + (full_end - full_start) * taking_part):
            tile = full_tile(visible, b, h, tile_of_rows, place)
            dmixed = _keys_tile(
                query, key, value, do, row_lse, row_delta, g, mixing, content_bias, terms, visible, dropout, dmixed,
                lo, hi, rows, first_row, tile, count, numbers, column, b, h, T, S, GROUP, scale,
                False, DS, DV, BLOCK_M, BLOCK_N, BLOCK_D, SLICE,
            )  # fmt: skip
        for place in range((full_start - start + end - full_end) * taking_part):
            tile = partial_tile(visible, b, h, tile_of_rows, place, start, full_start, full_end)
            dmixed = _keys_tile(
                query, key, value, do, row_lse, row_delta, g, mixing, content_bias, terms, visible, dropout, dmixed,
                lo, hi, rows, first_row, tile, count, numbers, column, b, h, T, S, GROUP, scale,
                True, DS, DV, BLOCK_M, BLOCK_N, BLOCK_D, SLICE,
            )  # fmt: skip
        # Rows that see nothing take part in no sum, whatever stands in them or in the keys beside them.
        sees_nothing = (row_lse == float("inf"))[:, None]
        dmixed = tl.where(sees_nothing, 0.0, dmixed)
        if dquery_out is not None:
            # Of rows that see nothing nothing, whatever stands in the mixing vector.
            term = tl.where(sees_nothing, 0.0, slice_mixing[None, :] * dmixed * scale)
            begun = tl.where(index > 0, T, 0)
            add_columns(
                dquery_out, split * B + b, first_row, T, begun, column, term, DS, BLOCK_M, SLICE
            )
        if dmixing_out is not None:
            q_slice = load_columns(
                query, b, first_row, row_lse != float("inf"), column, DS, BLOCK_M, SLICE
            )  # [BLOCK_M, SLICE]
            columns = column + tl.arange(0, SLICE)
            part = ((b * tiles + tile_of_rows) * H + h).to(tl.int64) * DS
            products = tl.sum(q_slice.to(tl.float32) * dmixed, 0) * scale
            tl.store(dmixing_out + part + columns, products, mask=columns < DS)


def queries_pass(
    call: Call, first: FirstPass, closed_grad: bool, dquery: Tensor, dmixing_rows: Tensor
) -> None:
    """Fill `dquery` and `dmixing_rows`; an empty one is not computed."""
    if not (dquery.numel() or dmixing_rows.numel()):
        return
    B, H, T, S, Ds, Dv = call.sizes
    if H == 0:
        dquery.zero_()  # no head writes it
        return
    tiles = tiles_for("collaborative_attention.queries", call.query, Ds, Dv, has_terms(call))
    width = tiles.block_slice
    row_tiles = -(-T // tiles.block_m)
    programs = B * row_tiles * -(-Ds // width)
    splits = splits_of(H, programs, call.query)
    part = split_parts(dquery, splits, torch.float32)
    mixing_parts = dmixing_rows.new_empty((B, row_tiles, H, Ds)) if dmixing_rows.numel() else None
    of = first.operands
    launch(
        _queries_kernel, programs * splits, call.query, tiles,
        of.query, of.key, of.value, first.dattended, of.mixing, of.content_bias, first.gate, first.lse, first.delta,
        of.terms, visible_to_tiles(call, of.terms, of.visible, tiles), of.dropout,
        rows_of(part) if dquery.numel() else None, mixing_parts,
        B, H, T, S, H // call.value.shape[1], splits, int(mixing_parts is None or not closed_grad), call.scale,
        KIND=first.kind, ACTIVATION=call.gate_activation, DS=Ds, DV=Dv,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=tiles.block_d, BLOCK_DV=padded(Dv),
        CHUNKS=chunks_of(Ds, tiles.block_d), SLICE=width,
    )  # fmt: skip
    sum_parts(part, dquery, splits)
    if mixing_parts is not None:
        torch.sum(mixing_parts, 1, out=dmixing_rows)
