"""Collaborative attention backward in Triton: `dquery` and `dmixing`, by tiles of query rows.

    dmixed_h = dscores_h key
    dquery = sum over h of mixing_h * dmixed_h        dmixing_h = colsum(query * dmixed_h)

The other formulas are those of `triton_keys`. A head's features are gathered as in the forward pass (`attend`): its
mixed query stays on chip, and a tile of keys is loaded once, for the scores and for `dmixed`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.ops.buffers import split_parts, splits_of, sum_parts
from heads_kernels.ops.operator import Call
from heads_kernels.ops.triton.chunks import (
    ALL_CHUNKS,
    active_chunks,
    active_features,
    chunk_at,
    halves,
    load_content_bias,
    load_mixing,
    mixed,
)
from heads_kernels.ops.triton.gate import head_gate, open_rows
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import add_columns, load_columns, load_features, load_tile
from heads_kernels.ops.triton.operands import has_terms, rows_of
from heads_kernels.ops.triton.rows import FirstPass, load_row_terms
from heads_kernels.ops.triton.scores import finish, load_bias, probabilities
from heads_kernels.ops.triton.softmax import finite_part, kept, product
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
    of, q, columns, used, count, numbers, do, row_lse, row_delta, g, dmixed, lo, hi, rows, first_row, tile,
    b, h, T, S, GROUP, scale,
    PARTIAL: tl.constexpr, DS: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`dmixed` [BLOCK_M, W] of head h after one tile of keys.

    Arguments as of `_of_head`; do [BLOCK_M, BLOCK_DV].
    """
    first_key = tile * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)
    there = keys < S
    bias = load_bias(of.terms, b, h, rows[:, None], keys[None, :], T, S)
    raw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if q is None:
        for place in range(count):
            column = chunk_at(numbers, place) * BLOCK_D
            features = column + tl.arange(0, BLOCK_D)
            q_chunk = load_columns(of.query, b, first_row, rows < T, column, DS, BLOCK_M, BLOCK_D)
            k_chunk = load_columns(of.key, b, first_key, there, column, DS, BLOCK_N, BLOCK_D)
            q_chunk = mixed(q_chunk, of.mixing, h, features, features < DS)  # [BLOCK_M, BLOCK_D]
            raw = product(q_chunk, tl.trans(k_chunk), raw)
    k = load_features(of.key, b, first_key, there, columns, used, BLOCK_N)  # [BLOCK_N, W]
    if q is not None:
        raw = product(q, tl.trans(k), raw)
    v = load_tile(
        of.value, b, h // GROUP, first_key, there, DV, BLOCK_N, do.shape[1]
    )  # [BLOCK_N, BLOCK_DV]
    if of.content_bias is not None:
        raw += load_content_bias(of.content_bias, b, h, keys, S)[None, :]
    scores, slope = finish(raw, bias, of.terms, scale)  # [BLOCK_M, BLOCK_N]
    p = probabilities(scores, row_lse[:, None], scale, of.terms)
    dp = product(do, tl.trans(v), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
    if of.dropout is not None:
        dp = tl.where(kept(of.dropout, b, h, rows, first_key, BLOCK_N), dp * of.dropout.scale, 0.0)
    dscores = p * (dp * g[:, None] - row_delta[:, None]) * slope
    if PARTIAL:
        seen = pairs_visible(
            of.visible, of.terms, b, h, lo[:, None], hi[:, None], rows[:, None], keys[None, :], T, S, bias
        )  # fmt: skip
        dscores = tl.where(seen, dscores, 0.0)
        k = finite_part(k)
    return product(dscores.to(k.dtype), k, dmixed)


@triton.jit
def _of_head(
    of, q, columns, used, active, active_numbers, count, numbers, first_place, dout, gate, lse, delta,
    dquery_out, dmixing_out, lo, hi, start, full_start, full_end, end, rows, first_row, b, h, split, B, H, T, S, GROUP,
    scale, KIND: tl.constexpr, ACTIVATION: tl.constexpr, DS: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Add the term of head h to `dquery` at `columns` [W], and store the program's part of its `dmixing` there.

    `columns` and `used` are those of the head's chunks from `first_place` of the list on, `q` [BLOCK_M, W] the mixed
    query there. `q` is None where the list has more features than these: scores are then computed chunk by chunk, from
    the list of the `active` chunks alone.
    """
    own = first_row // BLOCK_M
    do = load_tile(dout, b, h, first_row, rows < T, DV, BLOCK_M, BLOCK_DV)  # [BLOCK_M, BLOCK_DV]
    of_head = head_gate(gate, b, h, KIND, ACTIVATION)
    row_lse, _, row_delta, g, _ = load_row_terms(
        lse, delta, gate, of_head, b, h, b * H + h, rows, T, KIND, ACTIVATION
    )
    dmixed = tl.zeros((BLOCK_M, columns.shape[0]), tl.float32)
    for place in range(full_start, full_end):
        tile = full_tile(of.visible, b, h, own, place)
        dmixed = _keys_tile(
            of, q, columns, used, active, active_numbers, do, row_lse, row_delta, g, dmixed, lo, hi, rows, first_row,
            tile, b, h, T, S, GROUP, scale, False, DS, DV, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    for place in range(full_start - start + end - full_end):
        tile = partial_tile(of.visible, b, h, own, place, start, full_start, full_end)
        dmixed = _keys_tile(
            of, q, columns, used, active, active_numbers, do, row_lse, row_delta, g, dmixed, lo, hi, rows, first_row,
            tile, b, h, T, S, GROUP, scale, True, DS, DV, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    # Rows that see nothing take part in no sum, whatever stands in them or in the keys beside them.
    seeing = row_lse != float("inf")
    dmixed = tl.where(seeing[:, None], dmixed * scale, 0.0)
    _finish_head(
        of, dmixed, seeing, count, numbers, first_place, dquery_out, dmixing_out, first_row, b, h, split, B, H, T,
        DS, BLOCK_M, BLOCK_D,
    )  # fmt: skip


@triton.jit
def _finish_head(
    of, dmixed, seeing, count, numbers, place, dquery_out, dmixing_out, first_row, b, h, split, B, H, T,
    DS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add mixing * `dmixed` [BLOCK_M, W] to `dquery`, and store the column sums of query * `dmixed` for `dmixing`.

    W is split in halves down to one chunk: what is read from memory needs registers beside `dmixed`.
    """
    if dmixed.shape[1] > BLOCK_D:
        low, high = halves(dmixed)
        _finish_head(
            of, low, seeing, count, numbers, place, dquery_out, dmixing_out, first_row, b, h, split, B, H, T,
            DS, BLOCK_M, BLOCK_D,
        )  # fmt: skip
        _finish_head(
            of, high, seeing, count, numbers, place + low.shape[1] // BLOCK_D, dquery_out, dmixing_out, first_row,
            b, h, split, B, H, T, DS, BLOCK_M, BLOCK_D,
        )  # fmt: skip
    else:
        column = chunk_at(numbers, place) * BLOCK_D
        columns = column + tl.arange(0, BLOCK_D)
        end = tl.where(count > place, T, 0)
        if dquery_out is not None:
            vector = load_mixing(of.mixing, h, columns, columns < DS)[None, :]
            # Rows that see nothing add nothing, whatever the mixing vector holds.
            term = tl.where(seeing[:, None], vector * dmixed, 0.0)
            add_columns(
                dquery_out, split * B + b, first_row, end, column, term, DS, BLOCK_M, BLOCK_D
            )
        if dmixing_out is not None:
            q = load_columns(of.query, b, first_row, seeing, column, DS, BLOCK_M, BLOCK_D)
            part = ((b * tl.cdiv(T, BLOCK_M) + first_row // BLOCK_M) * H + h).to(tl.int64) * DS
            tl.store(
                dmixing_out + part + columns, tl.sum(q.to(tl.float32) * dmixed, 0),
                mask=columns < tl.where(count > place, DS, 0),
            )  # fmt: skip


@triton.jit
def _queries_kernel(
    of, dout, gate, lse, delta, dquery_out, dmixing_out, B, H, T, S, GROUP, SPLITS, SKIPS, scale,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, DS: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNKS: tl.constexpr, RESIDENT: tl.constexpr,
):  # fmt: skip
    """A program owns BLOCK_M query rows and goes through the heads, or a SPLITS-th of them.

    What a head adds to `dquery` is added in memory, in float32, once a head: `dmixing` asks for the sum of the head
    alone, and both do not fit on chip. The program writes its part of `dmixing`, `[B, tiles, H, Ds]`; both outputs
    start as zeros. A head that uses more than RESIDENT features is computed once for every RESIDENT features of
    `dmixed`. With SKIPS 0 these are all features, since `dmixing` is asked for where `mixing` is 0 too.
    """
    tiles = tl.cdiv(T, BLOCK_M)
    own = tiles - 1 - tl.program_id(0) % tiles
    b = tl.program_id(0) // tiles % B
    split = tl.program_id(0) // (tiles * B)
    first_row = own * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    lo, hi = ranges(of.visible, b, rows, T, S)  # [BLOCK_M]
    if of.visible.lists is None:
        start, full_start, full_end, end = tiles_in_ranges(of.visible, b, lo, hi, rows, T, BLOCK_N)
    heads = tl.cdiv(H, SPLITS)
    # Addresses that are the same for all heads are not hoisted: they would take registers from the loops over tiles.
    for index in tl.range(0, tl.minimum(heads, H - split * heads), disable_licm=True):
        h = split * heads + index
        if of.visible.lists is not None:
            start, full_start, full_end, end = listed_tiles(of.visible, b, h, own, T)
        active, active_numbers = active_chunks(of.mixing, h, DS, BLOCK_D, CHUNKS)
        count = tl.where(SKIPS == 0, tl.cdiv(DS, BLOCK_D), active)
        numbers = tl.where(SKIPS == 0, ALL_CHUNKS, active_numbers)
        # A closed head has no chunks, and so takes none of the branches below.
        count = tl.where(open_rows(gate, b, h, T, KIND, ACTIVATION) == 0, 0, count)
        for doubling in tl.static_range(0, 5):  # widths of up to MOST_CHUNKS chunks
            if (BLOCK_D << doubling) <= RESIDENT:  # noqa: SIM102 (known when it is compiled)
                if (count > (1 << doubling) // 2) & (count <= (1 << doubling)):
                    columns, used = active_features(
                        numbers, count, 0, DS, BLOCK_D, BLOCK_D << doubling
                    )
                    q = load_features(of.query, b, first_row, rows < T, columns, used, BLOCK_M)
                    q = mixed(q, of.mixing, h, columns, used)  # [BLOCK_M, BLOCK_D << doubling]
                    _of_head(
                        of, q, columns, used, active, active_numbers, count, numbers, 0, dout, gate, lse, delta,
                        dquery_out, dmixing_out, lo, hi, start, full_start, full_end, end, rows, first_row, b, h, split,
                        B, H, T, S, GROUP, scale, KIND, ACTIVATION, DS, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
                    )  # fmt: skip
        if CHUNKS * BLOCK_D > RESIDENT:  # noqa: SIM102
            if count * BLOCK_D > RESIDENT:
                for place in range(0, count, RESIDENT // BLOCK_D):
                    columns, used = active_features(numbers, count, place, DS, BLOCK_D, RESIDENT)
                    _of_head(
                        of, None, columns, used, active, active_numbers, count, numbers, place, dout, gate, lse, delta,
                        dquery_out, dmixing_out, lo, hi, start, full_start, full_end, end, rows, first_row, b, h, split,
                        B, H, T, S, GROUP, scale, KIND, ACTIVATION, DS, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
                    )  # fmt: skip


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
    row_tiles = -(-T // tiles.block_m)
    splits = splits_of(H, B * row_tiles, call.query)
    part = split_parts(dquery, splits, torch.float32).zero_()
    mixing_parts = dmixing_rows.new_zeros((B, row_tiles, H, Ds)) if dmixing_rows.numel() else None
    of = first.operands
    of = of._replace(visible=visible_to_tiles(call, of.terms, of.visible, tiles))
    launch(
        _queries_kernel, B * row_tiles * splits, call.query, tiles,
        of, first.dattended, first.gate, first.lse, first.delta,
        rows_of(part) if dquery.numel() else None, mixing_parts,
        B, H, T, S, H // call.value.shape[1], splits, int(mixing_parts is None or not closed_grad), call.scale,
        KIND=first.kind, ACTIVATION=call.gate_activation, DS=Ds, DV=Dv,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=tiles.block_d, BLOCK_DV=padded(Dv),
        CHUNKS=chunks_of(Ds, tiles.block_d), RESIDENT=tiles.block_slice,
    )  # fmt: skip
    sum_parts(part, dquery, splits)
    if mixing_parts is not None:
        torch.sum(mixing_parts, 1, out=dmixing_rows)
