"""Collaborative attention forward in Triton: `out_h = act(gate_h) * softmax(scale * ((Q * m_h) K^T + bias_h)) V_h`."""

from __future__ import annotations

import triton
import triton.language as tl

from heads_kernels.ops.collaborative_attention.triton_attend import attend
from heads_kernels.ops.operator import Call, Results
from heads_kernels.ops.triton.gate import open_rows, times_gate
from heads_kernels.ops.triton.load import store_tile
from heads_kernels.ops.triton.operands import (
    content_bias_of,
    dropout_of,
    gate_kind,
    gate_of,
    mixing_of,
    rows_of,
    terms_of,
    with_positive_scale,
)
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import chunks_of, launch, padded, tiles_for


@triton.jit
def _forward_kernel(
    query, key, value, mixing, content_bias, gate, terms, visible, dropout, out, attended_out, lse_out, H, T, S, scale,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, DS: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_M rows of `out` of one head. Heads of one tile of rows follow each other, for they read
    the same query and key; the last rows (the longest of a causal mask) come first. A closed head writes its zeros."""
    tiles = tl.cdiv(T, BLOCK_M)
    h = tl.program_id(0) % H
    b = tl.program_id(0) // (H * tiles)
    first_row = (tiles - 1 - tl.program_id(0) // H % tiles) * BLOCK_M
    taking_part = open_rows(gate, b, h, T, KIND, ACTIVATION)
    attended, lse, sees = attend(
        query, key, value, mixing, content_bias, terms, visible, dropout, b, h, first_row, taking_part, S, scale,
        DS, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, CHUNKS,
    )  # fmt: skip
    if attended_out is not None:
        store_tile(attended_out, b, h, first_row, T, attended, DV, BLOCK_M, BLOCK_DV)
    rows = first_row + tl.arange(0, BLOCK_M)
    if lse_out is not None:
        tl.store(lse_out + (b * H + h).to(tl.int64) * T + rows, lse, mask=rows < T)
    gated = times_gate(attended, gate, b, h, rows, T, KIND, ACTIVATION, DV, BLOCK_DV)
    # Rows that see nothing are 0, whatever their gate.
    gated = tl.where(sees[:, None], gated, 0.0)
    store_tile(out, b, h, first_row, T, gated, DV, BLOCK_M, BLOCK_DV)


def forward_pass(call: Call, outputs: Results) -> None:
    """Fill `outputs` (out, attended, lse); empty ones are not kept."""
    out, attended, lse = outputs
    (B, T, Ds), (_, H, S, Dv) = call.query.shape, call.value.shape
    scale, query, content_bias = with_positive_scale(call.scale, call.query, call.content_bias)
    tiles = tiles_for("collaborative_attention.forward", call.query, Ds, Dv)
    launch(
        _forward_kernel, B * H * -(-T // tiles.block_m), query, tiles,
        rows_of(query), rows_of(call.key), rows_of(call.value), mixing_of(call.mixing), content_bias_of(content_bias),
        gate_of(call.gate), terms_of(call), visible_to_tiles(call, tiles), dropout_of(call.seed, call.dropout_p),
        rows_of(out), rows_of(attended) if attended.numel() else None, lse if lse.numel() else None, H, T, S, scale,
        KIND=gate_kind(call.gate), ACTIVATION=call.gate_activation, DS=Ds, DV=Dv,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=tiles.block_d, BLOCK_DV=padded(Dv),
        CHUNKS=chunks_of(Ds, tiles.block_d),
    )  # fmt: skip
