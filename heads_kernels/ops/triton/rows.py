"""The first pass of the backward, for both operators: `delta`, and the gate's gradient by row, in one read.

    dgate row = rowsum(dout * attended)        delta = rowsum(dattended * attended) - dlse        dattended = g * dout

`g` is the activated gate. For gates per head and per row, `delta = g * (dgate row) - dlse`. For a gate per element,
`dout * attended` is not summed, and `dattended` is written for the passes that follow. `dlse`, the gradient of `lse`,
adds `dlse * p` to `dscores = p * (dp - delta)`.

The passes that follow read `lse` and `delta` of every row in every tile, so both are prepared here: see
`load_row_terms`. With a sink, `lse` is finite even if a row sees no key; the mask then shows which rows see one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.call import Call
from heads_kernels.ops.attention import Saved
from heads_kernels.ops.triton.gate import element_gates, row_gates
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import load_values, store_tile
from heads_kernels.ops.triton.operands import (
    Cells,
    Operands,
    RowLse,
    Rows,
    Support,
    cells_of,
    operands_of,
    row_lse_of,
    rows_of,
    sizes_of,
)
from heads_kernels.ops.triton.scores import gradient_of_tile, kept, prepared, product, weigh
from heads_kernels.ops.triton.tiles import gate_kind, tile_constants, tiles_for
from heads_kernels.ops.triton.visible import keys_visible, ranges, tile_at, tile_count, tiles_in_ranges


class Reads(NamedTuple):
    """The data of query rows that the other passes read."""

    dattended: Rows  # [B, H, T, Dv]: dout, or g * dout
    gate: Cells | None  # by which dattended is still to be multiplied
    lse: RowLse  # prepared: `load_row_terms`
    delta: Tensor  # [B, H, T], prepared
    end: None = None


class FirstPass(NamedTuple):
    """The results of the first pass, packed for the kernels of the passes that follow.

    These get the call without its gate if `reads` has none.
    """

    operands: Operands
    reads: Reads
    support: Support | None = None  # of entmax; all gradients outside of it are 0


class RowsWritten(NamedTuple):
    """The outputs of the first kernel."""

    lse: Tensor
    delta: Tensor
    dgate_rows: Tensor | Rows | None  # Rows for a gate per element
    dattended: Rows | None
    dsinks: Tensor | None
    end: None = None


class Written(NamedTuple):
    """The outputs of the passes over keys and query rows; None: not requested."""

    dquery: Rows | None = None  # with mixing in float32, as dkey
    dkey: Rows | None = None
    dvalue: Rows | None = None
    dmixing: Tensor | None = None  # [B, tiles, H, Ds]
    dcontent_bias: Tensor | None = None
    end: None = None


class RowTerms(NamedTuple):
    """Terms of query rows, in a kernel; see `load_row_terms`."""

    lse: Any
    above: Any
    delta: Any
    g: Any
    finite: Any


@triton.jit
def _see_a_key(visible, terms, b, h, rows, T, S, BLOCK_N: tl.constexpr):
    """Whether `rows` [BLOCK_M] see any key: tiles of keys are searched until every row has seen one."""
    lo, hi = ranges(visible, b, h, rows, T, S)
    sees = lo < hi
    if (visible.key_visible is not None) or (visible.dense is not None) or (terms.bias is not None):
        visits = tiles_in_ranges(visible, b, h, lo, hi, rows, T, BLOCK_N)
        found = (~sees).to(tl.int32)
        number = 0
        while (number < tile_count(visits)) & (tl.min(found, 0) == 0):
            keys = tile_at(visits, number) * BLOCK_N + tl.arange(0, BLOCK_N)
            seen, _, _ = keys_visible(visible, terms, b, h, rows, lo, hi, keys, T, S)
            found = tl.maximum(found, tl.max(seen.to(tl.int32), 1))
            number += 1
        sees = sees & (found != 0)
    return sees


@triton.jit
def _rows_kernel(of, dout, attended, lse, dlse, gate, written, sizes, SEARCHES: tl.constexpr, TILE: tl.constexpr):
    """A program reads BLOCK_M rows of a head once. Rows that see no key get 0, even if `dout` is not finite there.

    With SEARCHES, `lse` does not say which rows see a key, and the mask is searched.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    T = sizes.T
    tiles = tl.cdiv(T, BLOCK_M)
    pair = tl.program_id(0) // tiles
    b, h = pair // sizes.H, pair % sizes.H
    first_row = (tl.program_id(0) % tiles) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    of_pair = pair.to(tl.int64) * T + rows
    row_lse = tl.load(lse + of_pair, mask=rows < T, other=float("-inf"))  # [BLOCK_M]
    sees = row_lse != float("-inf")
    if SEARCHES:
        sees = sees & _see_a_key(of.visible, of.terms, b, h, rows, T, sizes.S, BLOCK_M)
    do = load_values(dout, b, h, first_row, rows < T, BLOCK_M, TILE).to(tl.float32)
    products = do * load_values(attended, b, h, first_row, rows < T, BLOCK_M, TILE).to(tl.float32)
    products = tl.where(sees[:, None], products, 0.0)  # [BLOCK_M, BLOCK_DV]
    if TILE.gate == "elements":
        g = element_gates(gate, b, h, rows, tl.arange(0, TILE.block_dv), T, TILE)
        store_tile(written.dattended, b, h, first_row, T, do * g, TILE.dv)
        total = tl.sum(products * g, 1)
        if written.dgate_rows is not None:
            store_tile(written.dgate_rows, b, h, first_row, T, products, TILE.dv)
    else:
        total = tl.sum(products, 1)
        if written.dgate_rows is not None:
            tl.store(written.dgate_rows + of_pair, total, mask=rows < T)
        if TILE.gate != "none":
            g = row_gates(gate, b, h, rows, T, TILE)
            total = total * g
            if written.dattended is not None:
                store_tile(written.dattended, b, h, first_row, T, do * g[:, None], TILE.dv)
    of_lse = tl.zeros((BLOCK_M,), tl.float32)
    if dlse is not None:
        of_lse = tl.load(dlse + of_pair, mask=rows < T, other=0.0)
        total = tl.where(sees, total - of_lse, 0.0)
    to_read = tl.where(sees, prepared(row_lse, of.terms) + total * 0.0, float("inf"))
    tl.store(written.lse + of_pair, to_read, mask=rows < T)
    delta = tl.where(tl.abs(to_read) < float("inf"), total, 0.0)
    tl.store(written.delta + of_pair, delta, mask=rows < T)
    if written.dsinks is not None:
        share = tl.exp(tl.load(of.terms.sinks + h).to(tl.float32) - row_lse)
        # The lse of a row that sees no key is the sink.
        alone = tl.where(row_lse != float("-inf"), of_lse, 0.0)
        tl.store(written.dsinks + of_pair, tl.where(sees, -share * total, alone), mask=rows < T)


@triton.jit
def load_row_terms(reads, of_head, b, h, rows, sizes, TILE: tl.constexpr):
    """The terms of query rows, [M] each, as the first pass wrote them.

    `of_head` is the result of `head_gate` for their head: a scalar, which takes no register per row and no load per
    tile.

    lse is `scores.prepared`; with entmax it is the largest score, and the threshold is `above` it. A row that sees no
    key has lse +inf, so that its `p` is 0. A row that sees a key and has a number that is not finite has lse nan,
    delta 0 and gate 0, and is not `finite`: its query and dout are read as 0, so that exactly the gradients of the keys
    that it sees become nan.
    """
    T = sizes.T
    of_pair = (b * sizes.H + h).to(tl.int64) * T + rows
    row_lse = tl.load(reads.lse.ptr + of_pair, mask=rows < T, other=float("inf"))
    above = tl.zeros(rows.shape, tl.float32)
    if reads.lse.above is not None:
        above = tl.load(reads.lse.above + of_pair, mask=rows < T, other=0.0)
    row_delta = tl.load(reads.delta + of_pair, mask=rows < T, other=0.0)
    finite = tl.abs(row_lse) < float("inf")
    if TILE.gate == "rows":
        g = tl.where(finite, row_gates(reads.gate, b, h, rows, T, TILE), 0.0)
    else:
        g = tl.full(rows.shape, 1.0, tl.float32) * of_head
    return RowTerms(row_lse, above, row_delta, g, finite)


@triton.jit
def along(terms, AXIS: tl.constexpr):
    """The terms of rows, broadcast to a tile of scores whose dimension AXIS is that of the keys."""
    return RowTerms(
        tl.expand_dims(terms.lse, AXIS), tl.expand_dims(terms.above, AXIS), tl.expand_dims(terms.delta, AXIS),
        tl.expand_dims(terms.g, AXIS), tl.expand_dims(terms.finite, AXIS),
    )  # fmt: skip


@triton.jit
def dscores_of_tile(of, tile, do, row_terms, first, place, sizes, PARTIAL: tl.constexpr, TILE: tl.constexpr):
    """The gradient [BLOCK_M, BLOCK_N] of the scores of a program's rows and the keys from `first` on, before scale.

    `tile` is their `score_tiles.ScoreTile`, `do` [BLOCK_M, BLOCK_DV]; `row_terms` are columns.
    """
    BLOCK_N: tl.constexpr = tile.scores.shape[1]
    seen = None
    if PARTIAL:
        seen = tile.seen
    _, slope = weigh(tile.scores, row_terms, seen, of.terms, place.h, sizes.scale)
    dp = product(do, tl.trans(tile.weighed), tl.zeros((TILE.block_m, BLOCK_N), tl.float32))
    keep = None
    if of.dropout is not None:
        keep = kept(of.dropout, place.b, place.h, place.at, first, BLOCK_N)
    return gradient_of_tile(slope, dp, keep, tile.cap, seen, row_terms, of)


def first_pass(
    call: Call, saved: Saved, dout: Tensor, dgate: Tensor, dsinks: Tensor, gated_rows: bool = False
) -> FirstPass:
    """Fill `dgate` and `dsinks`, unless they are empty, and return the data that the other passes read.

    With `gated_rows`, dattended includes the gates of rows; otherwise those passes apply them.
    """
    B, H, T, Dv = dout.shape
    operands, gate, kind = operands_of(call), cells_of(call.gate), gate_kind(call.gate)
    of_rows = row_lse_of(saved.lse)
    lse, delta = (saved.lse.new_empty(B, H, T) for _ in range(2))
    of_dout = rows_of(dout)
    by_element = kind == "elements"
    gated = by_element or (gated_rows and kind == "rows")
    dattended = rows_of(torch.empty_like(dout)) if gated else of_dout
    tiles = tiles_for("backward.rows", dout, Dv, Dv)
    dgate_rows = None
    if dgate.numel():
        dgate_rows = rows_of(dgate) if by_element else dgate
    biased = call.bias is not None or call.offset_bias is not None
    searches = call.sinks is not None and (call.S == 0 or biased or call.intervals.hides)
    written = RowsWritten(lse, delta, dgate_rows, dattended if gated else None, dsinks if dsinks.numel() else None)
    launch(
        _rows_kernel, B * H * -(-T // tiles.block_m), dout, tiles,
        operands, of_dout, rows_of(saved.attended), of_rows.ptr, saved.dlse, gate, written, sizes_of(call),
        SEARCHES=searches, TILE=tile_constants(call, tiles),
    )  # fmt: skip
    return FirstPass(operands, Reads(dattended, None if gated else gate, of_rows._replace(ptr=lse), delta))
