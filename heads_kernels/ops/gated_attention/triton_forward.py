"""Gated attention forward in Triton: `out = act(gate) * softmax(scale * Q K^T under the mask) V`."""

from __future__ import annotations

import triton
import triton.language as tl

from heads_kernels.ops.gated_attention.triton_attend import attend
from heads_kernels.ops.operator import Call, Results
from heads_kernels.ops.triton.gate import open_rows, times_gate
from heads_kernels.ops.triton.load import store_tile
from heads_kernels.ops.triton.operands import (
    dropout_of,
    gate_kind,
    gate_of,
    has_terms,
    rows_of,
    terms_of,
    with_positive_scale,
)
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import launch, padded, tiles_for


@triton.jit
def _forward_kernel(
    query, key, value, gate, terms, visible, dropout, out, attended_out, lse_out, H, T, S, GROUP, scale,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_M rows of `out` of one head; heads in order, of each the last rows (the longest of a
    causal mask) first. A closed head writes its zeros and is done."""
    tiles = tl.cdiv(T, BLOCK_M)
    pair = tl.program_id(0) // tiles
    b, h = pair // H, pair % H
    first_row = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    taking_part = open_rows(gate, b, h, T, KIND, ACTIVATION)
    attended, lse, sees = attend(
        query, key, value, terms, visible, dropout, b, h, first_row, taking_part, S, GROUP, scale,
        D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    if attended_out is not None:
        store_tile(attended_out, b, h, first_row, T, attended, DV, BLOCK_M, BLOCK_DV)
    rows = first_row + tl.arange(0, BLOCK_M)
    if lse_out is not None:
        tl.store(lse_out + pair.to(tl.int64) * T + rows, lse, mask=rows < T)
    gated = times_gate(attended, gate, b, h, rows, T, KIND, ACTIVATION, DV, BLOCK_DV)
    # Rows that see nothing are 0, whatever their gate.
    gated = tl.where(sees[:, None], gated, 0.0)
    store_tile(out, b, h, first_row, T, gated, DV, BLOCK_M, BLOCK_DV)


def forward_pass(call: Call, outputs: Results) -> None:
    """Fill `outputs` (out, attended, lse); empty ones are not kept."""
    out, attended, lse = outputs
    (B, H, T, D), Dv = call.query.shape, call.value.shape[3]
    scale, query = with_positive_scale(call.scale, call.query)
    tiles = tiles_for("gated_attention.forward", call.query, D, Dv, has_terms(call))
    launch(
        _forward_kernel, B * H * -(-T // tiles.block_m), call.query, tiles,
        rows_of(query), rows_of(call.key), rows_of(call.value), gate_of(call.gate),
        terms_of(call), visible_to_tiles(call, tiles), dropout_of(call.seed, call.dropout_p),
        rows_of(out), rows_of(attended) if attended.numel() else None, lse if lse.numel() else None,
        H, T, call.key.shape[2], H // max(call.key.shape[1], 1), scale,
        KIND=gate_kind(call.gate), ACTIVATION=call.gate_activation, D=D, DV=Dv,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=padded(D), BLOCK_DV=padded(Dv),
    )  # fmt: skip
