"""Collaborative attention backward in Triton: `dkey`, `dvalue` and `dcontent_bias`, by tiles of keys.

    p = exp(scores - lse)        dp = dattended value^T        dscores = scale * p * (dp - delta)
    dvalue_h = p^T dattended     dcontent_bias_h = colsum(dscores)
    dkey = sum over h of dscores_h^T (query * mixing_h)

Dropout multiplies `p` in `dvalue`, and `dp`, by what it keeps. Tiles of scores are transposed, `[BLOCK_N, BLOCK_M]`.
"""

from __future__ import annotations

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
from heads_kernels.ops.triton.load import load_columns, load_tile, store_columns, store_tile
from heads_kernels.ops.triton.operands import (
    has_terms,
    rows_of,
)
from heads_kernels.ops.triton.rows import FirstPass, load_row_terms
from heads_kernels.ops.triton.scores import finish, load_bias, scale_log2_of
from heads_kernels.ops.triton.softmax import kept, probabilities, product
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import chunks_of, padded, tiles_for
from heads_kernels.ops.triton.visible import (
    full_tile,
    listed_tiles,
    pairs_visible,
    partial_tile,
    ranges,
    tiles_that_see,
)


@triton.jit
def _rows_tile(
    query, key, v, dout, mixing, content, gate, of_head, lse, delta, terms, visible, dropout, dkey, dvalue, dcontent,
    tile,
    count, numbers, slice_column, b, h, H, T, S, first_key, scale,
    PARTIAL: tl.constexpr, NEEDS_KEY: tl.constexpr, NEEDS_SCORES: tl.constexpr,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, DS: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """`dkey` [BLOCK_N, SLICE], `dvalue` [BLOCK_N, BLOCK_DV] and `dcontent` of head h after one tile of query rows."""
    first_row = tile * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    keys = first_key + tl.arange(0, BLOCK_N)
    bias = load_bias(terms, b, h, rows[None, :], keys[:, None], T, S)
    raw = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for place in range(count):
        column = chunk_at(numbers, place) * BLOCK_D
        k = load_columns(
            key, b, first_key, keys < S, column, DS, BLOCK_N, BLOCK_D
        )  # [BLOCK_N, BLOCK_D]
        q = load_columns(
            query, b, first_row, rows < T, column, DS, BLOCK_M, BLOCK_D
        )  # [BLOCK_M, BLOCK_D]
        raw = product(
            k,
            tl.trans(
                mixed(
                    q,
                    mixing,
                    h,
                    column + tl.arange(0, BLOCK_D),
                    column + tl.arange(0, BLOCK_D) < DS,
                )
            ),
            raw,
        )
    row_lse, row_delta, g, finite = load_row_terms(
        lse, delta, gate, of_head, b, h, b * H + h, rows, T, KIND, ACTIVATION
    )
    if not PARTIAL:  # all rows are there, and what they hold reaches every key
        finite = rows < T
    do = load_tile(dout, b, h, first_row, finite, DV, BLOCK_M, v.shape[1])  # [BLOCK_M, BLOCK_DV]
    scores, slope = finish(raw + content[:, None], bias, terms, scale)  # [BLOCK_N, BLOCK_M]
    p = probabilities(scores, row_lse[None, :], scale_log2_of(scale, terms))
    if PARTIAL:
        lo, hi = ranges(visible, b, rows, T, S)
        seen = pairs_visible(
            visible, terms, b, h, lo[None, :], hi[None, :], rows[None, :], keys[:, None], T, S, bias
        )
        p = tl.where(seen, p, 0.0)
    weights = p * g[None, :]
    if dropout is not None:
        keep = tl.trans(kept(dropout, b, h, rows, first_key, BLOCK_N))
        weights = tl.where(keep, weights * dropout.scale, 0.0)
    dvalue = product(weights.to(do.dtype), do, dvalue)
    if NEEDS_SCORES:
        dp = product(v, tl.trans(do), tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
        if dropout is not None:
            dp = tl.where(keep, dp * dropout.scale, 0.0)
        dscores = p * (dp * g[None, :] - row_delta[None, :]) * slope
        if PARTIAL:
            dscores = tl.where(seen, dscores, 0.0)
        dcontent += tl.sum(dscores, 1)
        if NEEDS_KEY:
            q_slice = load_columns(
                query, b, first_row, finite, slice_column, DS, BLOCK_M, SLICE
            )  # [BLOCK_M, SLICE]
            dkey = product(
                dscores.to(do.dtype),
                mixed(
                    q_slice,
                    mixing,
                    h,
                    slice_column + tl.arange(0, SLICE),
                    slice_column + tl.arange(0, SLICE) < DS,
                ),
                dkey,
            )
    return dkey, dvalue, dcontent


@triton.jit
def _keys_kernel(
    query, key, value, dout, mixing, content_bias, gate, lse, delta, terms, visible, dropout, dkey_out, dvalue_out,
    dcontent_out, B, H, T, S, GROUP, SPLITS, scale,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, DS: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNKS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """A program owns a SLICE of features of BLOCK_N keys and sums `dkey` over the heads on chip, for one store.

    Where tiles alone would not fill the GPU it takes a SPLITS-th of the heads, whole groups of GROUP that share a value
    head, and the parts are added up afterwards. The program of the first slice also stores `dvalue` of every group and
    `dcontent_bias` of every head. Where SLICE is narrower than Ds, scores are computed again for every slice.
    """
    tiles = tl.cdiv(S, BLOCK_N)
    slices = 1 if dkey_out is None else tl.cdiv(DS, SLICE)
    first_key = (tl.program_id(0) % tiles) * BLOCK_N
    column = (tl.program_id(0) // tiles % slices) * SLICE
    b = tl.program_id(0) // (tiles * slices) % B
    split = tl.program_id(0) // (tiles * slices * B)
    keys = first_key + tl.arange(0, BLOCK_N)
    own = first_key // BLOCK_N
    if visible.lists is None:
        start, full_start, full_end, end = tiles_that_see(
            visible, b, first_key, T, S, BLOCK_N, BLOCK_M
        )
    dkey = tl.zeros((BLOCK_N, SLICE), tl.float32)
    dvalue = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)  # of the heads of a group so far
    heads = tl.cdiv(H // GROUP, SPLITS) * GROUP
    for index in range(tl.minimum(heads, H - split * heads)):
        h = split * heads + index
        count, numbers = active_chunks(mixing, h, DS, BLOCK_D, CHUNKS)
        if visible.lists is not None:
            start, full_start, full_end, end = listed_tiles(visible, b, h, own, T)
        slice_mixing = load_mixing(
            mixing, h, column + tl.arange(0, SLICE), column + tl.arange(0, SLICE) < DS
        )  # [SLICE]
        content = tl.zeros((BLOCK_N,), tl.float32)
        if content_bias is not None:
            content = load_content_bias(content_bias, b, h, keys, S)
        v = load_tile(
            value, b, h // GROUP, first_key, keys < S, DV, BLOCK_N, BLOCK_DV
        )  # [BLOCK_N, BLOCK_DV]
        of_head = head_gate(gate, b, h, KIND, ACTIVATION)
        # A closed head has no steps; nor has one that does not use this slice, unless it is the first.
        used = tl.max((slice_mixing != 0.0).to(tl.int32))
        taking_part = tl.minimum(
            open_rows(gate, b, h, T, KIND, ACTIVATION), tl.where(column == 0, 1, used)
        )
        dvalue = tl.where(h % GROUP == 0, 0.0, dvalue)
        dcontent = tl.zeros((BLOCK_N,), tl.float32)
        for place in range(full_start, full_start + (full_end - full_start) * taking_part):
            tile = full_tile(visible, b, h, own, place)
            dkey, dvalue, dcontent = _rows_tile(
                query, key, v, dout, mixing, content, gate, of_head, lse, delta, terms, visible, dropout, dkey,
                dvalue, dcontent,
                tile, count, numbers, column, b, h, H, T, S, first_key, scale,
                False, dkey_out is not None, dkey_out is not None or dcontent_out is not None, KIND, ACTIVATION, DS, DV,
                BLOCK_M, BLOCK_N, BLOCK_D, SLICE,
            )  # fmt: skip
        for place in range((full_start - start + end - full_end) * taking_part):
            tile = partial_tile(visible, b, h, own, place, start, full_start, full_end)
            dkey, dvalue, dcontent = _rows_tile(
                query, key, v, dout, mixing, content, gate, of_head, lse, delta, terms, visible, dropout, dkey,
                dvalue, dcontent,
                tile, count, numbers, column, b, h, H, T, S, first_key, scale,
                True, dkey_out is not None, dkey_out is not None or dcontent_out is not None, KIND, ACTIVATION, DS, DV,
                BLOCK_M, BLOCK_N, BLOCK_D, SLICE,
            )  # fmt: skip
        if dvalue_out is not None:
            # Not in the branch: one that reads an accumulator Triton 3.6 cannot compile for sm_100.
            of_group = dvalue.to(dvalue_out.ptr.dtype.element_ty)
        if column == 0:
            if dvalue_out is not None:
                end_of_keys = tl.where((h + 1) % GROUP == 0, S, 0)  # after the last head of a group
                store_tile(
                    dvalue_out,
                    b,
                    h // GROUP,
                    first_key,
                    end_of_keys,
                    of_group,
                    DV,
                    BLOCK_N,
                    BLOCK_DV,
                )
            if dcontent_out is not None:
                tl.store(
                    dcontent_out + (b * H + h).to(tl.int64) * S + keys,
                    dcontent * scale,
                    mask=keys < S,
                )
    if dkey_out is not None:
        store_columns(
            dkey_out, split * B + b, first_key, S, column, dkey * scale, DS, BLOCK_N, SLICE
        )


def keys_pass(
    call: Call, first: FirstPass, dkey: Tensor, dvalue: Tensor, dcontent_bias: Tensor
) -> None:
    """Fill `dkey`, `dvalue` and `dcontent_bias`; an empty one is not computed."""
    if not (dkey.numel() or dvalue.numel() or dcontent_bias.numel()):
        return
    B, H, T, S, Ds, Dv = call.sizes
    groups = max(call.value.shape[1], 1)  # of heads that share a value head
    tiles = tiles_for("collaborative_attention.keys", call.query, Ds, Dv, has_terms(call))
    width = tiles.block_slice
    programs = B * -(-S // tiles.block_n) * (-(-Ds // width) if dkey.numel() else 1)
    splits = splits_of(groups, programs, call.query)
    part = split_parts(dkey, splits)
    of = first.operands
    launch(
        _keys_kernel, programs * splits, call.query, tiles,
        of.query, of.key, of.value, first.dattended, of.mixing, of.content_bias, first.gate, first.lse, first.delta,
        of.terms, visible_to_tiles(call, of.terms, of.visible, tiles, by_keys=True), of.dropout,
        rows_of(part) if dkey.numel() else None, rows_of(dvalue) if dvalue.numel() else None,
        dcontent_bias if dcontent_bias.numel() else None,
        B, H, T, S, max(H // groups, 1), splits, call.scale,
        KIND=first.kind, ACTIVATION=call.gate_activation, DS=Ds, DV=Dv,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=tiles.block_d, BLOCK_DV=padded(Dv),
        CHUNKS=chunks_of(Ds, tiles.block_d), SLICE=width,
    )  # fmt: skip
    sum_parts(part, dkey, splits)
