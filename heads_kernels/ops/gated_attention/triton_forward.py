"""Gated attention forward in Triton: `out = act(gate) * softmax(scale * Q K^T under the mask) V`.

Two kernels send a tile of query rows over every tile of keys that it sees (`attend`): the forward pass, and in the
backward pass that of closed heads, whose forward pass was skipped and whose gate asks for a gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.ops.gate import can_close
from heads_kernels.ops.operator import Call, Results
from heads_kernels.ops.triton.gate import open_rows, times_gate
from heads_kernels.ops.triton.load import load_tile, load_whole_tile, store_tile
from heads_kernels.ops.triton.operands import (
    dropout_of,
    gate_kind,
    gate_of,
    has_terms,
    rows_of,
    terms_of,
    with_positive_scale,
)
from heads_kernels.ops.triton.scores import add_sink, finish, load_bias, scale_log2_of
from heads_kernels.ops.triton.softmax import (
    SMALLEST,
    finite_part,
    kept,
    log_sum_exp,
    online_softmax,
    poison,
    product,
)
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import launch, padded, tiles_for
from heads_kernels.ops.triton.visible import (
    full_tile,
    pairs_visible,
    partial_tile,
    ranges,
    tiles_seen,
)


@triton.jit
def _forward_kernel(
    query, key, value, gate, terms, visible, dropout, out, attended_out, lse_out, H, T, S, GROUP, scale,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PARTIAL_STAGES: tl.constexpr,
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
        D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PARTIAL_STAGES,
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
        PARTIAL_STAGES=tiles.partial_stages,
    )  # fmt: skip


@triton.jit
def _closed_kernel(
    query, key, value, dout, gate, terms, visible, dropout, dgate_rows, H, T, S, GROUP, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PARTIAL_STAGES: tl.constexpr,
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
        D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PARTIAL_STAGES,
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
        PARTIAL_STAGES=tiles.partial_stages,
    )  # fmt: skip


@triton.jit
def attend(
    query, key, value, terms, visible, dropout, b, h, first_row, T, S, GROUP, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PARTIAL_STAGES: tl.constexpr,
):  # fmt: skip
    """`attended` [BLOCK_M, BLOCK_DV], `lse` [BLOCK_M] and whether they see anything, of the rows of a head.

    Rows that see nothing have 0, and -inf or their sink. With T 0 (a closed head) nothing is read, and lse is -inf.
    `scale` is not negative. The query tile, scores, probabilities and the accumulator stay on chip.
    """
    rows = first_row + tl.arange(0, BLOCK_M)
    lo, hi = ranges(visible, b, rows, T, S)  # [BLOCK_M]
    own = first_row // BLOCK_M
    start, full_start, full_end, end = tiles_seen(visible, b, h, own, lo, hi, rows, T, BLOCK_N)
    q = load_tile(query, b, h, first_row, rows < T, D, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    scale_log2 = tl.maximum(scale_log2_of(scale, terms), SMALLEST)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    for place in range(full_start, full_end):
        tile = full_tile(visible, b, h, own, place)
        acc, row_max, row_sum = _attend_tile(
            q, key, value, terms, visible, dropout, acc, row_max, row_sum, lo, hi, tile, b, h, GROUP, rows, T, S, scale,
            scale_log2,
            False, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    for index in tl.range(0, full_start - start + end - full_end, num_stages=PARTIAL_STAGES):
        tile = partial_tile(visible, b, h, own, index, start, full_start, full_end)
        acc, row_max, row_sum = _attend_tile(
            q, key, value, terms, visible, dropout, acc, row_max, row_sum, lo, hi, tile, b, h, GROUP, rows, T, S, scale,
            scale_log2,
            True, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    share = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    if dropout is not None:
        share = share * dropout.scale
    lse, sees = log_sum_exp(row_max, row_sum, scale_log2), row_sum != 0.0
    if terms.sinks is not None:
        lse, of_keys = add_sink(lse, terms, h)
        share = share * of_keys
        lse = tl.where(rows < T, lse, float("-inf"))
    return acc * share[:, None], lse, sees


@triton.jit
def _attend_tile(
    q, key, value, terms, visible, dropout, acc, row_max, row_sum, lo, hi, tile, b, h, GROUP, rows, T, S, scale,
            scale_log2,
    PARTIAL: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One tile of keys: `acc`, `row_max` and `row_sum` after it. In a PARTIAL tile pairs are masked one by one."""
    first = tile * BLOCK_N
    hk = h // GROUP
    keys = first + tl.arange(0, BLOCK_N)
    if PARTIAL:
        k = load_tile(key, b, hk, first, keys < S, D, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        v = load_tile(value, b, hk, first, keys < S, DV, BLOCK_N, BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
    else:
        k = load_whole_tile(key, b, hk, first, D, BLOCK_N, BLOCK_D)
        v = load_whole_tile(value, b, hk, first, DV, BLOCK_N, BLOCK_DV)
    bias = load_bias(terms, b, h, rows[:, None], keys[None, :], T, S)
    raw = product(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), tl.float32))
    scores, _ = finish(raw, bias, terms, scale)  # [BLOCK_M, BLOCK_N]
    if PARTIAL:
        seen = pairs_visible(
            visible, terms, b, h, lo[:, None], hi[:, None], rows[:, None], keys[None, :], T, S, bias
        )
        scores = tl.where(seen, scores + poison(v)[None, :], float("-inf"))
        v = finite_part(v)
    p, row_max, row_sum, alpha = online_softmax(scores, row_max, row_sum, scale_log2)
    if dropout is not None:
        p = tl.where(kept(dropout, b, h, rows, first, BLOCK_N), p, 0.0)
    return product(p.to(v.dtype), v, acc * alpha[:, None]), row_max, row_sum
