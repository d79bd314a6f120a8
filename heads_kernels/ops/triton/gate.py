"""The gate inside a kernel: values of rows or of elements, activated.

`h` is the head of all rows, or [M], a head for each row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(values, ACTIVATION: tl.constexpr):
    if ACTIVATION == "sigmoid":
        values = tl.where(values >= 0.0, 1.0, tl.exp(-tl.abs(values))) / (1.0 + tl.exp(-tl.abs(values)))
    elif ACTIVATION == "softplus":
        # log(1 + y) for small y (Kahan): u = 1 + y is rounded, and the factor y / (u - 1) corrects that.
        y = tl.exp(-tl.abs(values))
        u = 1.0 + y
        log1p = tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0)))
        values = tl.maximum(values, 0.0) + log1p
    else:
        tl.static_assert(ACTIVATION == "identity", "an unknown gate_activation")
    return values


@triton.jit
def row_gates(gate, b, h, rows, T, TILE: tl.constexpr):
    """float32 `[M]`: the gates of query rows (a gate per head has row stride 0)."""
    at = gate.ptr + b.to(tl.int64) * gate.stride_b + h.to(tl.int64) * gate.stride_h
    values = tl.load(at + rows.to(tl.int64) * gate.stride_t, mask=rows < T, other=0.0)
    return activate(values.to(tl.float32), TILE.activation)


@triton.jit
def element_gates(gate, b, h, rows, columns, T, TILE: tl.constexpr):
    """float32 `[M, BLOCK_DV]`: the gates of the elements of query rows; `columns` is [BLOCK_DV]."""
    of_rows = h.to(tl.int64) * gate.stride_h + rows.to(tl.int64) * gate.stride_t  # [M]
    at = gate.ptr + b.to(tl.int64) * gate.stride_b + of_rows[:, None]
    at = at + (columns.to(tl.int64) * gate.stride_s)[None, :]
    there = (rows < T)[:, None] & (columns < TILE.dv)[None, :]
    return activate(tl.load(at, mask=there, other=0.0).to(tl.float32), TILE.activation)


@triton.jit
def times_gate(tile, gate, b, h, rows, columns, T, TILE: tl.constexpr):
    """`tile` [M, BLOCK_DV] of float32 rows times their gates."""
    if TILE.gate == "elements":
        tile = tile * element_gates(gate, b, h, rows, columns, T, TILE)
    elif TILE.gate != "none":
        tile = tile * row_gates(gate, b, h, rows, T, TILE)[:, None]
    return tile


@triton.jit
def head_gate(gate, b, h, TILE: tl.constexpr):
    """The gate of a head if gates are per head, else 1.

    A gate that is not finite gives 0: its rows are known by their lse, which is nan (`rows.load_row_terms`).
    """
    g = 1.0
    if TILE.gate == "heads":
        at = gate.ptr + b.to(tl.int64) * gate.stride_b + h.to(tl.int64) * gate.stride_h
        g = activate(tl.load(at).to(tl.float32), TILE.activation)
        g = tl.where(tl.abs(g) < float("inf"), g, 0.0)
    return g


@triton.jit
def open_rows(gate, b, h, T, TILE: tl.constexpr):
    """How many rows of a head take part: T, or 0 if an identity gate per head is exactly 0."""
    taking_part = T
    if TILE.gate == "heads" and TILE.activation == "identity":
        at = gate.ptr + b.to(tl.int64) * gate.stride_b + h.to(tl.int64) * gate.stride_h
        taking_part = tl.where(tl.load(at) == 0.0, 0, T)
    return taking_part
