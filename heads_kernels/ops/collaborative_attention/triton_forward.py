"""Collaborative attention forward in Triton: `out_h = act(gate_h) * softmax(scale * ((Q * m_h) K^T + bias_h)) V_h`.

Two kernels send a tile of query rows over every tile of keys that it sees (`attend`): the forward pass, and in the
backward pass that of closed heads, whose forward pass was skipped and whose gate asks for a gradient. The mixed query
is formed chunk by chunk, beside the chunk of keys that it meets, and is never in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.ops.gate import can_close
from heads_kernels.ops.operator import Call, Results
from heads_kernels.ops.triton.chunks import active_chunks, chunk_at, load_content_bias, mixed
from heads_kernels.ops.triton.gate import open_rows, times_gate
from heads_kernels.ops.triton.load import load_columns, load_tile, store_tile
from heads_kernels.ops.triton.operands import (
    content_bias_of,
    dropout_of,
    gate_kind,
    gate_of,
    has_terms,
    mixing_of,
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
from heads_kernels.ops.triton.tiles import chunks_of, launch, padded, tiles_for
from heads_kernels.ops.triton.visible import (
    full_tile,
    pairs_visible,
    partial_tile,
    ranges,
    tiles_seen,
)


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
    tiles = tiles_for("collaborative_attention.forward", call.query, Ds, Dv, has_terms(call))
    launch(
        _forward_kernel, B * H * -(-T // tiles.block_m), query, tiles,
        rows_of(query), rows_of(call.key), rows_of(call.value), mixing_of(call.mixing), content_bias_of(content_bias),
        gate_of(call.gate), terms_of(call), visible_to_tiles(call, tiles), dropout_of(call.seed, call.dropout_p),
        rows_of(out), rows_of(attended) if attended.numel() else None, lse if lse.numel() else None, H, T, S, scale,
        KIND=gate_kind(call.gate), ACTIVATION=call.gate_activation, DS=Ds, DV=Dv,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=tiles.block_d, BLOCK_DV=padded(Dv),
        CHUNKS=chunks_of(Ds, tiles.block_d),
    )  # fmt: skip


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
    tiles = tiles_for("collaborative_attention.forward", call.query, Ds, Dv, has_terms(call))
    launch(
        _closed_kernel, B * H * -(-T // tiles.block_m), query, tiles,
        rows_of(query), rows_of(call.key), rows_of(call.value), mixing_of(call.mixing), content_bias_of(content_bias),
        rows_of(dout), gate_of(call.gate), terms_of(call), visible_to_tiles(call, tiles),
        dropout_of(call.seed, call.dropout_p), dgate_rows, H, T, S, scale,
        DS=Ds, DV=Dv,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=tiles.block_d, BLOCK_DV=padded(Dv),
        CHUNKS=chunks_of(Ds, tiles.block_d),
    )  # fmt: skip


@triton.jit
def attend(
    query, key, value, mixing, content_bias, terms, visible, dropout, b, h, first_row, T, S, scale,
    DS: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """`attended` [BLOCK_M, BLOCK_DV], `lse` [BLOCK_M] and whether they see anything, of the rows of a head.

    Rows that see nothing have 0, and -inf or their sink. With T 0 (a closed head) no row and no key is read, and lse
    is -inf. `scale` is not negative. Scores, probabilities and the accumulator stay on chip.
    """
    rows = first_row + tl.arange(0, BLOCK_M)
    lo, hi = ranges(visible, b, rows, T, S)  # [BLOCK_M]
    own = first_row // BLOCK_M
    start, full_start, full_end, end = tiles_seen(visible, b, h, own, lo, hi, rows, T, BLOCK_N)
    count, numbers = active_chunks(mixing, h, DS, BLOCK_D, CHUNKS)
    scale_log2 = tl.maximum(scale_log2_of(scale, terms), SMALLEST)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range((full_end - full_start) * count):
        tile = full_tile(visible, b, h, own, full_start + step // count)
        acc, row_max, row_sum, scores = _attend_step(
            query, key, value, mixing, content_bias, terms, visible, dropout, acc, row_max, row_sum, scores, lo, hi,
            rows, first_row, tile, step % count, count, numbers, b, h, T, S, scale, scale_log2,
            False, DS, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    for step in tl.range(0, (full_start - start + end - full_end) * count, num_stages=1):
        tile = partial_tile(visible, b, h, own, step // count, start, full_start, full_end)
        acc, row_max, row_sum, scores = _attend_step(
            query, key, value, mixing, content_bias, terms, visible, dropout, acc, row_max, row_sum, scores, lo, hi,
            rows, first_row, tile, step % count, count, numbers, b, h, T, S, scale, scale_log2,
            True, DS, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
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
def _attend_step(
    query, key, value, mixing, content_bias, terms, visible, dropout, acc, row_max, row_sum, scores, lo, hi, rows,
    first_row, tile, place, count, numbers, b, h, T, S, scale, scale_log2,
    PARTIAL: tl.constexpr, DS: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One chunk of one tile of keys; with the last chunk the tile's softmax and its product with the values."""
    last = place == count - 1
    column = chunk_at(numbers, place) * BLOCK_D
    first_key = tile * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)
    q = load_columns(
        query, b, first_row, rows < T, column, DS, BLOCK_M, BLOCK_D
    )  # [BLOCK_M, BLOCK_D]
    k = load_columns(
        key, b, first_key, keys < S, column, DS, BLOCK_N, BLOCK_D
    )  # [BLOCK_N, BLOCK_D]
    scores = product(
        mixed(q, mixing, h, column, DS, BLOCK_D), tl.trans(k), scores
    )  # [BLOCK_M, BLOCK_N]
    if last:
        v = load_tile(
            value, b, h, first_key, keys < S, DV, BLOCK_N, BLOCK_DV
        )  # [BLOCK_N, BLOCK_DV]
        if content_bias is not None:
            scores += load_content_bias(content_bias, b, h, keys, S)[None, :]
        bias = load_bias(terms, b, h, rows[:, None], keys[None, :], T, S)
        scores, _ = finish(scores, bias, terms, scale)
        if PARTIAL:
            seen = pairs_visible(
                visible, terms, b, h, lo[:, None], hi[:, None], rows[:, None], keys[None, :], T, S, bias,
            )  # fmt: skip
            scores = tl.where(seen, scores + poison(v)[None, :], float("-inf"))
            v = finite_part(v)
        p, row_max, row_sum, alpha = online_softmax(scores, row_max, row_sum, scale_log2)
        if dropout is not None:
            p = tl.where(kept(dropout, b, h, rows, first_key, BLOCK_N), p, 0.0)
        acc = product(p.to(v.dtype), v, acc * alpha[:, None])
        scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    return acc, row_max, row_sum, scores
