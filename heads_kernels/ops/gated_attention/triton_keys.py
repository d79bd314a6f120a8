"""Gated attention backward in Triton: `dkey` and `dvalue`, by tiles of keys.

    p = exp(scores - lse)        dp = dattended value^T        dscores = p * (dp - delta)        dattended = g * dout
    dvalue = p^T dattended       dkey = scale * dscores^T query

Dropout multiplies `p` in `dvalue`, and `dp`, by what it keeps. Tiles of scores are transposed, `[BLOCK_N, BLOCK_M]`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.ops.buffers import split_parts, splits_of, sum_parts
from heads_kernels.ops.operator import Call
from heads_kernels.ops.triton.entmax import dscores_of, weigh
from heads_kernels.ops.triton.gate import head_gate, open_rows
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import load_tile, store_tile
from heads_kernels.ops.triton.operands import has_terms, operator_of, rows_of
from heads_kernels.ops.triton.rows import FirstPass, load_row_terms
from heads_kernels.ops.triton.scores import finish, load_bias
from heads_kernels.ops.triton.softmax import kept, product
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import padded, tiles_for
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
    k, v, query, dout, gate, of_head, lse, delta, terms, visible, dropout, dkey, dvalue, tile, b, h, H, T, S,
    first_key, scale,
    PARTIAL: tl.constexpr, NEEDS_KEY: tl.constexpr, NEEDS_VALUE: tl.constexpr,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`dkey` [BLOCK_N, BLOCK_D] and `dvalue` [BLOCK_N, BLOCK_DV] after one tile of query rows of head h."""
    first_row = tile * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    row_lse, above, row_delta, g, finite = load_row_terms(
        lse, delta, gate, of_head, b, h, b * H + h, rows, T, KIND, ACTIVATION
    )
    if PARTIAL:
        q = load_tile(query, b, h, first_row, finite, D, BLOCK_M, k.shape[1])  # [BLOCK_M, BLOCK_D]
        do = load_tile(
            dout, b, h, first_row, finite, DV, BLOCK_M, v.shape[1]
        )  # [BLOCK_M, BLOCK_DV]
    else:
        q = load_tile(query, b, h, first_row, None, D, BLOCK_M, k.shape[1])
        do = load_tile(dout, b, h, first_row, None, DV, BLOCK_M, v.shape[1])
    keys = (first_key + tl.arange(0, BLOCK_N))[:, None]
    bias = load_bias(terms, b, h, rows[None, :], keys, T, S)
    zeros = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    raw = product(k, tl.trans(q), zeros)
    scores, cap = finish(raw, bias, terms, scale)  # [BLOCK_N, BLOCK_M]
    seen = None
    if PARTIAL:
        lo, hi = ranges(visible, b, rows, T, S)
        seen = pairs_visible(
            visible, terms, b, h, lo[None, :], hi[None, :], rows[None, :], keys, T, S, bias
        )
    p, slope = weigh(scores, row_lse[None, :], above[None, :], seen, terms, h, scale)
    weights = p * g[None, :]
    if dropout is not None:
        # As bytes: Triton cannot pass bits through shared memory.
        keep = tl.trans(kept(dropout, b, h, rows, first_key, BLOCK_N).to(tl.int8)) != 0
        weights = tl.where(keep, weights * dropout.scale, 0.0)
    if NEEDS_VALUE:
        dvalue = product(weights.to(do.dtype), do, dvalue)
    if NEEDS_KEY:
        dp = product(v, tl.trans(do), zeros)
        if dropout is not None:
            dp = tl.where(keep, dp * dropout.scale, 0.0)
        dscores = dscores_of(slope, dp * g[None, :], row_delta[None, :], cap, seen, terms)
        dkey = product(dscores.to(q.dtype), q, dkey)
    return dkey, dvalue


@triton.jit
def _keys_kernel(
    query, key, value, dout, gate, lse, delta, terms, visible, dropout, dkey_out, dvalue_out,
    B, H, T, S, GROUP, SPLITS, scale,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """A program owns BLOCK_N keys of a key head and sums over the query heads that read it (a SPLITS-th of them, where
    key heads alone would not fill the GPU; the parts are added up afterwards). Key, value and both sums stay on chip.
    """
    tiles = tl.cdiv(S, BLOCK_N)
    Hk = H // GROUP
    first_key = (tl.program_id(0) % tiles) * BLOCK_N
    split = tl.program_id(0) // (tiles * Hk * B)
    b = tl.program_id(0) // (tiles * Hk) % B
    hk = tl.program_id(0) // tiles % Hk
    keys = first_key + tl.arange(0, BLOCK_N)
    k = load_tile(key, b, hk, first_key, keys < S, D, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    v = load_tile(value, b, hk, first_key, keys < S, DV, BLOCK_N, BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
    dkey = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dvalue = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    own = first_key // BLOCK_N
    if visible.lists is None:
        start, full_start, full_end, end = tiles_that_see(
            visible, b, first_key, T, S, BLOCK_N, BLOCK_M
        )
    heads = tl.cdiv(GROUP, SPLITS)
    for index in range(tl.minimum(heads, GROUP - split * heads)):
        h = hk * GROUP + split * heads + index
        if visible.lists is not None:
            start, full_start, full_end, end = listed_tiles(visible, b, h, own, T)
        of_head = head_gate(gate, b, h, KIND, ACTIVATION)
        # A closed head has no tiles.
        taking_part = tl.minimum(open_rows(gate, b, h, T, KIND, ACTIVATION), 1)
        for place in range(full_start, full_start + (full_end - full_start) * taking_part):
            tile = full_tile(visible, b, h, own, place)
            dkey, dvalue = _rows_tile(
                k, v, query, dout, gate, of_head, lse, delta, terms, visible, dropout, dkey, dvalue, tile, b, h, H,
                T, S,
                first_key, scale, False, dkey_out is not None, dvalue_out is not None, KIND, ACTIVATION, D, DV,
                BLOCK_M, BLOCK_N,
            )  # fmt: skip
        for place in tl.range(0, (full_start - start + end - full_end) * taking_part, num_stages=1):
            tile = partial_tile(visible, b, h, own, place, start, full_start, full_end)
            dkey, dvalue = _rows_tile(
                k, v, query, dout, gate, of_head, lse, delta, terms, visible, dropout, dkey, dvalue, tile, b, h, H,
                T, S,
                first_key, scale, True, dkey_out is not None, dvalue_out is not None, KIND, ACTIVATION, D, DV,
                BLOCK_M, BLOCK_N,
            )  # fmt: skip
    part = split * B + b
    if dkey_out is not None:
        store_tile(dkey_out, part, hk, first_key, S, dkey * scale, D, BLOCK_N, BLOCK_D)
    if dvalue_out is not None:
        store_tile(dvalue_out, part, hk, first_key, S, dvalue, DV, BLOCK_N, BLOCK_DV)


def keys_pass(call: Call, first: FirstPass, dkey: Tensor, dvalue: Tensor) -> None:
    """Fill `dkey` and `dvalue`; an empty one is not computed.

    Of heads wider than 128 the sums of both do not fit into registers: each has a launch of its own.
    """
    if not (dkey.numel() or dvalue.numel()):
        return
    if dkey.numel() and dvalue.numel() and max(dkey.shape[3], dvalue.shape[3]) > 128:
        nothing = dkey.new_empty(0)
        keys_pass(call, first, dkey, nothing)
        keys_pass(call, first, nothing, dvalue)
        return
    (B, H, T, D), (_, Hk, S, Dv) = call.query.shape, call.value.shape
    tiles = tiles_for(f"{operator_of(call)}.keys", call.query, D, Dv, has_terms(call))
    programs = B * Hk * -(-S // tiles.block_n)
    group = H // Hk
    splits = splits_of(group, programs, call.query)
    parts = [(grad, split_parts(grad, splits)) for grad in (dkey, dvalue)]
    of = first.operands
    visible = visible_to_tiles(
        call, of.terms, of.visible, tiles, by_keys=True, support=first.support
    )
    launch(
        _keys_kernel, programs * splits, call.query, tiles,
        of.query, of.key, of.value, first.dattended, first.gate, first.lse, first.delta,
        of.terms, visible, of.dropout,
        *(rows_of(part) if grad.numel() else None for grad, part in parts),
        B, H, T, S, group, splits, call.scale,
        KIND=first.kind, ACTIVATION=call.gate_activation, D=D, DV=Dv,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=padded(D), BLOCK_DV=padded(Dv),
    )  # fmt: skip
    for grad, part in parts:
        sum_parts(part, grad, splits)
