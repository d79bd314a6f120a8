"""Lists of full and of partial tiles, for what hides pairs one by one: dense masks, and biases where they are -inf.

They also leave out the tiles in which entmax has no probability above 0.

A kernel of its own reads mask and bias once and writes, for every tile of query rows (for passes over keys, of keys),
the tiles that it sees: those that are full, which take no mask arithmetic, and those that are partial. Tiles that are
hidden whole are in neither list and are skipped. The lists are made anew for every launch that reads them, on the
device: nothing waits for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from heads_kernels.call import Call
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.operands import Pairs, Support, Terms, TileLists, Visible
from heads_kernels.ops.triton.scores import load_bias
from heads_kernels.ops.triton.tiles import Tiles
from heads_kernels.ops.triton.visible import (
    pairs_visible,
    ranges,
    tile_at,
    tile_count,
    tiles_in_ranges,
    tiles_that_see,
)


@triton.jit
def _lists_kernel(
    visible, terms, support, lists, counts, H, T, S, BY_KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """A program writes the two lists of one tile of rows, or BY_KEYS of keys, and how long they are."""
    row_tiles, key_tiles = tl.cdiv(T, BLOCK_M), tl.cdiv(S, BLOCK_N)
    if BY_KEYS:
        owners, length = key_tiles, row_tiles
    else:
        owners, length = row_tiles, key_tiles
    owner = tl.program_id(0) % owners
    h = tl.program_id(0) // owners % H
    b = tl.program_id(0) // (owners * H)
    if BY_KEYS:
        visits = tiles_that_see(visible, b, h, owner * BLOCK_N, T, S, BLOCK_N, BLOCK_M)
    else:
        rows = owner * BLOCK_M + tl.arange(0, BLOCK_M)
        lo, hi = ranges(visible, b, h, rows, T, S)
        visits = tiles_in_ranges(visible, b, h, lo, hi, rows, T, BLOCK_N)
    at = lists + tl.program_id(0).to(tl.int64) * (2 * length)
    full, partial = owner * 0, owner * 0
    for number in range(tile_count(visits)):
        tile = tile_at(visits, number)
        if BY_KEYS:
            row_tile, key_tile = tile, owner
        else:
            row_tile, key_tile = owner, tile
        rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        keys = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        lo, hi = ranges(visible, b, h, rows, T, S)
        pairs = Pairs(b, h, rows[:, None], keys[None, :])
        bias = load_bias(terms, pairs, T, S)
        seen = pairs_visible(
            visible, terms, pairs, lo[:, None], hi[:, None], T, S, bias
        )  # [BLOCK_M, BLOCK_N]
        there = (rows < T)[:, None] & (keys < S)[None, :]
        # Full tiles are loaded whole; rows or keys of the owner that are not there are not stored.
        whole = (row_tile + 1) * BLOCK_M <= T if BY_KEYS else (key_tile + 1) * BLOCK_N <= S
        met = seen & there
        if support is not None:
            met = met & _supported(support, b * H + h, pairs, T, S, there)
        is_seen = tl.max(met.to(tl.int32)) != 0
        is_full = is_seen & whole & (tl.min((seen | ~there).to(tl.int32)) != 0)
        tl.store(at + full, tile, mask=is_full)
        tl.store(at + length + partial, tile, mask=is_seen & ~is_full)
        full += is_full.to(tl.int32)
        partial += (is_seen & ~is_full).to(tl.int32)
    counts += tl.program_id(0).to(tl.int64) * 2
    tl.store(counts, full)
    tl.store(counts + 1, partial)


@triton.jit
def _supported(support, head, pairs, T, S, there):
    """bool, False where pairs are in a tile outside of the support; `head` counts those of all batches."""
    row_tiles, key_tiles = tl.cdiv(T, support.block_m), tl.cdiv(S, support.block_n)
    tile = head.to(tl.int64) * row_tiles + pairs.rows // support.block_m
    at = support.ptr + tile * key_tiles + pairs.keys // support.block_n
    return tl.load(at, mask=there, other=0) != 0


def visible_to_tiles(
    call: Call,
    terms: Terms,
    visible: Visible,
    tiles: Tiles,
    by_keys: bool = False,
    support: Support | None = None,
    listed: bool = False,
) -> Visible:
    """`visible` of the call as kernels with these tiles read it: with lists of tiles where they are needed.

    `by_keys`: lists of tiles of rows for every tile of keys, not the other way around. Tiles outside of `support` are
    in none.
    """
    if visible.dense is None and terms.bias is None and support is None and not listed:
        return visible
    B, H, T, S = call.sizes
    batches, heads = varying_pairs(call) if support is None else (B, H)
    row_tiles, key_tiles = -(-T // tiles.block_m), -(-S // tiles.block_n)
    owners, length = (key_tiles, row_tiles) if by_keys else (row_tiles, key_tiles)
    count = batches * heads * owners
    lists = call.query.new_empty((count, 2, length), dtype=torch.int32)
    counts = call.query.new_empty((count, 2), dtype=torch.int32)
    launch(
        _lists_kernel, count, call.query, tiles, visible, terms,
        support, lists, counts, heads, T, S,
        BY_KEYS=by_keys, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
    )  # fmt: skip
    strides = heads * owners if batches != 1 else 0, owners if heads != 1 else 0
    return visible._replace(lists=TileLists(lists, counts, length, *strides))


def varying_pairs(call: Call) -> tuple[int, int]:
    """Batches and heads that may see different pairs: those of the call, or 1 where all see the same."""
    B, H, _, _ = call.sizes
    i, bias, table = call.intervals, call.bias, call.offset_bias
    of_batches = [part.shape[0] for part in (i.k_lo, i.key_visible, i.dense) if part is not None]
    of_heads = [] if i.dense is None else [i.dense.shape[1]]
    of_heads.append(2 if i.by_head else 1)
    if bias is not None:
        of_batches += bias.shape[:2]
        of_heads.append(bias.shape[2])
    if table is not None:
        of_heads.append(table.shape[0])
    batches, heads = (any(size != 1 for size in sizes) for sizes in (of_batches, of_heads))
    return B if batches else 1, H if heads else 1
