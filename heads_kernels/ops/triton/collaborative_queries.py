"""Collaborative attention backward in Triton: `dquery` and `dmixing`, by tiles of query rows.

    dmixed_h = dscores_h key
    dquery = sum over h of mixing_h * dmixed_h        dmixing_h = colsum(query * dmixed_h)

The other formulas are in `collaborative_keys`. A head's features are gathered as in the forward pass (`attend`): its
mixed query stays on chip, and a tile of keys is loaded once, for the scores and for `dmixed`. A head's sum is added to
`dquery` in memory, in float32: heads gather different features, and sums for all of them do not fit beside those of one
head. The loop over heads hoists nothing (`disable_licm`): addresses that heads share would take registers from the
loops over tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.call import Call
from heads_kernels.ops.buffers import split_parts, splits_of, sum_parts
from heads_kernels.ops.triton.chunks import (
    ALL_CHUNKS,
    Chunks,
    active_chunks,
    active_features,
    chunk_at,
    halves,
    load_content_bias,
    load_mixing,
    mixed,
)
from heads_kernels.ops.triton.entmax import gradient_of_tile, weigh
from heads_kernels.ops.triton.gate import head_gate, open_rows
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import add_columns, load_columns, load_features, load_tile
from heads_kernels.ops.triton.operands import (
    Pairs,
    Place,
    Rows,
    Splits,
    has_terms,
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
    listed_tiles,
    pairs_visible,
    partial_count,
    partial_tile,
    ranges,
    tiles_in_ranges,
)


class MixedQuery(NamedTuple):
    """The query of a head, in a kernel.

    `columns` and `used` [W] are the features of the head's chunks from place `first` of the list `chunks` on, `q`
    [BLOCK_M, W] the mixed query there. `q` is None where the list has more features than these: scores are computed
    chunk by chunk then, from the list of the `active` chunks alone.
    """

    q: Any
    columns: Any
    used: Any
    active: Any
    chunks: Any
    first: Any


class HeadRows(NamedTuple):
    """What a program reads of its rows for a head, in a kernel."""

    do: Any  # [BLOCK_M, BLOCK_DV]
    terms: Any  # RowTerms, as columns
    lo: Any  # [BLOCK_M, 1]
    hi: Any


class QueriesWritten(NamedTuple):
    """What the kernel writes, in float32; None for what is not asked for."""

    dquery: Rows | None
    dmixing: Tensor | None  # [B, tiles, H, Ds]
    end: None = None


@triton.jit
def _keys_tile(
    of, query, of_rows, dmixed, tile, place, sizes, PARTIAL: tl.constexpr, TILE: tl.constexpr
):
    """`dmixed` [BLOCK_M, W] of the head of `place` after one tile of keys."""
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_D: tl.constexpr = TILE.block_d
    b, h, rows, T, S = place.b, place.h, place.at, sizes.T, sizes.S
    first_key = tile * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)
    there = keys < S
    pairs = Pairs(b, h, rows[:, None], keys[None, :])
    bias = load_bias(of.terms, pairs, T, S)
    raw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if query.q is None:
        for number in range(query.active.length):
            column = chunk_at(query.active, number) * BLOCK_D
            features = column + tl.arange(0, BLOCK_D)
            q = load_columns(of.query, b, place.first, rows < T, column, TILE.d, BLOCK_M, BLOCK_D)
            part = load_columns(of.key, b, first_key, there, column, TILE.d, BLOCK_N, BLOCK_D)
            q = mixed(q, of.mixing, h, features, features < TILE.d)  # [BLOCK_M, BLOCK_D]
            raw = product(q, tl.trans(part), raw)
    k = load_features(
        of.key, b, first_key, there, query.columns, query.used, BLOCK_N
    )  # [BLOCK_N, W]
    if query.q is not None:
        raw = product(query.q, tl.trans(k), raw)
    v = load_tile(
        of.value, b, place.hk, first_key, there, TILE.dv, BLOCK_N, TILE.block_dv
    )  # [BLOCK_N, BLOCK_DV]
    if of.content_bias is not None:
        raw += load_content_bias(of.content_bias, b, h, keys, S)[None, :]
    scores, cap = finish(raw, bias, of.terms, sizes.scale)  # [BLOCK_M, BLOCK_N]
    seen = None
    if PARTIAL:
        seen = pairs_visible(of.visible, of.terms, pairs, of_rows.lo, of_rows.hi, T, S, bias)
    _, slope = weigh(scores, of_rows.terms, seen, of.terms, h, sizes.scale)
    dp = product(of_rows.do, tl.trans(v), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
    keep = None
    if of.dropout is not None:
        keep = kept(of.dropout, b, h, rows, first_key, BLOCK_N)
    dscores = gradient_of_tile(slope, dp, keep, cap, seen, of_rows.terms, of)
    if PARTIAL:
        k = finite_part(k)
    return product(dscores.to(k.dtype), k, dmixed)


@triton.jit
def _of_head(
    of, reads, query, lo, hi, visits, written, split, place, sizes, splits, TILE: tl.constexpr
):
    """Add the term of the head of `place` to `dquery` at its columns, and store the program's part of its `dmixing`
    there."""
    BLOCK_M: tl.constexpr = TILE.block_m
    b, h, first_row, rows = place.b, place.h, place.first, place.at
    own = first_row // BLOCK_M
    do = load_tile(
        reads.dattended, b, h, first_row, rows < sizes.T, TILE.dv, BLOCK_M, TILE.block_dv
    )  # [BLOCK_M, BLOCK_DV]
    row_terms = load_row_terms(reads, head_gate(reads.gate, b, h, TILE), b, h, rows, sizes, TILE)
    of_rows = HeadRows(do, as_columns(row_terms), lo[:, None], hi[:, None])
    dmixed = tl.zeros((BLOCK_M, query.columns.shape[0]), tl.float32)
    for number in range(visits.full_start, visits.full_end):
        tile = full_tile(of.visible, b, h, own, number)
        dmixed = _keys_tile(of, query, of_rows, dmixed, tile, place, sizes, False, TILE)
    for number in range(partial_count(visits)):
        tile = partial_tile(of.visible, b, h, own, number, visits)
        dmixed = _keys_tile(of, query, of_rows, dmixed, tile, place, sizes, True, TILE)
    # Rows that see nothing take part in no sum, whatever stands in them or in the keys beside them.
    seeing = row_terms.lse != float("inf")
    dmixed = tl.where(seeing[:, None], dmixed * sizes.scale, 0.0)
    part = split * splits.batches + b
    _finish_head(of, dmixed, seeing, query.chunks, query.first, written, part, place, sizes, TILE)


@triton.jit
def _finish_head(
    of, dmixed, seeing, chunks, number, written, part, place, sizes, TILE: tl.constexpr
):
    """Add mixing * `dmixed` [BLOCK_M, W] to `dquery`, and store the column sums of query * `dmixed` for `dmixing`.

    The features are those of the chunks from place `number` of their list on. W is split in halves down to one chunk:
    what is read from memory needs registers beside `dmixed`.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_D: tl.constexpr = TILE.block_d
    if dmixed.shape[1] > BLOCK_D:
        low, high = halves(dmixed)
        _finish_head(of, low, seeing, chunks, number, written, part, place, sizes, TILE)
        number += low.shape[1] // BLOCK_D
        _finish_head(of, high, seeing, chunks, number, written, part, place, sizes, TILE)
    else:
        b, h, T = place.b, place.h, sizes.T
        column = chunk_at(chunks, number) * BLOCK_D
        columns = column + tl.arange(0, BLOCK_D)
        end = tl.where(chunks.length > number, T, 0)
        if written.dquery is not None:
            vector = load_mixing(of.mixing, h, columns, columns < TILE.d)[None, :]
            # Rows that see nothing add nothing, whatever the mixing vector holds.
            term = tl.where(seeing[:, None], vector * dmixed, 0.0)
            add_columns(
                written.dquery, part, place.first, end, column, term, TILE.d, BLOCK_M, BLOCK_D
            )
        if written.dmixing is not None:
            q = load_columns(of.query, b, place.first, seeing, column, TILE.d, BLOCK_M, BLOCK_D)
            tile = b * tl.cdiv(T, BLOCK_M) + place.first // BLOCK_M
            at = (tile * sizes.H + h).to(tl.int64) * TILE.d
            tl.store(
                written.dmixing + at + columns, tl.sum(q.to(tl.float32) * dmixed, 0),
                mask=columns < tl.where(chunks.length > number, TILE.d, 0),
            )  # fmt: skip


@triton.jit
def _queries_kernel(of, reads, written, sizes, splits, SKIPS, TILE: tl.constexpr):
    """A program owns BLOCK_M query rows and goes through the heads, or a part of them (`splits`).

    What a head adds to `dquery` is added in memory, in float32, once a head: `dmixing` asks for the sum of the head
    alone, and both do not fit on chip. The program writes its part of `dmixing`; both outputs start as zeros. A head
    that uses more than `TILE.resident` features is computed once for every `TILE.resident` features of `dmixed`. With
    SKIPS 0 these are all features, since `dmixing` is asked for where `mixing` is 0 too.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_D: tl.constexpr = TILE.block_d
    RESIDENT: tl.constexpr = TILE.resident
    H, T, S = sizes.H, sizes.T, sizes.S
    tiles = tl.cdiv(T, BLOCK_M)
    own = tiles - 1 - tl.program_id(0) % tiles
    b = tl.program_id(0) // tiles % splits.batches
    split = tl.program_id(0) // (tiles * splits.batches)
    first_row = own * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    if of.visible.by_head is None:
        lo, hi = ranges(of.visible, b, b * 0, rows, T, S)  # [BLOCK_M]
        if of.visible.lists is None:
            visits = tiles_in_ranges(of.visible, b, b * 0, lo, hi, rows, T, TILE.block_n)
    heads = tl.cdiv(H, splits.shares)
    # Addresses that are the same for all heads are not hoisted: they would take registers from the loops over tiles.
    for index in tl.range(0, tl.minimum(heads, H - split * heads), disable_licm=True):
        h = split * heads + index
        place = Place(b, h, h // sizes.group, first_row, rows)
        if of.visible.by_head is not None:
            lo, hi = ranges(of.visible, b, h, rows, T, S)
            if of.visible.lists is None:
                visits = tiles_in_ranges(of.visible, b, h, lo, hi, rows, T, TILE.block_n)
        if of.visible.lists is not None:
            visits = listed_tiles(of.visible, b, h, own, T)
        active = active_chunks(of.mixing, h, TILE)
        count = tl.where(SKIPS == 0, tl.cdiv(TILE.d, BLOCK_D), active.length)
        numbers = tl.where(SKIPS == 0, ALL_CHUNKS, active.numbers)
        # A closed head has no chunks, and so takes none of the branches below.
        count = tl.where(open_rows(reads.gate, b, h, T, TILE) == 0, 0, count)
        chunks = Chunks(count, numbers)
        for doubling in tl.static_range(0, 5):  # widths of up to MOST_CHUNKS chunks
            if (BLOCK_D << doubling) <= RESIDENT:  # noqa: SIM102 (known when it is compiled)
                if (count > (1 << doubling) // 2) & (count <= (1 << doubling)):
                    columns, used = active_features(chunks, 0, BLOCK_D << doubling, TILE)
                    q = load_features(of.query, b, first_row, rows < T, columns, used, BLOCK_M)
                    q = mixed(q, of.mixing, h, columns, used)  # [BLOCK_M, BLOCK_D << doubling]
                    query = MixedQuery(q, columns, used, active, chunks, 0)
                    _of_head(
                        of, reads, query, lo, hi, visits, written, split, place, sizes, splits, TILE
                    )
        if TILE.chunks * BLOCK_D > RESIDENT:  # noqa: SIM102
            if count * BLOCK_D > RESIDENT:
                for number in range(0, count, RESIDENT // BLOCK_D):
                    columns, used = active_features(chunks, number, RESIDENT, TILE)
                    query = MixedQuery(None, columns, used, active, chunks, number)
                    _of_head(
                        of, reads, query, lo, hi, visits, written, split, place, sizes, splits, TILE
                    )


def queries_pass(call: Call, first: FirstPass, dquery: Tensor, dmixing_rows: Tensor) -> None:
    """Fill `dquery` and `dmixing_rows`; an empty one is not computed."""
    if not (dquery.numel() or dmixing_rows.numel()):
        return
    B, H, T, Ds, Dv = call.B, call.H, call.T, call.D, call.Dv
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
    written = QueriesWritten(rows_of(part) if dquery.numel() else None, mixing_parts)
    skips = int(mixing_parts is None or not call.closed_grad)
    launch(
        _queries_kernel, B * row_tiles * splits, call.query, tiles,
        of, first.reads, written, sizes_of(call), Splits(B, splits), skips,
        TILE=tile_constants(
            tiles, Ds, Dv, mixes=True, gate=first.kind, activation=call.gate_activation
        ),
    )  # fmt: skip
    sum_parts(part, dquery, splits)
    if mixing_parts is not None:
        torch.sum(mixing_parts, 1, out=dmixing_rows)
