"""Gated attention backward in Triton: the gate's gradient of closed heads, whose forward pass was skipped."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.ops.gate import can_close
from heads_kernels.ops.gated_attention.triton_attend import attend
from heads_kernels.ops.operator import Call
from heads_kernels.ops.triton.gate import open_rows
from heads_kernels.ops.triton.load import load_tile
from heads_kernels.ops.triton.operands import (
    dropout_of,
    gate_of,
    has_terms,
    rows_of,
    terms_of,
    with_positive_scale,
)
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import launch, padded, tiles_for


@triton.jit
def _closed_kernel(
    query, key, value, dout, gate, terms, visible, dropout, dgate_rows, H, T, S, GROUP, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """A program computes `rowsum(dout * attended)` of BLOCK_M rows, as the forward kernel would; of an open head it
    computes nothing."""
    tiles = tl.cdiv(T, BLOCK_M)
    pair = tl.program_id(0) // tiles
    b, h = pair // H, pair % H
    first_row = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    closed = T - open_rows(gate, b, h, T, "heads", "identity")
    attended, _, sees = attend(
        query, key, value, terms, visible, dropout, b, h, first_row, closed, S, GROUP, scale,
        D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    rows = first_row + tl.arange(0, BLOCK_M)
    do = load_tile(dout, b, h, first_row, rows < closed, DV, BLOCK_M, BLOCK_DV).to(
        tl.float32
    )  # [BLOCK_M, BLOCK_DV]
    products = tl.where(sees[:, None], do * attended, 0.0)
    tl.store(dgate_rows + pair.to(tl.int64) * T + rows, tl.sum(products, 1), mask=rows < closed)


def closed_pass(call: Call, dout: Tensor, dgate_rows: Tensor) -> None:
    """Write the rows of closed heads into `dgate_rows` `[B, H, T]`, unless no gate of `call` can close a head."""
    if call.gate is None or not can_close(call.gate, call.gate_activation):
        return
    (B, H, T, D), (_, Hk, S, Dv) = call.query.shape, call.value.shape
    scale, query = with_positive_scale(call.scale, call.query)
    tiles = tiles_for("gated_attention.forward", call.query, D, Dv, has_terms(call))
    launch(
        _closed_kernel, B * H * -(-T // tiles.block_m), call.query, tiles,
        rows_of(query), rows_of(call.key), rows_of(call.value), rows_of(dout), gate_of(call.gate),
        terms_of(call), visible_to_tiles(call, tiles), dropout_of(call.seed, call.dropout_p), dgate_rows,
        H, T, S, H // max(Hk, 1), scale,
        D=D, DV=Dv,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=padded(D), BLOCK_DV=padded(Dv),
    )  # fmt: skip
