"""The forward pass of both operators in Triton: `out = act(gate) * softmax(scores under the mask) V`.

    scores = scale * Q K^T                                       gated attention
    scores = scale * ((Q * mixing_h) K^T + content_bias_h)       collaborative attention

Two kernels send a tile of query rows over every tile of keys that it sees (`attend`): the forward pass, and in the
backward pass that of closed heads, whose forward pass was skipped and whose gate asks for a gradient. Where a short
query has too few tiles for the GPU (`buffers.key_splits`), its keys are split over several programs, and another kernel
combines what they leave.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from heads_kernels.ops.buffers import FARTHEST_ROW, key_splits, split_attended
from heads_kernels.ops.gate import can_close
from heads_kernels.ops.operator import Call, Results
from heads_kernels.ops.triton.attend import accumulate, attend, normalized, softmax_scale
from heads_kernels.ops.triton.descriptors import FEWEST_KEYS, describable, tiles_in
from heads_kernels.ops.triton.gate import open_rows, times_gate
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import load_tile, store_tile
from heads_kernels.ops.triton.operands import (
    Gate,
    Operands,
    Rows,
    gate_kind,
    gate_of,
    grouped_heads_of,
    has_terms,
    operands_of,
    operator_of,
    row_lse_of,
    rows_of,
    with_positive_scale,
)
from heads_kernels.ops.triton.softmax import online_softmax
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import Tiles, chunks_of, padded, tiles_for

#: Splits of a row that are read at once: all of a usual call. 32 x 256 numbers take 64 registers of 128 threads.
_SPLITS_AT_ONCE: Final = 32


@triton.jit
def _own_rows(of, program, H, T, BLOCK_M: tl.constexpr):
    """Batch, head and first row of a `program`; of a head the last rows (the longest of a causal mask) come first.

    Heads are in order; those of collaborative attention follow each other on one tile of rows, for they read the same
    query and key.
    """
    tiles = tl.cdiv(T, BLOCK_M)
    if of.mixing is None:
        pair = program // tiles
        b, h, tile = pair // H, pair % H, program % tiles
    else:
        h = program % H
        b, tile = program // (H * tiles), program // H % tiles
    return b, h, (tiles - 1 - tile) * BLOCK_M


@triton.jit
def _forward_kernel(
    of, key_tiles, value_tiles, gate, out, attended_out, lse_out, H, T, S, GROUP, scale,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNKS: tl.constexpr, RESIDENT: tl.constexpr, PARTIAL_STAGES: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_M rows of `out` of one head. A closed head writes its zeros and is done."""
    b, h, first_row = _own_rows(of, tl.program_id(0), H, T, BLOCK_M)
    taking_part = open_rows(gate, b, h, T, KIND, ACTIVATION)
    attended, lse, above, sees = attend(
        of, key_tiles, value_tiles, b, h, first_row, taking_part, S, GROUP, scale,
        D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, CHUNKS, RESIDENT, PARTIAL_STAGES,
    )  # fmt: skip
    _store(
        attended, lse, above, sees, gate, out, attended_out, lse_out, b, h, first_row, H, T,
        KIND, ACTIVATION, DV, BLOCK_M, BLOCK_DV,
    )  # fmt: skip


@triton.jit
def _store(
    attended, lse, above, sees, gate, out, attended_out, lse_out, b, h, first_row, H, T,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Store what `attend` returned of BLOCK_M rows of a head, and their output."""
    if attended_out is not None:
        store_tile(attended_out, b, h, first_row, T, attended, DV, BLOCK_M, BLOCK_DV)
    rows = first_row + tl.arange(0, BLOCK_M)
    if lse_out.ptr is not None:
        at = (b * H + h).to(tl.int64) * T + rows
        tl.store(lse_out.ptr + at, lse, mask=rows < T)
        if lse_out.above is not None:
            tl.store(lse_out.above + at, above, mask=rows < T)
    gated = times_gate(attended, gate, b, h, rows, T, KIND, ACTIVATION, DV, BLOCK_DV)
    # Rows that see nothing are 0, whatever their gate.
    gated = tl.where(sees[:, None], gated, 0.0)
    store_tile(out, b, h, first_row, T, gated, DV, BLOCK_M, BLOCK_DV)


@triton.jit
def _split_kernel(
    of, key_tiles, value_tiles, gate, acc_out, row_max_out, row_sum_out, B, splits, H, T, S, GROUP, scale,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNKS: tl.constexpr, RESIDENT: tl.constexpr, PARTIAL_STAGES: tl.constexpr,
):  # fmt: skip
    """A program computes the sums of BLOCK_M rows over its share of the tiles of keys that they see.

    They are rows of one head; or, `of.grouped`, heads of one key head, which is read once for them all then. Programs
    of one split follow each other. A closed head stores nothing that is read.
    """
    programs = tl.num_programs(0) // splits
    split, program = tl.program_id(0) // programs, tl.program_id(0) % programs
    if of.grouped is not None:
        b, hk, first_row = _own_rows(of, program, H // GROUP, GROUP, BLOCK_M)
        length, head = GROUP, hk
        heads = first_row + tl.arange(0, BLOCK_M)
        h = hk * GROUP + tl.minimum(heads, GROUP - 1)  # [BLOCK_M]
        taking_part = T
        opened = (heads < GROUP) & (open_rows(gate, b, h, T, KIND, ACTIVATION) != 0)
        rows = tl.where(opened, 0, T)
    else:
        b, h, first_row = _own_rows(of, program, H, T, BLOCK_M)
        hk, head = h // GROUP, h
        taking_part = open_rows(gate, b, h, T, KIND, ACTIVATION)
        length = taking_part
        rows = first_row + tl.arange(0, BLOCK_M)
    acc, row_max, row_sum = accumulate(
        of, key_tiles, value_tiles, b, h, hk, first_row, rows, split, splits, taking_part, S, scale,
        D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, CHUNKS, RESIDENT, PARTIAL_STAGES,
    )  # fmt: skip
    part = split * B + b
    store_tile(acc_out, part, head, first_row, length, acc, DV, BLOCK_M, BLOCK_DV)
    at = (part * H + h).to(tl.int64) * T + rows
    tl.store(row_max_out + at, row_max, mask=rows < taking_part)
    tl.store(row_sum_out + at, row_sum, mask=rows < taking_part)


@triton.jit
def _combine_kernel(
    acc_in, row_max_in, row_sum_in, terms, dropout, gate, out, attended_out, lse_out, B, splits, H, T, scale,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """A program adds up what the splits left of one row, BLOCK_SPLITS at once, and stores it as the forward kernel."""
    row, pair = tl.program_id(0) % T, tl.program_id(0) // T
    b, h = pair // H, pair % H
    taking_part = open_rows(gate, b, h, T, KIND, ACTIVATION)
    scale_log2 = softmax_scale(scale, terms)
    columns = tl.arange(0, BLOCK_DV)
    acc = tl.zeros((1, BLOCK_DV), tl.float32)
    row_max = tl.full((1,), float("-inf"), tl.float32)
    row_sum = tl.zeros((1,), tl.float32)
    count = splits * tl.minimum(taking_part, 1)  # a closed head has stored none
    for first in range(0, count, BLOCK_SPLITS):
        split = first + tl.arange(0, BLOCK_SPLITS)
        there = split < splits
        at = ((split * B + b) * H + h).to(tl.int64) * T + row
        maxima = tl.load(row_max_in + at, mask=there, other=float("-inf"))  # [BLOCK_SPLITS]
        sums = tl.load(row_sum_in + at, mask=there, other=0.0)
        parts = tl.load(
            acc_in + at[:, None] * DV + columns[None, :],
            mask=there[:, None] & (columns < DV)[None, :], other=0.0,
        )  # [BLOCK_SPLITS, BLOCK_DV]  # fmt: skip
        shares, row_max, _, alpha = online_softmax(
            maxima[None, :], row_max, row_sum, scale_log2, terms
        )
        row_sum = row_sum * alpha + tl.sum(shares * sums[None, :], 1)
        acc = acc * alpha[:, None] + tl.sum(tl.trans(shares) * parts, 0)[None, :]
    rows = row + tl.arange(0, 1)
    attended, lse, sees = normalized(
        acc, row_max, row_sum, terms, dropout, h, rows, taking_part, scale
    )
    _store(
        attended, lse, lse, sees, gate, out, attended_out, lse_out, b, h, row, H, T, KIND, ACTIVATION, DV, 1, BLOCK_DV
    )  # fmt: skip


def forward_pass(call: Call, outputs: Results) -> None:
    """Fill `outputs` (out, attended, lse); empty ones are not kept."""
    out, attended, lse = outputs
    call = _with_positive_scale(call)
    B, H, T, S, _, Dv = call.sizes
    tiles = _tiles(call)
    key_tiles = -(-S // tiles.block_n)
    grouped, splits = False, 1
    if call.alpha is None:  # entmax needs the scores of whole rows
        grouped = key_tiles > 1 and is_grouped(call)
        splits = key_splits(T, _programs(call, tiles, grouped), key_tiles, call.query)
    of, gate = operands_of(call, grouped), gate_of(call.gate)
    results = (
        rows_of(out), rows_of(attended) if attended.numel() else None,
        row_lse_of(lse),
    )  # fmt: skip
    kind: dict[str, Any] = {"KIND": gate_kind(call.gate), "ACTIVATION": call.gate_activation}
    if splits == 1 and not grouped:
        _launch(_forward_kernel, call, tiles, _to_tiles(call, of, tiles), gate, *results, **kind)
        return
    acc, row_max, row_sum = split_attended(out, splits)
    parts = acc.view(splits * B, H, T, Dv)
    of_parts = grouped_heads_of(parts, call.key.shape[1]) if grouped else rows_of(parts)
    _launch(
        _split_kernel, call, tiles, of, gate, of_parts, row_max, row_sum, B, splits, splits=splits,
        grouped=grouped, **kind,
    )  # fmt: skip
    launch(
        _combine_kernel, B * H * T, call.query, tiles, acc, row_max, row_sum, of.terms,
        of.dropout, gate, *results, B, splits, H, T, call.scale, **kind,
        DV=Dv, BLOCK_DV=padded(Dv), BLOCK_SPLITS=_SPLITS_AT_ONCE,
    )  # fmt: skip


def is_grouped(call: Call) -> bool:
    """Whether tiles have the heads that share a key head as rows, so that a key is read once for them all."""
    _, H, T, *_ = call.sizes
    if call.mixing is not None or T != 1 or call.query.stride(1) >= FARTHEST_ROW:
        return False
    return H > call.key.shape[1] > 0


def _programs(call: Call, tiles: Tiles, grouped: bool) -> int:
    B, H, T, *_ = call.sizes
    heads, rows = (call.key.shape[1], H // call.key.shape[1]) if grouped else (H, T)
    return B * heads * -(-rows // tiles.block_m)


@triton.jit
def _closed_kernel(
    of, key_tiles, value_tiles, gate, dout, dgate_rows, H, T, S, GROUP, scale,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNKS: tl.constexpr, RESIDENT: tl.constexpr, PARTIAL_STAGES: tl.constexpr,
):  # fmt: skip
    """A program computes `rowsum(dout * attended)` of BLOCK_M rows, as the forward kernel would; of an open head it
    computes nothing."""
    b, h, first_row = _own_rows(of, tl.program_id(0), H, T, BLOCK_M)
    closed = T - open_rows(gate, b, h, T, "heads", "identity")
    attended, _, _, sees = attend(
        of, key_tiles, value_tiles, b, h, first_row, closed, S, GROUP, scale,
        D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, CHUNKS, RESIDENT, PARTIAL_STAGES,
    )  # fmt: skip
    rows = first_row + tl.arange(0, BLOCK_M)
    do = load_tile(dout, b, h, first_row, rows < closed, DV, BLOCK_M, BLOCK_DV).to(
        tl.float32
    )  # [BLOCK_M, BLOCK_DV]
    products = tl.where(sees[:, None], do * attended, 0.0)
    at = dgate_rows + (b * H + h).to(tl.int64) * T + rows
    tl.store(at, tl.sum(products, 1), mask=rows < closed)


def closed_pass(
    call: Call, of: Operands, gate: Gate | None, dout: Rows, dgate_rows: Tensor
) -> None:
    """Write the rows of closed heads into `dgate_rows` `[B, H, T]`, unless no gate of `call` can close a head."""
    if call.gate is None or not can_close(call.gate, call.gate_activation):
        return
    if call.scale < 0.0:
        call = _with_positive_scale(call)
        of = operands_of(call)
    tiles = _tiles(call)
    _launch(_closed_kernel, call, tiles, _to_tiles(call, of, tiles), gate, dout, dgate_rows)


def _with_positive_scale(call: Call) -> Call:
    if call.scale >= 0.0:
        return call
    scale, query, content_bias = with_positive_scale(call.scale, call.query, call.content_bias)
    return call._replace(scale=scale, query=query, content_bias=content_bias)


def _to_tiles(call: Call, of: Operands, tiles: Tiles) -> Operands:
    """The operands as kernels with these tiles read them; with entmax a program lists its tiles itself."""
    if call.alpha is not None:
        return of
    visible = visible_to_tiles(call, of.terms, of.visible, tiles)
    return of if visible is of.visible else of._replace(visible=visible)


def _has_descriptors(call: Call) -> bool:
    """Whether full tiles may come through descriptors.

    Not where loops read terms: their lists of tiles do not say which full tiles are neighbours, and terms of larger
    tiles need the registers that descriptors save. Not in collaborative attention: heads gather features of the key,
    and the loop is no shorter with the value alone.
    """
    suits = call.mixing is None and not has_terms(call) and call.key.shape[2] >= FEWEST_KEYS
    return suits and describable(call.key) and describable(call.value)


def _descriptors(
    call: Call, tiles: Tiles
) -> tuple[TensorDescriptor, TensorDescriptor] | tuple[None, None]:
    if not tiles.full_tiles:
        return None, None
    block = tiles.block_n * tiles.full_tiles
    key, value = (tiles_in(x, block, padded(x.shape[3])) for x in (call.key, call.value))
    return key, value


def _tiles(call: Call) -> Tiles:
    *_, width, Dv = call.sizes
    terms, descriptors = has_terms(call), _has_descriptors(call)
    return tiles_for(f"{operator_of(call)}.forward", call.query, width, Dv, terms, descriptors)


def _launch(
    kernel: Any, call: Call, tiles: Tiles, of: Operands, gate: Gate | None, *results: Any, splits: int = 1,
    grouped: bool = False, **constants: Any,
) -> None:  # fmt: skip
    _, H, T, S, width, Dv = call.sizes
    programs = splits * _programs(call, tiles, grouped)
    if call.alpha is not None:
        in_reach = call.query.new_empty((programs, -(-S // tiles.block_n)), dtype=torch.int32)
        of = of._replace(in_reach=in_reach)
    launch(
        kernel, programs, call.query, tiles,
        of, *_descriptors(call, tiles), gate, *results,
        H, T, S, H // max(call.value.shape[1], 1), call.scale, **constants,
        D=width, DV=Dv, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        BLOCK_D=padded(width) if call.mixing is None else tiles.block_d, BLOCK_DV=padded(Dv),
        CHUNKS=0 if call.mixing is None else chunks_of(width, tiles.block_d), RESIDENT=tiles.block_slice,
        PARTIAL_STAGES=tiles.partial_stages,
    )  # fmt: skip
