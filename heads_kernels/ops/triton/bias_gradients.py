"""The gradients of biases in Triton, for both operators: sums of dscores over the scores that share an element.

    dscores = p * (dp - delta)        before cap and scale; the other formulas are in `keys`

Scores are recomputed tile by tile. One program sums each element of the bias, in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from heads_kernels.batch import bias_batches
from heads_kernels.call import Call
from heads_kernels.ops.buffers import splits_of
from heads_kernels.ops.triton.gate import head_gate, open_rows
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import load_values
from heads_kernels.ops.triton.operands import Place, sizes_of
from heads_kernels.ops.triton.rows import FirstPass, along, dscores_of_tile, load_row_terms
from heads_kernels.ops.triton.score_tiles import (
    Features,
    KeyTiles,
    QueryRows,
    ScoreTile,
    active_chunks,
    load_query,
    raw_scores,
)
from heads_kernels.ops.triton.scores import finish
from heads_kernels.ops.triton.tiles import tile_constants, tiles_for
from heads_kernels.ops.triton.visible import keys_visible, ranges


class Units(NamedTuple):
    """The tiles of scores that share a tile of the bias; see `_bias_kernel`."""

    parts: Tensor  # [splits, entries, heads, T or 1, S or 1]
    entries: int
    first: int
    step: int
    heads: int  # of the bias
    total: int
    share: int


@triton.jit
def _add_dscores(acc, of, reads, b, h, first_row, first_key, sizes, TILE: tl.constexpr):
    """`acc` [BLOCK, BLOCK] plus the dscores of a tile of head h of batch b; those of a closed head are 0."""
    BLOCK: tl.constexpr = TILE.block_m
    T, S = sizes.T, sizes.S
    rows = first_row + tl.arange(0, BLOCK)
    keys = first_key + tl.arange(0, BLOCK)
    lo, hi = ranges(of.visible, b, h, rows, open_rows(reads.gate, b, h, T, TILE), S)
    seen, _pairs, bias = keys_visible(of.visible, of.terms, b, h, rows, lo, hi, keys, T, S)
    if tl.max(seen.to(tl.int32)) != 0:
        place = Place(b, h, h // sizes.group, first_row, rows)
        q, chunks = None, None
        if of.mixing is not None:
            chunks = active_chunks(of.mixing, h, TILE)
        features = Features(chunks=chunks, scored=chunks)
        if of.mixing is None:
            q = load_query(of, features, b, h, first_row, rows < T, BLOCK, TILE)
        query, tiles = QueryRows(place, q, features, lo, hi), KeyTiles()
        raw, _k, v = raw_scores(of, tiles, query, first_key, keys < S, sizes, BLOCK, TILE)
        of_head = head_gate(reads.gate, b, h, TILE)
        row_terms = along(load_row_terms(reads, of_head, b, h, rows, sizes, TILE), 1)
        scores, _slope = finish(raw, bias, of.terms, sizes.scale)
        do = load_values(reads.dattended, b, h, first_row, rows < T, BLOCK, TILE)
        tile = ScoreTile(scores, 1.0, seen, None, v)
        acc += dscores_of_tile(of, tile, do, row_terms, first_key, place, sizes, True, TILE)
    return acc


@triton.jit
def _bias_kernel(of, reads, units, sizes, SUM_ROWS: tl.constexpr, SUM_KEYS: tl.constexpr, TILE: tl.constexpr):
    """A program owns a tile of the bias and sums the units that share it (or `share` of `total` of them) in order.

    A unit is a tile of scores of batch `e * first + n * step`, for entry e of the bias. Units also run over all heads
    if the bias broadcasts along them, and over all tiles of rows (SUM_ROWS) or of keys (SUM_KEYS).
    """
    BLOCK: tl.constexpr = TILE.block_m
    T, S = sizes.T, sizes.S
    row_tiles, key_tiles = tl.cdiv(T, BLOCK), tl.cdiv(S, BLOCK)
    row_owners, key_owners, row_units, key_units = row_tiles, key_tiles, 1, 1
    if SUM_ROWS:
        row_owners, row_units = 1, row_tiles
    if SUM_KEYS:
        key_owners, key_units = 1, key_tiles
    key_owner = tl.program_id(0) % key_owners
    row_owner = tl.program_id(0) // key_owners % row_owners
    owner = tl.program_id(0) // (key_owners * row_owners)  # split, entry, head
    entry = owner // units.heads % units.entries
    heads = sizes.H // units.heads  # that share the tile: all, or one
    start = (owner // (units.heads * units.entries)).to(tl.int64) * units.share
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for unit in range(start, tl.minimum(start + units.share, units.total)):
        tile = tl.cast(unit % (row_units * key_units), tl.int32)
        # This head number continues through the batches that share the entry.
        head = tl.cast(unit // (row_units * key_units), tl.int32)
        row_tile = row_owner + tile % row_units
        key_tile = key_owner + tile // row_units
        b = entry * units.first + head // heads * units.step
        h = owner % units.heads + head % heads
        acc = _add_dscores(acc, of, reads, b, h, row_tile * BLOCK, key_tile * BLOCK, sizes, TILE)
    rows = row_owner * BLOCK + tl.arange(0, BLOCK)
    keys = key_owner * BLOCK + tl.arange(0, BLOCK)
    height, width = T, S
    if SUM_ROWS:
        acc = tl.sum(acc, 0)[None, :]
        height, rows = 1, tl.arange(0, 1)
    if SUM_KEYS:
        acc = tl.sum(acc, 1)[:, None]
        width, keys = 1, tl.arange(0, 1)
    at = units.parts + (owner.to(tl.int64) * height + rows)[:, None] * width + keys[None, :]
    tl.store(at, acc, mask=(rows < height)[:, None] & (keys < width)[None, :])


def bias_pass(call: Call, first: FirstPass, dbias: Tensor) -> None:
    """Fill `dbias` `[B1, B2, H or 1, T or 1, S or 1]` unless it is empty."""
    if not dbias.numel():
        return
    B, H, T, S = call.sizes
    outer, inner, heads = dbias.shape[:3]
    if 0 in (B, H, T, S):
        dbias.zero_()
        return
    tiles = tiles_for(f"{call.operator}.biases", call.query, call.D, call.Dv)
    row_tiles, key_tiles = -(-T // tiles.block_m), -(-S // tiles.block_m)
    sum_rows, sum_keys = dbias.shape[3] != T, dbias.shape[4] != S
    entries = outer * inner
    units = B // entries * (H // heads)
    units *= (row_tiles if sum_rows else 1) * (key_tiles if sum_keys else 1)
    programs = entries * heads * (1 if sum_rows else row_tiles) * (1 if sum_keys else key_tiles)
    splits = splits_of(units, programs, call.query)
    parts = dbias.new_empty((splits, entries, *dbias.shape[2:]))
    first_batch = bias_batches(dbias, B)[1] if inner == 1 else 1
    launch(
        _bias_kernel, programs * splits, call.query, tiles, first.operands, first.reads,
        Units(parts, entries, first_batch, inner, heads, units, -(-units // splits)), sizes_of(call),
        SUM_ROWS=sum_rows, SUM_KEYS=sum_keys, TILE=tile_constants(call, tiles),
    )  # fmt: skip
    dbias.copy_(parts.sum(0).view(dbias.shape))


@triton.jit
def _offsets_kernel(of, reads, parts, sizes, TILE: tl.constexpr):
    """A program adds up the tiles of a head on one diagonal of tiles, then sums the 2 BLOCK - 1 diagonals of the sum.

    `parts` is `[2, B, H, diagonals, BLOCK]`: at 0 the offsets left of the tiles' main diagonal, at 1 the others.
    """
    BLOCK: tl.constexpr = TILE.block_m
    row_tiles, key_tiles = tl.cdiv(sizes.T, BLOCK), tl.cdiv(sizes.S, BLOCK)
    diagonals = row_tiles + key_tiles - 1
    pair = tl.program_id(0) // diagonals
    b, h = pair // sizes.H, pair % sizes.H
    ahead = tl.program_id(0) % diagonals - (row_tiles - 1)  # of the key tile from the row tile
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for row_tile in range(tl.maximum(-ahead, 0), tl.minimum(row_tiles, key_tiles - ahead)):
        first_row = row_tile * BLOCK
        first_key = first_row + ahead * BLOCK
        acc = _add_dscores(acc, of, reads, b, h, first_row, first_key, sizes, TILE)
    # Row i is rotated left by i: column d then has offset d, or offset d - BLOCK after the wrap.
    offsets = tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK)[:, None] + offsets[None, :]  # [BLOCK, BLOCK]
    turned = tl.gather(acc, column % BLOCK, 1)
    at = parts + tl.program_id(0).to(tl.int64) * BLOCK + offsets
    tl.store(at, tl.sum(tl.where(column >= BLOCK, turned, 0.0), 0))
    right = tl.sum(tl.where(column < BLOCK, turned, 0.0), 0)
    tl.store(at + tl.num_programs(0).to(tl.int64) * BLOCK, right)


def offsets_pass(call: Call, first: FirstPass, doffset_bias: Tensor) -> None:
    """Fill `doffset_bias` `[B, H, T + S - 1]` unless it is empty."""
    if not doffset_bias.numel():
        return
    B, H, T, S = call.sizes
    if T == 0 or S == 0:
        doffset_bias.zero_()
        return
    tiles = tiles_for(f"{call.operator}.biases", call.query, call.D, call.Dv)
    block = tiles.block_m
    row_tiles = -(-T // block)
    diagonals = row_tiles - (-S // block) - 1
    parts = doffset_bias.new_empty((2, B, H, diagonals, block))
    launch(
        _offsets_kernel, B * H * diagonals, call.query, tiles,
        first.operands, first.reads, parts, sizes_of(call), TILE=tile_constants(call, tiles),
    )  # fmt: skip
    left, right = parts.flatten(3)  # [B, H, diagonals * block]
    sums = functional.pad(left, (0, block)) + functional.pad(right, (block, 0))
    # Column 0 of both is offset -(row_tiles * block), the table begins with -(T - 1).
    start = row_tiles * block - (T - 1)
    doffset_bias.copy_(sums[..., start : start + doffset_bias.shape[2]])
