"""The first pass of the backward, one for both operators: `delta` and the rows of the gate's gradient in one read.

    dgate row = rowsum(dout * attended)        delta = rowsum(dattended * attended)        dattended = g * dout

`g` is the activated gate. For gates of heads and of rows `delta = g * (dgate row)`; a gate of elements keeps
`dout * attended` as it is, and its `dattended` is written for the passes that follow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.ops.triton.gate import element_gates, row_gates
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import load_tile, store_tile
from heads_kernels.ops.triton.operands import gate_kind, gate_of, rows_of
from heads_kernels.ops.triton.tiles import padded, tiles_for


@triton.jit
def _rows_kernel(
    dout, attended, gate, lse, delta, dgate_rows, dattended, H, T,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """A program reads BLOCK_M rows of a head once. Rows that see nothing get 0, whatever stands in `dout` there."""
    tiles = tl.cdiv(T, BLOCK_M)
    pair = tl.program_id(0) // tiles
    b, h = pair // H, pair % H
    first_row = (tl.program_id(0) % tiles) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    of_pair = pair.to(tl.int64) * T + rows
    sees = tl.load(lse + of_pair, mask=rows < T, other=float("-inf")) != float("-inf")  # [BLOCK_M]
    do = load_tile(dout, b, h, first_row, rows < T, DV, BLOCK_M, BLOCK_DV).to(
        tl.float32
    )  # [BLOCK_M, BLOCK_DV]
    products = do * load_tile(attended, b, h, first_row, rows < T, DV, BLOCK_M, BLOCK_DV).to(
        tl.float32
    )
    products = tl.where(sees[:, None], products, 0.0)
    if KIND == "elements":
        g = element_gates(gate, b, h, rows, T, DV, BLOCK_DV, ACTIVATION)
        store_tile(dattended, b, h, first_row, T, do * g, DV, BLOCK_M, BLOCK_DV)
        total = tl.sum(products * g, 1)
        if dgate_rows is not None:
            store_tile(dgate_rows, b, h, first_row, T, products, DV, BLOCK_M, BLOCK_DV)
    else:
        total = tl.sum(products, 1)
        if dgate_rows is not None:
            tl.store(dgate_rows + of_pair, total, mask=rows < T)
        if KIND != "none":
            total = total * row_gates(gate, b, h, rows, T, ACTIVATION)
    tl.store(delta + of_pair, tl.where(sees, total, 0.0), mask=rows < T)


@triton.jit
def load_row_terms(
    lse, delta, gate, b, h, pair, rows, T, KIND: tl.constexpr, ACTIVATION: tl.constexpr
):
    """`lse`, `delta`, the gate and `sound` of query rows, [M] each.

    lse is +inf for rows that see nothing: `p` is 0 there. A row is sound if it sees something and its numbers are
    finite; one that sees something and is not sound has lse nan, and so has `p` wherever it sees a key: with its query
    and dout left out (read as 0), what it poisons are the keys that it sees, and no others. Its delta and gate are 0.
    """
    of_pair = pair.to(tl.int64) * T + rows
    row_lse = tl.load(lse + of_pair, mask=rows < T, other=float("-inf"))
    row_delta = tl.load(delta + of_pair, mask=rows < T, other=0.0)
    sound = (row_lse * 0.0 + row_delta * 0.0) == 0.0
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse + row_delta * 0.0)
    if KIND == "none":
        g = tl.full(rows.shape, 1.0, tl.float32)
    else:
        g = tl.where(sound, row_gates(gate, b, h, rows, T, ACTIVATION), 0.0)
    return row_lse, tl.where(sound, row_delta, 0.0), g, sound


def first_pass(
    dout: Tensor,
    attended: Tensor,
    lse: Tensor,
    gate: Tensor | None,
    activation: str,
    dgate_rows: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Fill `dgate_rows` unless it is empty; returns `delta`, `dattended` and the gate still to be applied to it.

    `dattended` is `dout` itself, with the gate left, unless the gate is elementwise: then the gate is in it.
    """
    B, H, T, Dv = dout.shape
    kind = gate_kind(gate)
    delta = torch.empty_like(lse)
    dattended = torch.empty_like(dout) if kind == "elements" else dout
    asked = dgate_rows.numel() > 0
    tiles = tiles_for("backward.rows", dout, Dv, Dv)
    launch(
        _rows_kernel, B * H * -(-T // tiles.block_m), dout, tiles,
        rows_of(dout), rows_of(attended), gate_of(gate), lse, delta,
        (rows_of(dgate_rows) if kind == "elements" else dgate_rows) if asked else None,
        rows_of(dattended) if kind == "elements" else None, H, T,
        KIND=kind, ACTIVATION=activation, DV=Dv, BLOCK_M=tiles.block_m, BLOCK_DV=padded(Dv),
    )  # fmt: skip
    return delta, dattended, None if kind == "elements" else gate
