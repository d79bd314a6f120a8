"""Collaborative attention backward in Triton: `dkey`, `dvalue` and `dcontent_bias`, by tiles of keys.

    p = exp(scores - lse)        dp = dattended value^T        dscores = scale * p * (dp - delta)
    dvalue_h = p^T dattended     dcontent_bias_h = colsum(dscores)
    dkey = sum over h of dscores_h^T (query * mixing_h)

Dropout multiplies `p` in `dvalue`, and `dp`, by what it keeps. Tiles of scores are transposed, `[BLOCK_N, BLOCK_M]`.

A head's features are gathered as in the forward pass (`attend`): those of the keys stay on chip for the whole head,
and a tile of query rows is loaded and mixed once, for the scores and for `dkey`.
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
    active_features,
    add_chunks,
    chunk_at,
    load_content_bias,
    mixed,
)
from heads_kernels.ops.triton.gate import head_gate, open_rows
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import load_columns, load_features, load_tile, store_tile
from heads_kernels.ops.triton.operands import has_terms, rows_of
from heads_kernels.ops.triton.rows import FirstPass, load_row_terms
from heads_kernels.ops.triton.scores import finish, load_bias, probabilities
from heads_kernels.ops.triton.softmax import kept, product
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
    of, k, v, content, columns, used, count, numbers, dout, gate, of_head, lse, delta, dkey, dvalue, dcontent,
    tile, b, h, H, T, S, first_key, scale,
    PARTIAL: tl.constexpr, NEEDS_KEY: tl.constexpr, NEEDS_SCORES: tl.constexpr,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, DS: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`dkey` [BLOCK_N, W], `dvalue` [BLOCK_N, BLOCK_DV] and `dcontent` of head h after one tile of query rows.

    Arguments as of `_of_head`; v [BLOCK_N, BLOCK_DV].
    """
    first_row = tile * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    keys = first_key + tl.arange(0, BLOCK_N)
    bias = load_bias(of.terms, b, h, rows[None, :], keys[:, None], T, S)
    row_lse, _, row_delta, g, finite = load_row_terms(
        lse, delta, gate, of_head, b, h, b * H + h, rows, T, KIND, ACTIVATION
    )
    if not PARTIAL:  # all rows are there, and what they hold reaches every key
        finite = rows < T
    raw = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if k is None:
        for place in range(count):
            column = chunk_at(numbers, place) * BLOCK_D
            features = column + tl.arange(0, BLOCK_D)
            k_chunk = load_columns(of.key, b, first_key, keys < S, column, DS, BLOCK_N, BLOCK_D)
            q_chunk = load_columns(of.query, b, first_row, finite, column, DS, BLOCK_M, BLOCK_D)
            q_chunk = mixed(q_chunk, of.mixing, h, features, features < DS)  # [BLOCK_M, BLOCK_D]
            raw = product(k_chunk, tl.trans(q_chunk), raw)
    if (k is not None) or NEEDS_KEY:
        q = load_features(of.query, b, first_row, finite, columns, used, BLOCK_M)
        q = mixed(q, of.mixing, h, columns, used)  # [BLOCK_M, W]
    if k is not None:
        raw = product(k, tl.trans(q), raw)
    do = load_tile(dout, b, h, first_row, finite, DV, BLOCK_M, v.shape[1])  # [BLOCK_M, BLOCK_DV]
    scores, slope = finish(raw + content[:, None], bias, of.terms, scale)  # [BLOCK_N, BLOCK_M]
    p = probabilities(scores, row_lse[None, :], scale, of.terms)
    if PARTIAL:
        lo, hi = ranges(of.visible, b, rows, T, S)
        seen = pairs_visible(
            of.visible, of.terms, b, h, lo[None, :], hi[None, :], rows[None, :], keys[:, None], T, S, bias
        )  # fmt: skip
        p = tl.where(seen, p, 0.0)
    weights = p * g[None, :]
    if of.dropout is not None:
        keep = tl.trans(kept(of.dropout, b, h, rows, first_key, BLOCK_N))
        weights = tl.where(keep, weights * of.dropout.scale, 0.0)
    dvalue = product(weights.to(do.dtype), do, dvalue)
    if NEEDS_SCORES:
        dp = product(v, tl.trans(do), tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
        if of.dropout is not None:
            dp = tl.where(keep, dp * of.dropout.scale, 0.0)
        dscores = p * (dp * g[None, :] - row_delta[None, :]) * slope
        if PARTIAL:
            dscores = tl.where(seen, dscores, 0.0)
        dcontent += tl.sum(dscores, 1)
        if NEEDS_KEY:
            dkey = product(dscores.to(do.dtype), q, dkey)
    return dkey, dvalue, dcontent


@triton.jit
def _of_head(
    of, k, v, content, columns, used, count, numbers, first_place, dout, gate, lse, delta, dkey_out,
    start, full_start, full_end, end, b, h, split, B, H, T, S, first_key, scale,
    NEEDS_SCORES: tl.constexpr, KIND: tl.constexpr, ACTIVATION: tl.constexpr, DS: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`dvalue` and `dcontent` of head h. What it adds to `dkey` at `columns` [W] is added in memory, in float32.

    `columns` and `used` are those of the head's chunks from `first_place` of the list on, `k` [BLOCK_N, W] the keys
    there. `k` is None where the head uses more features than these: scores are computed chunk by chunk then.
    """
    own = first_key // BLOCK_N
    of_head = head_gate(gate, b, h, KIND, ACTIVATION)
    dkey = tl.zeros((BLOCK_N, columns.shape[0]), tl.float32)
    dvalue = tl.zeros((BLOCK_N, v.shape[1]), tl.float32)
    dcontent = tl.zeros((BLOCK_N,), tl.float32)
    for place in range(full_start, full_end):
        tile = full_tile(of.visible, b, h, own, place)
        dkey, dvalue, dcontent = _rows_tile(
            of, k, v, content, columns, used, count, numbers, dout, gate, of_head, lse, delta, dkey, dvalue, dcontent,
            tile, b, h, H, T, S, first_key, scale,
            False, dkey_out is not None, NEEDS_SCORES, KIND, ACTIVATION, DS, DV, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    for place in range(full_start - start + end - full_end):
        tile = partial_tile(of.visible, b, h, own, place, start, full_start, full_end)
        dkey, dvalue, dcontent = _rows_tile(
            of, k, v, content, columns, used, count, numbers, dout, gate, of_head, lse, delta, dkey, dvalue, dcontent,
            tile, b, h, H, T, S, first_key, scale,
            True, dkey_out is not None, NEEDS_SCORES, KIND, ACTIVATION, DS, DV, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    if dkey_out is not None:
        add_chunks(
            dkey_out, split * B + b, first_key, S, numbers, count, first_place, dkey * scale, DS, BLOCK_N, BLOCK_D
        )  # fmt: skip
    return dvalue, dcontent


@triton.jit
def _keys_kernel(
    of, dout, gate, lse, delta, dkey_out, dvalue_out, dcontent_out, B, H, T, S, GROUP, SPLITS, scale,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, DS: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNKS: tl.constexpr, RESIDENT: tl.constexpr,
):  # fmt: skip
    """A program owns BLOCK_N keys and goes through the heads.

    Where tiles alone would not fill the GPU it takes a SPLITS-th of the heads, whole groups of GROUP that share a value
    head, and the parts are added up afterwards. The sums of one head and `dvalue` of its group stay on chip; `dkey_out`
    starts as zeros. A head that uses more than RESIDENT features is computed once for every RESIDENT features of
    `dkey`.
    """
    tiles = tl.cdiv(S, BLOCK_N)
    own = tl.program_id(0) % tiles
    first_key = own * BLOCK_N
    b = tl.program_id(0) // tiles % B
    split = tl.program_id(0) // (tiles * B)
    keys = first_key + tl.arange(0, BLOCK_N)
    NEEDS_SCORES: tl.constexpr = (dkey_out is not None) or (dcontent_out is not None)
    if of.visible.lists is None:
        start, full_start, full_end, end = tiles_that_see(
            of.visible, b, first_key, T, S, BLOCK_N, BLOCK_M
        )
    dvalue = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)  # of the heads of a group so far
    heads = tl.cdiv(H // GROUP, SPLITS) * GROUP
    # Addresses that are the same for all heads are not hoisted: they would take registers from the loops over tiles.
    for index in tl.range(0, tl.minimum(heads, H - split * heads), disable_licm=True):
        h = split * heads + index
        if of.visible.lists is not None:
            start, full_start, full_end, end = listed_tiles(of.visible, b, h, own, T)
        count, numbers = active_chunks(of.mixing, h, DS, BLOCK_D, CHUNKS)
        # A closed head has no chunks, and so takes none of the branches below.
        count = tl.where(open_rows(gate, b, h, T, KIND, ACTIVATION) == 0, 0, count)
        content = tl.zeros((BLOCK_N,), tl.float32)
        if of.content_bias is not None:
            content = load_content_bias(of.content_bias, b, h, keys, S)
        v = load_tile(
            of.value, b, h // GROUP, first_key, keys < S, DV, BLOCK_N, BLOCK_DV
        )  # [BLOCK_N, BLOCK_DV]
        of_head = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
        dcontent = tl.zeros((BLOCK_N,), tl.float32)
        for doubling in tl.static_range(0, 5):  # widths of up to MOST_CHUNKS chunks
            if (BLOCK_D << doubling) <= RESIDENT:  # noqa: SIM102 (known when it is compiled)
                if (count > (1 << doubling) // 2) & (count <= (1 << doubling)):
                    columns, used = active_features(
                        numbers, count, 0, DS, BLOCK_D, BLOCK_D << doubling
                    )
                    k = load_features(of.key, b, first_key, keys < S, columns, used, BLOCK_N)
                    of_head, dcontent = _of_head(
                        of, k, v, content, columns, used, count, numbers, 0, dout, gate, lse, delta, dkey_out,
                        start, full_start, full_end, end, b, h, split, B, H, T, S, first_key, scale,
                        NEEDS_SCORES, KIND, ACTIVATION, DS, DV, BLOCK_M, BLOCK_N, BLOCK_D,
                    )  # fmt: skip
        if CHUNKS * BLOCK_D > RESIDENT:  # noqa: SIM102
            if count * BLOCK_D > RESIDENT:
                # Every round computes the same `dvalue` and `dcontent`, so the last ones are kept.
                for place in range(0, count if dkey_out is not None else 1, RESIDENT // BLOCK_D):
                    columns, used = active_features(numbers, count, place, DS, BLOCK_D, RESIDENT)
                    of_head, dcontent = _of_head(
                        of, None, v, content, columns, used, count, numbers, place, dout, gate, lse, delta, dkey_out,
                        start, full_start, full_end, end, b, h, split, B, H, T, S, first_key, scale,
                        NEEDS_SCORES, KIND, ACTIVATION, DS, DV, BLOCK_M, BLOCK_N, BLOCK_D,
                    )  # fmt: skip
        dvalue = tl.where(h % GROUP == 0, of_head, dvalue + of_head)
        if dvalue_out is not None:
            end_of_keys = tl.where((h + 1) % GROUP == 0, S, 0)  # after the last head of a group
            store_tile(
                dvalue_out, b, h // GROUP, first_key, end_of_keys, dvalue, DV, BLOCK_N, BLOCK_DV
            )
        if dcontent_out is not None:
            at = dcontent_out + (b * H + h).to(tl.int64) * S + keys
            tl.store(at, dcontent * scale, mask=keys < S)


def keys_pass(
    call: Call, first: FirstPass, dkey: Tensor, dvalue: Tensor, dcontent_bias: Tensor
) -> None:
    """Fill `dkey`, `dvalue` and `dcontent_bias`; an empty one is not computed."""
    if not (dkey.numel() or dvalue.numel() or dcontent_bias.numel()):
        return
    B, H, T, S, Ds, Dv = call.sizes
    groups = max(call.value.shape[1], 1)  # of heads that share a value head
    tiles = tiles_for("collaborative_attention.keys", call.query, Ds, Dv, has_terms(call))
    programs = B * -(-S // tiles.block_n)
    splits = splits_of(groups, programs, call.query)
    part = split_parts(dkey, splits, torch.float32).zero_()
    of = first.operands
    of = of._replace(visible=visible_to_tiles(call, of.terms, of.visible, tiles, by_keys=True))
    launch(
        _keys_kernel, programs * splits, call.query, tiles,
        of, first.dattended, first.gate, first.lse, first.delta,
        rows_of(part) if dkey.numel() else None, rows_of(dvalue) if dvalue.numel() else None,
        dcontent_bias if dcontent_bias.numel() else None,
        B, H, T, S, max(H // groups, 1), splits, call.scale,
        KIND=first.kind, ACTIVATION=call.gate_activation, DS=Ds, DV=Dv,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=tiles.block_d, BLOCK_DV=padded(Dv),
        CHUNKS=chunks_of(Ds, tiles.block_d), RESIDENT=tiles.block_slice,
    )  # fmt: skip
    sum_parts(part, dkey, splits)
