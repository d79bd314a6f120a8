"""Collaborative attention backward in Triton: the gate's gradient of closed heads, whose forward pass was skipped."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.ops.collaborative_attention.triton_attend import attend
from heads_kernels.ops.gate import can_close
from heads_kernels.ops.operator import Call
from heads_kernels.ops.triton.gate import open_rows
from heads_kernels.ops.triton.load import load_tile
from heads_kernels.ops.triton.operands import (
    content_bias_of,
    dropout_of,
    gate_of,
    mixing_of,
    rows_of,
    terms_of,
    with_positive_scale,
)
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import chunks_of, launch, padded, tiles_for


@triton.jit
def _closed_kernel(
    query, key, value, mixing, content_bias, dout, gate, terms, visible, dropout, dgate_rows, H, T, S, scale,
    DS: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A program computes `rowsum(dout * attended)` of BLOCK_M rows, as the forward kernel would; of an open head it
    computes nothing."""
    tiles = tl.cdiv(T, BLOCK_M)
    h = tl.program_id(0) % H
    b = tl.program_id(0) // (H * tiles)
    first_row = (tiles - 1 - tl.program_id(0) // H % tiles) * BLOCK_M
    closed = T - open_rows(gate, b, h, T, "heads", "identity")
    attended, _, sees = attend(
        query, key, value, mixing, content_bias, terms, visible, dropout, b, h, first_row, closed, S, scale,
        DS, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, CHUNKS,
    )  # fmt: skip
    rows = first_row + tl.arange(0, BLOCK_M)
    do = load_tile(dout, b, h, first_row, rows < closed, DV, BLOCK_M, BLOCK_DV).to(
        tl.float32
    )  # [BLOCK_M, BLOCK_DV]
    products = tl.where(sees[:, None], do * attended, 0.0)
    tl.store(
        dgate_rows + (b * H + h).to(tl.int64) * T + rows, tl.sum(products, 1), mask=rows < closed
    )


def closed_pass(call: Call, dout: Tensor, dgate_rows: Tensor) -> None:
    """Write the rows of closed heads into `dgate_rows` `[B, H, T]`, unless no gate of `call` can close a head."""
    if call.gate is None or not can_close(call.gate, call.gate_activation):
        return
    (B, T, Ds), (_, H, S, Dv) = call.query.shape, call.value.shape
    scale, query, content_bias = with_positive_scale(call.scale, call.query, call.content_bias)
    tiles = tiles_for("collaborative_attention.forward", call.query, Ds, Dv)
    launch(
        _closed_kernel, B * H * -(-T // tiles.block_m), query, tiles,
        rows_of(query), rows_of(call.key), rows_of(call.value), mixing_of(call.mixing), content_bias_of(content_bias),
        rows_of(dout), gate_of(call.gate), terms_of(call), visible_to_tiles(call, tiles),
        dropout_of(call.seed, call.dropout_p), dgate_rows, H, T, S, scale,
        DS=Ds, DV=Dv,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=tiles.block_d, BLOCK_DV=padded(Dv),
        CHUNKS=chunks_of(Ds, tiles.block_d),
    )  # fmt: skip
