"""The backward pass of both operators by tiles of query rows: `dquery` and `dmixing` (formulas as in `keys`).

    dmixed_h = dscores_h key
    dquery = sum over h of mixing_h * dmixed_h        dmixing_h = colsum(query * dmixed_h)

With mixing, the features of a head are gathered as in the forward pass (`score_tiles`): its mixed query stays on chip,
and a tile of keys is loaded once, for the scores and for `dmixed`. The sum of a head is added to `dquery` in memory, in
float32: heads gather different features, and there are no registers for the sums of all features. The loop over heads
hoists nothing (`disable_licm`): addresses that heads share would take registers from the loops over tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.call import Call
from heads_kernels.ops.buffers import split_parts, splits_of, sum_parts
from heads_kernels.ops.triton.gate import head_gate, open_rows
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import add_columns, load_features, load_values, store_tile
from heads_kernels.ops.triton.operands import Place, Splits, rows_of, sizes_of
from heads_kernels.ops.triton.rows import FirstPass, Written, along, dscores_of_tile, load_row_terms
from heads_kernels.ops.triton.score_tiles import (
    ALL_CHUNKS,
    Chunks,
    Features,
    KeyTiles,
    QueryRows,
    active_chunks,
    chunk_at,
    fill,
    gathered,
    halves,
    load_mixed,
    load_mixing,
    load_query,
    others,
    place_of_rows,
    scores_of_keys,
)
from heads_kernels.ops.triton.scores import finite_part, product
from heads_kernels.ops.triton.tiles import tile_constants, tiles_of_pass
from heads_kernels.ops.triton.visible import (
    full_tile,
    partial_count,
    partial_tile,
    ranges,
    tiles_in_ranges,
    tiles_seen,
    with_tile_lists,
)


@triton.jit
def _keys_tile(of, query, do, row_terms, dquery, number, sizes, PARTIAL: tl.constexpr, TILE: tl.constexpr):
    """`dquery` [BLOCK_M, W] of the head of `query` after the tile `number` of keys."""
    first = number * TILE.block_n
    tile = scores_of_keys(of, KeyTiles(), query, first, sizes, PARTIAL, TILE.block_n, TILE)
    dscores = dscores_of_tile(of, tile, do, row_terms, first, query.place, sizes, PARTIAL, TILE)
    k = tile.operand
    if PARTIAL:
        k = finite_part(k)
    return product(dscores.to(k.dtype), k, dquery)


@triton.jit
def _keys_of_head(of, reads, query, visits, taking_part, sizes, TILE: tl.constexpr):
    """`dquery` [BLOCK_M, W] of the head of `query` over all tiles of keys, and which rows see a key.

    Rows that see no key are 0, even if the keys of their tiles are not finite.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    place = query.place
    b, h, rows = place.b, place.h, place.at
    own = place.first // BLOCK_M
    row_terms = load_row_terms(reads, head_gate(reads.gate, b, h, TILE), b, h, rows, sizes, TILE)
    columns = along(row_terms, 1)
    do = load_values(reads.dattended, b, h, place.first, rows < taking_part, BLOCK_M, TILE)
    WIDTH: tl.constexpr = TILE.block_d if query.features.columns is None else query.features.columns.shape[0]
    dquery = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for number in range(visits.full_start, visits.full_end):
        tile = full_tile(of.visible, b, h, own, number)
        dquery = _keys_tile(of, query, do, columns, dquery, tile, sizes, False, TILE)
    for number in tl.range(0, partial_count(visits), num_stages=TILE.partial_stages):
        tile = partial_tile(of.visible, b, h, own, number, visits)
        dquery = _keys_tile(of, query, do, columns, dquery, tile, sizes, True, TILE)
    sees = row_terms.lse != float("inf")
    return tl.where(sees[:, None], dquery * sizes.scale, 0.0), sees


@triton.jit
def _gated_queries_kernel(of, reads, written, sizes, TILE: tl.constexpr):
    """A program owns BLOCK_M query rows of a head, in the order of the forward kernel. The rows of query and dout, and
    the sum, stay on chip. For a closed head it only writes zeros."""
    BLOCK_M: tl.constexpr = TILE.block_m
    place = place_of_rows(of, sizes, TILE)
    b, h, first_row, rows = place.b, place.h, place.first, place.at
    taking_part = open_rows(reads.gate, b, h, sizes.T, TILE)
    lo, hi = ranges(of.visible, b, h, rows, taking_part, sizes.S)  # [BLOCK_M]
    visits = tiles_seen(of.visible, place, first_row // BLOCK_M, lo, hi, taking_part, TILE.block_n)
    q = load_query(of, Features(), b, h, first_row, rows < taking_part, BLOCK_M, TILE)
    query = QueryRows(place, q, Features(), lo, hi)
    dquery, _ = _keys_of_head(of, reads, query, visits, taking_part, sizes, TILE)
    store_tile(written.dquery, b, h, first_row, sizes.T, dquery, TILE.d)


@triton.jit
def _finish_head(of, dmixed, sees, chunks, number, written, part, place, sizes, TILE: tl.constexpr):
    """Add mixing * `dmixed` [BLOCK_M, W] to `dquery`, and store the column sums of query * `dmixed` for `dmixing`.

    The features are those of the listed chunks from place `number` on. W is halved down to one chunk, since `dmixed`
    leaves few registers for the loads.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_D: tl.constexpr = TILE.block_d
    if dmixed.shape[1] > BLOCK_D:
        low, high = halves(dmixed)
        _finish_head(of, low, sees, chunks, number, written, part, place, sizes, TILE)
        number += low.shape[1] // BLOCK_D
        _finish_head(of, high, sees, chunks, number, written, part, place, sizes, TILE)
    else:
        b, h, T = place.b, place.h, sizes.T
        column = chunk_at(chunks, number) * BLOCK_D
        columns = column + tl.arange(0, BLOCK_D)
        end = tl.where(chunks.length > number, T, 0)
        if written.dquery is not None:
            vector = load_mixing(of.mixing, h, columns, columns < TILE.d)[None, :]
            # Rows that see no key add nothing, even if the mixing vector is not finite.
            term = tl.where(sees[:, None], vector * dmixed, 0.0)
            add_columns(written.dquery, part, place.first, end, column, term, TILE.d)
        if written.dmixing is not None:
            q = load_features(of.query, b, place.first, sees, columns, columns < TILE.d, BLOCK_M)
            tile = b * tl.cdiv(T, BLOCK_M) + place.first // BLOCK_M
            at = (tile * sizes.H + h).to(tl.int64) * TILE.d
            tl.store(
                written.dmixing + at + columns, tl.sum(q.to(tl.float32) * dmixed, 0),
                mask=columns < tl.where(chunks.length > number, TILE.d, 0),
            )  # fmt: skip


@triton.jit
def _add_head(of, reads, query, visits, written, split, sizes, splits, TILE: tl.constexpr):
    """Add the term of the head of `query` to the columns of `dquery` that it uses, and store the program's part of its
    `dmixing` there. Features of the query, if they give scores, are loaded here."""
    place, features = query.place, query.features
    b, h, first_row, there = place.b, place.h, place.first, place.at < sizes.T
    q, q_rest = None, None
    if features.scored is None:
        q = load_query(of, features, b, h, first_row, there, TILE.block_m, TILE)
    if features.rest is not None:
        q_rest = load_mixed(of, b, h, first_row, there, features.rest, features.rest_used, TILE.block_m)
    query = QueryRows(place, q, features, query.lo, query.hi, q_rest)
    dmixed, sees = _keys_of_head(of, reads, query, visits, sizes.T, sizes, TILE)
    part = split * splits.batches + b
    _finish_head(of, dmixed, sees, features.chunks, features.first, written, part, place, sizes, TILE)


@triton.jit
def _collaborative_queries_kernel(of, reads, written, sizes, splits, SKIPS, TILE: tl.constexpr):
    """A program owns BLOCK_M query rows and goes through the heads, or a part of them (`splits`).

    The term of a head is added to `dquery` in memory, in float32, once per head: `dmixing` needs the sum of a single
    head, and both sums do not fit on chip. The program writes its part of `dmixing`; both outputs start as zeros. A
    head that uses more than `TILE.resident` features is computed once for every `TILE.resident` features of `dmixed`.
    With SKIPS 0 it uses all features, since `dmixing` is needed where `mixing` is 0 too.
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
    for index in tl.range(0, tl.minimum(heads, H - split * heads), disable_licm=True):
        h = split * heads + index
        place = Place(b, h, h // sizes.group, first_row, rows)
        if of.visible.by_head is not None:
            lo, hi = ranges(of.visible, b, h, rows, T, S)
        if (of.visible.lists is not None) or (of.visible.by_head is not None):
            visits = tiles_seen(of.visible, place, own, lo, hi, T, TILE.block_n)
        active = active_chunks(of.mixing, h, TILE)
        count = tl.where(SKIPS == 0, tl.cdiv(TILE.d, BLOCK_D), active.length)
        numbers = tl.where(SKIPS == 0, ALL_CHUNKS, active.numbers)
        # A closed head has no chunks, so it takes none of the branches below.
        count = tl.where(open_rows(reads.gate, b, h, T, TILE) == 0, 0, count)
        chunks = Chunks(count, numbers)
        for doubling in tl.static_range(0, TILE.doublings):
            if fill(chunks, 1 << doubling):
                columns, used = gathered(chunks, 0, BLOCK_D << doubling, TILE)
                query = QueryRows(place, None, Features(columns, used, chunks), lo, hi)
                _add_head(of, reads, query, visits, written, split, sizes, splits, TILE)
        if TILE.chunks * BLOCK_D > RESIDENT and count * BLOCK_D > RESIDENT:
            for number in range(0, count, RESIDENT // BLOCK_D):
                columns, used = gathered(chunks, number, RESIDENT, TILE)
                if TILE.rest:
                    rest, rest_used = others(chunks, number, TILE)
                    features = Features(columns, used, chunks, number, None, rest, rest_used)
                else:
                    features = Features(columns, used, chunks, number, active)
                query = QueryRows(place, None, features, lo, hi)
                _add_head(of, reads, query, visits, written, split, sizes, splits, TILE)


def queries_pass(call: Call, first: FirstPass, dquery: Tensor, dmixing_rows: Tensor) -> None:
    """Fill `dquery` and `dmixing_rows`, except empty ones."""
    if not (dquery.numel() or dmixing_rows.numel()):
        return
    B, H, T, _ = call.sizes
    if H == 0:
        dquery.zero_()  # without heads no kernel writes it
        return
    tiles = tiles_of_pass(call, "queries")
    row_tiles = -(-T // tiles.block_m)
    of = with_tile_lists(call, first.operands, tiles, support=first.support)
    sizes = sizes_of(call)
    constants = tile_constants(call, tiles)
    if call.mixing is None:
        launch(
            _gated_queries_kernel, B * H * row_tiles, call.query, tiles,
            of, first.reads, Written(rows_of(dquery)), sizes, TILE=constants,
        )  # fmt: skip
        return
    splits = splits_of(H, B * row_tiles, call.query)
    part = split_parts(dquery, splits, torch.float32).zero_()
    mixing_parts = None
    if dmixing_rows.numel():
        mixing_parts = dmixing_rows.new_zeros((B, row_tiles, H, call.D))
    written = Written(rows_of(part) if dquery.numel() else None, dmixing=mixing_parts)
    skips = int(mixing_parts is None or not call.closed_grad)
    launch(
        _collaborative_queries_kernel, B * row_tiles * splits, call.query, tiles,
        of, first.reads, written, sizes, Splits(B, splits), skips, TILE=constants,
    )  # fmt: skip
    sum_parts(part, dquery, splits)
    if mixing_parts is not None:
        torch.sum(mixing_parts, 1, out=dmixing_rows)
