"""The forward pass of both operators in Triton: `out = act(gate) * softmax(scores under the mask) V`.

    scores = scale * Q K^T                                       gated attention
    scores = scale * ((Q * mixing_h) K^T + content_bias_h)       collaborative attention

Two kernels run a tile of query rows against every tile of keys that it sees (`attend`): the forward kernel, and in the
backward pass the one for closed heads, whose forward pass was skipped, if their gates need a gradient. If a short query
has too few tiles for the GPU (`buffers.key_splits`), its keys are split over several programs, and another kernel
combines their results.

On sm_90 a Gluon kernel with specialized warps replaces the forward kernel where it can (`backend`).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.backends import FARTHEST_ROW
from heads_kernels.call import Call, can_close
from heads_kernels.ops.attention import Results
from heads_kernels.ops.buffers import key_splits, programs_in_turn, split_attended
from heads_kernels.ops.triton.attend import SoftmaxSums, accumulate, attend, no_sums, normalized, opened
from heads_kernels.ops.triton.gate import open_rows, times_gate
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import FEWEST_KEYS, describable, load_values, store_tile, tiles_in
from heads_kernels.ops.triton.operands import (
    Cells,
    Operands,
    Place,
    RowLse,
    Rows,
    Splits,
    cells_of,
    grouped_heads_of,
    operands_of,
    row_lse_of,
    rows_of,
    sizes_of,
    with_positive_scale,
)
from heads_kernels.ops.triton.rows import Reads
from heads_kernels.ops.triton.score_tiles import KeyTiles, own_rows, place_of_rows
from heads_kernels.ops.triton.scores import online_softmax, softmax_scale
from heads_kernels.ops.triton.tiles import Tiles, has_terms, padded, tile_constants, tiles_of_pass
from heads_kernels.ops.triton.visible import with_tile_lists

#: Splits of a row that are read at once: usually all. 32 x 256 numbers take 64 registers of 128 threads.
_SPLITS_AT_ONCE: Final = 32


class OutputsWritten(NamedTuple):
    """The outputs of a forward pass: rows of the output, the same before the gate (None: not saved), and lse."""

    out: Rows
    attended: Rows | None
    lse: RowLse
    end: None = None


class SplitParts(NamedTuple):
    """The partial results of splits: `[splits, B, H, T, Dv]`, `[splits, B, H, T]` twice."""

    acc: Rows | Tensor
    row_max: Tensor
    row_sum: Tensor
    end: None = None


@triton.jit
def _forward_kernel(of, key_tiles, value_tiles, gate, written, sizes, TILE: tl.constexpr):
    """A program computes BLOCK_M rows of `out` of one head. For a closed head it only writes zeros."""
    place = place_of_rows(of, sizes, TILE)
    taking_part = open_rows(gate, place.b, place.h, sizes.T, TILE)
    tiles = KeyTiles(key_tiles, value_tiles)
    attended = attend(of, tiles, place, opened(sizes, taking_part), TILE)
    _store(attended, gate, written, place, sizes, TILE)


@triton.jit
def _store(attended, gate, written, place, sizes, TILE: tl.constexpr):
    """Store the results of `attend` for rows of a head, and their output."""
    b, h, first_row, T = place.b, place.h, place.first, sizes.T
    if written.attended is not None:
        store_tile(written.attended, b, h, first_row, T, attended.rows, TILE.dv)
    rows = place.at
    if written.lse.ptr is not None:
        at = (b * sizes.H + h).to(tl.int64) * T + rows
        tl.store(written.lse.ptr + at, attended.lse, mask=rows < T)
        if written.lse.above is not None:
            tl.store(written.lse.above + at, attended.above, mask=rows < T)
    gated = times_gate(attended.rows, gate, b, h, rows, tl.arange(0, TILE.block_dv), T, TILE)
    # Rows that see no key are 0, even if their gate is NaN.
    gated = tl.where(attended.sees[:, None], gated, 0.0)
    store_tile(written.out, b, h, first_row, T, gated, TILE.dv)


@triton.jit
def _split_kernel(of, key_tiles, value_tiles, gate, written, sizes, splits, TILE: tl.constexpr):
    """A program computes the sums of BLOCK_M rows over its share of the tiles of keys that they see.

    The rows are those of one head, or with `of.grouped` the heads that share a key head, which is then read once for
    all of them. Programs of one split have consecutive numbers. What a closed head stores is not read.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    H, T, group = sizes.H, sizes.T, sizes.group
    programs = tl.num_programs(0) // splits.shares
    split, program = tl.program_id(0) // programs, tl.program_id(0) % programs
    if of.grouped is not None:
        b, hk, first_row = own_rows(of, program, H // group, group, BLOCK_M)
        length, head = group, hk
        heads = first_row + tl.arange(0, BLOCK_M)
        h = hk * group + tl.minimum(heads, group - 1)  # [BLOCK_M]
        taking_part = T
        is_open = (heads < group) & (open_rows(gate, b, h, T, TILE) != 0)
        rows = tl.where(is_open, 0, T)
    else:
        b, h, first_row = own_rows(of, program, H, T, BLOCK_M)
        hk, head = h // group, h
        taking_part = open_rows(gate, b, h, T, TILE)
        length = taking_part
        rows = first_row + tl.arange(0, BLOCK_M)
    place = Place(b, h, hk, first_row, rows)
    tiles = KeyTiles(key_tiles, value_tiles)
    sums = accumulate(of, tiles, place, split, splits, opened(sizes, taking_part), TILE)
    part = split * splits.batches + b
    store_tile(written.acc, part, head, first_row, length, sums.acc, TILE.dv)
    at = (part * H + h).to(tl.int64) * T + rows
    tl.store(written.row_max + at, sums.row_max, mask=rows < taking_part)
    tl.store(written.row_sum + at, sums.row_sum, mask=rows < taking_part)


@triton.jit
def _combine_kernel(
    terms, dropout, gate, parts, written, sizes, splits, BLOCK_SPLITS: tl.constexpr, TILE: tl.constexpr
):
    """A program combines the splits of one row, BLOCK_SPLITS at a time, and stores it as the forward kernel does."""
    H, T = sizes.H, sizes.T
    row, pair = tl.program_id(0) % T, tl.program_id(0) // T
    b, h = pair // H, pair % H
    taking_part = open_rows(gate, b, h, T, TILE)
    scale_log2 = softmax_scale(sizes.scale, terms)
    columns = tl.arange(0, TILE.block_dv)
    sums = no_sums(parts.acc, 1, TILE)
    count = splits.shares * tl.minimum(taking_part, 1)  # a closed head has stored none
    for first in range(0, count, BLOCK_SPLITS):
        split = first + tl.arange(0, BLOCK_SPLITS)
        there = split < splits.shares
        at = ((split * splits.batches + b) * H + h).to(tl.int64) * T + row
        maxima = tl.load(parts.row_max + at, mask=there, other=float("-inf"))  # [BLOCK_SPLITS]
        of_splits = tl.load(parts.row_sum + at, mask=there, other=0.0)
        acc = tl.load(
            parts.acc + at[:, None] * TILE.dv + columns[None, :],
            mask=there[:, None] & (columns < TILE.dv)[None, :], other=0.0,
        )  # [BLOCK_SPLITS, BLOCK_DV]  # fmt: skip
        shares, row_max, _, alpha = online_softmax(maxima[None, :], sums.row_max, sums.row_sum, scale_log2, terms)
        row_sum = sums.row_sum * alpha + tl.sum(shares * of_splits[None, :], 1)
        total = sums.acc * alpha[:, None] + tl.sum(tl.trans(shares) * acc, 0)[None, :]
        sums = SoftmaxSums(total, row_max, row_sum)
    place = Place(b, h, h // sizes.group, row, row + tl.arange(0, 1))
    attended = normalized(sums, terms, dropout, place, opened(sizes, taking_part))
    _store(attended, gate, written, place, sizes, TILE)


def forward_pass(call: Call, outputs: Results) -> None:
    """Fill `outputs` (out, attended, lse), except empty ones. The scale is not negative."""
    out, attended, lse = outputs
    (B, H, T, S), Dv = call.sizes, call.Dv
    tiles = tiles_of_pass(call, "forward", _has_descriptors(call))
    key_tiles = -(-S // tiles.block_n)
    whole = call.alpha is not None  # entmax needs the scores of whole rows
    grouped = not whole and key_tiles > 1 and is_grouped(call)
    programs = _programs(call, tiles, grouped)
    splits = 1 if whole else key_splits(T, programs, key_tiles, call.query)
    of, gate = operands_of(call, grouped), cells_of(call.gate)
    written = OutputsWritten(rows_of(out), rows_of(attended) if attended.numel() else None, row_lse_of(lse))
    if splits == 1 and not grouped:
        of = with_tile_lists(call, of, tiles)
        _launch(_forward_kernel, call, tiles, of, gate, written, sizes_of(call), programs=programs)
        return
    acc, row_max, row_sum = split_attended(out, splits)
    rows = acc.view(splits * B, H, T, Dv)
    of_parts = grouped_heads_of(rows, call.key.shape[1]) if grouped else rows_of(rows)
    _launch(
        _split_kernel, call, tiles, of, gate, SplitParts(of_parts, row_max, row_sum), sizes_of(call),
        Splits(B, splits), programs=splits * programs,
    )  # fmt: skip
    launch(
        _combine_kernel, B * H * T, call.query, tiles,
        of.terms, of.dropout, gate, SplitParts(acc, row_max, row_sum), written, sizes_of(call), Splits(B, splits),
        BLOCK_SPLITS=_SPLITS_AT_ONCE, TILE=tile_constants(call, tiles),
    )  # fmt: skip


def is_grouped(call: Call) -> bool:
    """Whether the rows of tiles are the heads that share a key head, so that each key is read once for all of them."""
    H, T = call.H, call.T
    if call.mixing is not None or T != 1 or call.query.stride(1) >= FARTHEST_ROW:
        return False
    return H > call.key.shape[1] > 0


def _programs(call: Call, tiles: Tiles, grouped: bool) -> int:
    B, H, T, _ = call.sizes
    heads, rows = (call.key.shape[1], H // call.key.shape[1]) if grouped else (H, T)
    return B * heads * -(-rows // tiles.block_m)


@triton.jit
def _closed_kernel(of, key_tiles, value_tiles, gate, dout, dgate_rows, sizes, count, TILE: tl.constexpr):
    """Compute `rowsum(dout * attended)` of the rows of closed heads.

    The programs share the `count` tiles of BLOCK_M rows of all heads. Heads are mostly open: a program of its own for
    each of their tiles would take longer to start than to end.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    H, T = sizes.H, sizes.T
    for number in tl.range(tl.program_id(0), count, tl.num_programs(0), disable_licm=True):
        b, h, first_row = own_rows(of, number, H, T, BLOCK_M)
        if open_rows(gate, b, h, T, TILE) == 0:
            rows = first_row + tl.arange(0, BLOCK_M)
            place = Place(b, h, h // sizes.group, first_row, rows)
            attended = attend(of, KeyTiles(key_tiles, value_tiles), place, sizes, TILE)
            do = load_values(dout, b, h, first_row, rows < T, BLOCK_M, TILE).to(tl.float32)
            products = tl.where(attended.sees[:, None], do * attended.rows, 0.0)
            at = dgate_rows + (b * H + h).to(tl.int64) * T + rows
            tl.store(at, tl.sum(products, 1), mask=rows < T)
            tl.debug_barrier()  # entmax's list of tiles has been read before the next one is written


def closed_pass(call: Call, of: Operands, reads: Reads, dgate_rows: Tensor) -> None:
    """Write the rows of closed heads into `dgate_rows` `[B, H, T]`, if the gate of `call` can close heads."""
    if call.gate is None or not can_close(call.gate, call.gate_activation):
        return
    if call.scale < 0.0:
        call = with_positive_scale(call)
        of = operands_of(call)
    tiles = tiles_of_pass(call, "forward", _has_descriptors(call))
    of = with_tile_lists(call, of, tiles)
    count = _programs(call, tiles, grouped=False)
    _launch(
        _closed_kernel, call, tiles, of, reads.gate, reads.dattended, dgate_rows, sizes_of(call), count,
        programs=programs_in_turn(count, count // max(call.B, 1), call.query.device),
    )  # fmt: skip


def _has_descriptors(call: Call) -> bool:
    """Whether full tiles may be loaded through descriptors.

    Not if loops read terms: full tiles in a list need not be neighbours, and the terms of larger tiles need the
    registers that descriptors save. Not in collaborative attention: heads gather features of the key, and with a
    descriptor for the value alone the loop is no shorter.
    """
    suits = call.mixing is None and not has_terms(call) and call.key.shape[2] >= FEWEST_KEYS
    return suits and describable(call.key) and describable(call.value)


def _launch(
    kernel: Any, call: Call, tiles: Tiles, of: Operands, gate: Cells | None, *others: Any, programs: int,
) -> None:  # fmt: skip
    if call.alpha is not None:
        shape = programs, -(-call.S // tiles.block_n)
        of = of._replace(in_reach=call.query.new_empty(shape, dtype=torch.int32))
    key_tiles, value_tiles = None, None
    if tiles.full_tiles:
        block = tiles.block_n * tiles.full_tiles
        key_tiles = tiles_in(call.key, block, padded(call.D))
        value_tiles = tiles_in(call.value, block, padded(call.Dv))
    launch(
        kernel, programs, call.query, tiles, of, key_tiles, value_tiles, gate, *others,
        TILE=tile_constants(call, tiles),
    )  # fmt: skip
