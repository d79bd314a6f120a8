"""Collaborative attention backward in Triton: `dkey`, `dvalue` and `dcontent_bias`, by tiles of keys.

    p = exp(scores - lse)        dp = dattended value^T        dscores = scale * p * (dp - delta)
    dvalue_h = p^T dattended     dcontent_bias_h = colsum(dscores)
    dkey = sum over h of dscores_h^T (query * mixing_h)

Dropout multiplies `p` in `dvalue`, and `dp`, by what it keeps. Tiles of scores are transposed, `[BLOCK_N, BLOCK_M]`.

A head's features are gathered as in the forward pass (`attend`): those of the keys stay on chip for the whole head,
and a tile of query rows is loaded and mixed once, for the scores and for `dkey`. A head's sum is added to `dkey` in
memory, in float32; `collaborative_queries` has the reason for that and for `disable_licm`.
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
    Chunks,
    active_chunks,
    active_features,
    add_chunks,
    chunk_at,
    load_content_bias,
    mixed,
)
from heads_kernels.ops.triton.entmax import dropped, gradient_of_tile, weigh
from heads_kernels.ops.triton.gate import head_gate, open_rows
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import load_columns, load_features, load_tile, store_tile
from heads_kernels.ops.triton.operands import (
    Pairs,
    Place,
    Rows,
    Splits,
    has_terms,
    rows_of,
    sizes_of,
)
from heads_kernels.ops.triton.rows import FirstPass, as_rows, load_row_terms
from heads_kernels.ops.triton.scores import finish, load_bias
from heads_kernels.ops.triton.softmax import kept, product
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import tile_constants, tiles_for
from heads_kernels.ops.triton.visible import (
    full_tile,
    listed_tiles,
    pairs_visible,
    partial_count,
    partial_tile,
    ranges,
    tiles_that_see,
)


class HeadKeys(NamedTuple):
    """The keys of a program for a head, in a kernel.

    `columns` and `used` [W] are the features of the head's chunks from place `first` of their list on, `k` [BLOCK_N, W]
    the keys there; None where the head uses more features than these: scores are computed chunk by chunk then.
    """

    k: Any
    v: Any  # [BLOCK_N, BLOCK_DV]
    content: Any  # [BLOCK_N], the content bias
    columns: Any
    used: Any
    chunks: Any
    first: Any


class HeadSums(NamedTuple):
    """Of a head, in a kernel: `dkey` [BLOCK_N, W], `dvalue` [BLOCK_N, BLOCK_DV], `dcontent` [BLOCK_N]."""

    dkey: Any
    dvalue: Any
    dcontent: Any


class KeysWritten(NamedTuple):
    """What the kernel writes; None for what is not asked for."""

    dkey: Rows | None  # float32
    dvalue: Rows | None
    dcontent_bias: Tensor | None
    end: None = None


@triton.jit
def _rows_tile(
    of, reads, of_head, keys, sums, tile, place, sizes, PARTIAL: tl.constexpr, NEEDS_KEY: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """`sums` of the head of `place` after one tile of query rows."""
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_D: tl.constexpr = TILE.block_d
    b, h, T, S = place.b, place.h, sizes.T, sizes.S
    first_row = tile * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    pairs = Pairs(b, h, rows[None, :], place.at[:, None])
    bias = load_bias(of.terms, pairs, T, S)
    row_terms = load_row_terms(reads, of_head, b, h, rows, sizes, TILE)
    finite = row_terms.finite
    if not PARTIAL:  # all rows are there, and what they hold reaches every key
        finite = rows < T
    raw = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if keys.k is None:
        for number in range(keys.chunks.length):
            column = chunk_at(keys.chunks, number) * BLOCK_D
            features = column + tl.arange(0, BLOCK_D)
            k = load_columns(of.key, b, place.first, place.at < S, column, TILE.d, BLOCK_N, BLOCK_D)
            part = load_columns(of.query, b, first_row, finite, column, TILE.d, BLOCK_M, BLOCK_D)
            part = mixed(part, of.mixing, h, features, features < TILE.d)  # [BLOCK_M, BLOCK_D]
            raw = product(k, tl.trans(part), raw)
    if (keys.k is not None) or NEEDS_KEY:
        q = load_features(of.query, b, first_row, finite, keys.columns, keys.used, BLOCK_M)
        q = mixed(q, of.mixing, h, keys.columns, keys.used)  # [BLOCK_M, W]
    if keys.k is not None:
        raw = product(keys.k, tl.trans(q), raw)
    do = load_tile(
        reads.dattended, b, h, first_row, finite, TILE.dv, BLOCK_M, TILE.block_dv
    )  # [BLOCK_M, BLOCK_DV]
    scores, cap = finish(
        raw + keys.content[:, None], bias, of.terms, sizes.scale
    )  # [BLOCK_N, BLOCK_M]
    seen = None
    if PARTIAL:
        lo, hi = ranges(of.visible, b, h, rows, T, S)
        seen = pairs_visible(of.visible, of.terms, pairs, lo[None, :], hi[None, :], T, S, bias)
    row_terms = as_rows(row_terms)
    p, slope = weigh(scores, row_terms, seen, of.terms, h, sizes.scale)
    keep = None
    if of.dropout is not None:
        keep = tl.trans(kept(of.dropout, b, h, rows, place.first, BLOCK_N))
    weights = dropped(p * row_terms.g, keep, of.dropout)
    dvalue = product(weights.to(do.dtype), do, sums.dvalue)
    dkey, dcontent = sums.dkey, sums.dcontent
    if TILE.needs_key:
        dp = product(keys.v, tl.trans(do), tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
        dscores = gradient_of_tile(slope, dp, keep, cap, seen, row_terms, of)
        dcontent += tl.sum(dscores, 1)
        if NEEDS_KEY:
            dkey = product(dscores.to(do.dtype), q, dkey)
    return HeadSums(dkey, dvalue, dcontent)


@triton.jit
def _of_head(of, reads, keys, visits, written, split, place, sizes, splits, TILE: tl.constexpr):
    """`dvalue` and `dcontent` of the head of `place`. What it adds to `dkey` at its columns is added in memory, in
    float32."""
    BLOCK_N: tl.constexpr = TILE.block_n
    b, h = place.b, place.h
    own = place.first // BLOCK_N
    of_head = head_gate(reads.gate, b, h, TILE)
    NEEDS_KEY: tl.constexpr = written.dkey is not None
    sums = HeadSums(
        tl.zeros((BLOCK_N, keys.columns.shape[0]), tl.float32),
        tl.zeros((BLOCK_N, TILE.block_dv), tl.float32),
        tl.zeros((BLOCK_N,), tl.float32),
    )
    for number in range(visits.full_start, visits.full_end):
        tile = full_tile(of.visible, b, h, own, number)
        sums = _rows_tile(
            of, reads, of_head, keys, sums, tile, place, sizes, False, NEEDS_KEY, TILE
        )
    for number in range(partial_count(visits)):
        tile = partial_tile(of.visible, b, h, own, number, visits)
        sums = _rows_tile(of, reads, of_head, keys, sums, tile, place, sizes, True, NEEDS_KEY, TILE)
    if written.dkey is not None:
        add_chunks(
            written.dkey, split * splits.batches + b, place.first, sizes.S, keys.chunks, keys.first,
            sums.dkey * sizes.scale, BLOCK_N, TILE,
        )  # fmt: skip
    return sums.dvalue, sums.dcontent


@triton.jit
def _keys_kernel(of, reads, written, sizes, splits, TILE: tl.constexpr):
    """A program owns BLOCK_N keys and goes through the heads.

    Where tiles alone would not fill the GPU it takes a part of the heads (`splits`), whole groups that share a value
    head, and the parts are added up afterwards. The sums of one head and `dvalue` of its group stay on chip; `dkey`
    starts as zeros. A head that uses more than `TILE.resident` features is computed once for every `TILE.resident`
    features of `dkey`.
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_D: tl.constexpr = TILE.block_d
    RESIDENT: tl.constexpr = TILE.resident
    H, T, S, group = sizes.H, sizes.T, sizes.S, sizes.group
    tiles = tl.cdiv(S, BLOCK_N)
    own = tl.program_id(0) % tiles
    first_key = own * BLOCK_N
    b = tl.program_id(0) // tiles % splits.batches
    split = tl.program_id(0) // (tiles * splits.batches)
    at = first_key + tl.arange(0, BLOCK_N)
    if (of.visible.lists is None) and (of.visible.by_head is None):
        visits = tiles_that_see(of.visible, b, b * 0, first_key, T, S, BLOCK_N, TILE.block_m)
    dvalue = tl.zeros((BLOCK_N, TILE.block_dv), tl.float32)  # of the heads of a group so far
    heads = tl.cdiv(H // group, splits.shares) * group
    # Addresses that are the same for all heads are not hoisted: they would take registers from the loops over tiles.
    for index in tl.range(0, tl.minimum(heads, H - split * heads), disable_licm=True):
        h = split * heads + index
        place = Place(b, h, h // group, first_key, at)
        if of.visible.lists is not None:
            visits = listed_tiles(of.visible, b, h, own, T)
        elif of.visible.by_head is not None:
            visits = tiles_that_see(of.visible, b, h, first_key, T, S, BLOCK_N, TILE.block_m)
        chunks = active_chunks(of.mixing, h, TILE)
        # A closed head has no chunks, and so takes none of the branches below.
        count = tl.where(open_rows(reads.gate, b, h, T, TILE) == 0, 0, chunks.length)
        chunks = Chunks(count, chunks.numbers)
        content = tl.zeros((BLOCK_N,), tl.float32)
        if of.content_bias is not None:
            content = load_content_bias(of.content_bias, b, h, at, S)
        v = load_tile(
            of.value, b, h // group, first_key, at < S, TILE.dv, BLOCK_N, TILE.block_dv
        )  # [BLOCK_N, BLOCK_DV]
        of_head = tl.zeros((BLOCK_N, TILE.block_dv), tl.float32)
        dcontent = tl.zeros((BLOCK_N,), tl.float32)
        for doubling in tl.static_range(0, 5):  # widths of up to MOST_CHUNKS chunks
            if (BLOCK_D << doubling) <= RESIDENT:  # noqa: SIM102 (known when it is compiled)
                if (count > (1 << doubling) // 2) & (count <= (1 << doubling)):
                    columns, used = active_features(chunks, 0, BLOCK_D << doubling, TILE)
                    k = load_features(of.key, b, first_key, at < S, columns, used, BLOCK_N)
                    keys = HeadKeys(k, v, content, columns, used, chunks, 0)
                    of_head, dcontent = _of_head(
                        of, reads, keys, visits, written, split, place, sizes, splits, TILE
                    )
        if TILE.chunks * BLOCK_D > RESIDENT:  # noqa: SIM102
            if count * BLOCK_D > RESIDENT:
                # Every round computes the same `dvalue` and `dcontent`, so the last ones are kept.
                for number in range(
                    0, count if written.dkey is not None else 1, RESIDENT // BLOCK_D
                ):
                    columns, used = active_features(chunks, number, RESIDENT, TILE)
                    keys = HeadKeys(None, v, content, columns, used, chunks, number)
                    of_head, dcontent = _of_head(
                        of, reads, keys, visits, written, split, place, sizes, splits, TILE
                    )
        dvalue = tl.where(h % group == 0, of_head, dvalue + of_head)
        if written.dvalue is not None:
            end_of_keys = tl.where((h + 1) % group == 0, S, 0)  # after the last head of a group
            store_tile(
                written.dvalue, b, h // group, first_key, end_of_keys, dvalue, TILE.dv, BLOCK_N, TILE.block_dv
            )  # fmt: skip
        if written.dcontent_bias is not None:
            here = written.dcontent_bias + (b * H + h).to(tl.int64) * S + at
            tl.store(here, dcontent * sizes.scale, mask=at < S)


def keys_pass(
    call: Call, first: FirstPass, dkey: Tensor, dvalue: Tensor, dcontent_bias: Tensor
) -> None:
    """Fill `dkey`, `dvalue` and `dcontent_bias`; an empty one is not computed."""
    if not (dkey.numel() or dvalue.numel() or dcontent_bias.numel()):
        return
    B, S, Ds, Dv = call.B, call.S, call.D, call.Dv
    groups = max(call.value.shape[1], 1)  # of heads that share a value head
    tiles = tiles_for("collaborative_attention.keys", call.query, Ds, Dv, has_terms(call))
    programs = B * -(-S // tiles.block_n)
    splits = splits_of(groups, programs, call.query)
    part = split_parts(dkey, splits, torch.float32).zero_()
    of = first.operands
    of = of._replace(visible=visible_to_tiles(call, of.terms, of.visible, tiles, by_keys=True))
    written = KeysWritten(
        rows_of(part) if dkey.numel() else None, rows_of(dvalue) if dvalue.numel() else None,
        dcontent_bias if dcontent_bias.numel() else None,
    )  # fmt: skip
    launch(
        _keys_kernel, programs * splits, call.query, tiles,
        of, first.reads, written, sizes_of(call), Splits(B, splits),
        TILE=tile_constants(
            tiles, Ds, Dv, mixes=True, gate=first.kind, activation=call.gate_activation,
            needs_key=dkey.numel() > 0 or dcontent_bias.numel() > 0,
        ),
    )  # fmt: skip
    sum_parts(part, dkey, splits)
