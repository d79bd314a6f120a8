"""Which keys a tile of query rows sees, and which query rows see a tile of keys.

A query row i sees the keys j of one half-open range and the first keys of its head before that, less those that
`key_visible` hides (see `heads_kernels.mask.Intervals`). Tiles outside of these are never visited; tiles inside the
ranges of all their rows need no mask arithmetic. So a loop runs over two lists of tiles, in this order:

    full      the tiles [full_start, full_end), where every row sees every key
    partial   those of [start, full_start), [full_end, end) and [0, front), which are masked element by element

If single pairs may be hidden, by a dense mask or a bias of -inf, or where a kernel of Gluon asks for them, a separate
kernel reads mask and bias once and writes both lists for every tile of query rows (for passes over keys, of keys);
entmax leaves out the tiles in which it has no probability above 0. The numbers of `Visits` are places in these lists,
where `full_tile` and `partial_tile` read the indices of tiles. The lists are written on the device before every launch
that reads them, so nothing waits for the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from heads_kernels.call import Call
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import pair_addresses
from heads_kernels.ops.triton.operands import Operands, Pairs, Support, TileLists
from heads_kernels.ops.triton.scores import load_bias
from heads_kernels.ops.triton.tiles import Tiles

#: Rows, or keys, that are searched together. Heuristic: 8 values for each thread of 4 warps.
SCAN: tl.constexpr = tl.constexpr(1024)


class Visits(NamedTuple):
    """The tiles of a loop, in a kernel: front <= start <= full_start <= full_end <= end."""

    start: Any
    full_start: Any
    full_end: Any
    end: Any
    front: Any


@triton.jit
def first_keys_of(visible, h):
    """The number of first keys of head `h`, or of each head of a tensor `h`."""
    return tl.load(visible.first_keys + h * visible.stride_first)


@triton.jit
def visible_keys(visible, b, keys, S):
    """The numbers `keys`, with -1, which is in no range, in the place of those that `key_visible` hides."""
    if visible.key_visible is not None:
        at = visible.key_visible + b.to(tl.int64) * visible.stride_keys + keys
        keys = tl.where(tl.load(at, mask=keys < S, other=0) != 0, keys, -1)
    return keys


@triton.jit
def ranges(visible, b, h, rows, T, S):
    """`lo`, `hi` of query `rows` (a tensor of any shape); `lo == hi == 0` for rows that see no key.

    Rows `>= T` see no key; a closed head has T 0. `h` is their head, or broadcasts with `rows`. If the first keys reach
    the range of a row, or the row has no other keys, its range begins at 0.
    """
    lo = tl.maximum(rows + visible.band_lo, 0)
    hi = tl.minimum(rows + visible.band_hi, S)
    there = rows < T
    if visible.k_lo is not None:
        of_head = b.to(tl.int64) * visible.stride_rows + h.to(tl.int64) * visible.stride_rows_h
        at = of_head + rows
        lo = tl.maximum(lo, tl.load(visible.k_lo + at, mask=there, other=0))
        hi = tl.minimum(hi, tl.load(visible.k_hi + at, mask=there, other=0))
    if visible.first_keys is not None:
        front = first_keys_of(visible, h)
        none = lo >= hi
        hi = tl.where(none, tl.minimum(hi, front), hi)
        lo = tl.where(none | (lo <= front), 0, lo)
    sees = there & (lo < hi)
    return tl.where(sees, lo, 0), tl.where(sees, hi, 0)


@triton.jit
def tiles_seen(visible, place, tile, lo, hi, T, BLOCK: tl.constexpr, scanned=None):
    """Tiles of keys for the query rows of `tile` with ranges `lo`, `hi`."""
    if visible.lists is None:
        visits = tiles_in_ranges(visible, place.b, place.h, lo, hi, place.at, T, BLOCK, scanned)
    else:
        visits = listed_tiles(visible, place.b, place.h, tile, T)
    return visits


@triton.jit
def tiles_in_ranges(visible, b, h, lo, hi, rows, T, BLOCK: tl.constexpr, scanned=None):
    """The same from intervals alone, for rows of head `h`, or of a head each.

    In Gluon, `scanned` is 0 to SCAN - 1 in a layout.
    """
    sees = lo < hi
    start = tl.min(tl.where(sees, lo, 2147483647), 0) // BLOCK
    end = tl.cdiv(tl.max(hi, 0), BLOCK)
    # Rows beyond the last one are not stored, so they need no mask.
    there = rows < T
    full_start = tl.cdiv(tl.max(tl.where(there, lo, 0), 0), BLOCK)
    full_end = tl.min(tl.where(there, hi, 2147483647), 0) // BLOCK
    start = tl.minimum(start, end)
    if visible.key_visible is not None:  # full tiles end at the first hidden key
        if scanned is None:
            scanned = tl.arange(0, SCAN)
        hole = full_end * BLOCK
        at = visible.key_visible + b.to(tl.int64) * visible.stride_keys
        for scan in range(full_start * BLOCK, tl.minimum(full_end, end) * BLOCK, SCAN):
            keys = scan + scanned
            seen = tl.load(at + keys, mask=keys < hole, other=1) != 0
            hole = tl.minimum(hole, tl.min(tl.where(seen, 2147483647, keys), 0))
        full_end = hole // BLOCK
    front = end * 0
    if visible.first_keys is not None:
        keys = first_keys_of(visible, h)
        front = tl.cdiv(tl.max(tl.where(lo < hi, tl.minimum(keys, hi), 0)), BLOCK)
    return ordered(start, full_start, full_end, end, front)


@triton.jit
def tiles_that_see(visible, b, h, first_key, T, S, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr):
    """Tiles of query rows of head `h` for the keys `[first_key, first_key + BLOCK_N)`, as `tiles_in_ranges`.

    With `k_lo`, tiles count as full only if all rows between the first and the last row that see every key also see
    every key; otherwise all tiles are partial.
    """
    last_key = tl.minimum(first_key + BLOCK_N, S)  # exclusive
    whole = first_key < S  # results of keys beyond the last one are not stored
    if visible.k_lo is None:
        # A row sees a key if i + band_lo < last_key and first_key < i + band_hi, and every key with bounds exchanged.
        first = tl.maximum(first_key - visible.band_hi + 1, 0)
        stop = tl.minimum(last_key - visible.band_lo, T)
        full_first = tl.maximum(last_key - visible.band_hi, 0)
        full_stop = tl.minimum(first_key - visible.band_lo + 1, T)
    else:
        first = T
        stop = first_key * 0
        full_first = T
        full_stop = first_key * 0
        count = first_key * 0
        for scan in range(0, T, SCAN):
            i = scan + tl.arange(0, SCAN)
            lo, hi = ranges(visible, b, h, i, T, S)
            below, above = lo < last_key, lo <= first_key
            if visible.first_keys is not None:
                front = first_keys_of(visible, h)
                below, above = below | (first_key < front), above | (last_key <= front)
            sees = below & (hi > first_key)
            first = tl.minimum(first, tl.min(tl.where(sees, i, 2147483647)))
            stop = tl.maximum(stop, tl.max(tl.where(sees, i + 1, 0)))
            every = above & (hi >= last_key)
            full_first = tl.minimum(full_first, tl.min(tl.where(every, i, 2147483647)))
            full_stop = tl.maximum(full_stop, tl.max(tl.where(every, i + 1, 0)))
            count += tl.sum(every.to(tl.int32))
        whole = whole & (count == full_stop - full_first)
    if visible.key_visible is not None:
        keys = first_key + tl.arange(0, BLOCK_N)
        at = visible.key_visible + b.to(tl.int64) * visible.stride_keys + keys
        whole = whole & (tl.min((tl.load(at, mask=keys < S, other=1) != 0).to(tl.int32)) != 0)
    end = tl.cdiv(tl.maximum(stop, 0), BLOCK)
    start = tl.minimum(first // BLOCK, end)
    full_end = tl.where(whole, tl.maximum(full_stop, 0) // BLOCK, 0)
    return ordered(start, tl.cdiv(full_first, BLOCK), full_end, end, end * 0)


@triton.jit
def tiles_seeing(visible, place, sizes, TILE: tl.constexpr):
    """Tiles of query rows of the head of `place` in which at least one row sees one of its BLOCK_N keys."""
    b, h, first, T, S = place.b, place.h, place.first, sizes.T, sizes.S
    if visible.lists is None:
        visits = tiles_that_see(visible, b, h, first, T, S, TILE.block_n, TILE.block_m)
    else:
        visits = listed_tiles(visible, b, h, first // TILE.block_n, T)
    return visits


@triton.jit
def ordered(start, full_start, full_end, end, front):
    """`Visits` with `front <= start <= full_start <= full_end <= end`; without full tiles if the bounds cross."""
    full_start = tl.minimum(tl.maximum(full_start, start), end)
    full_end = tl.maximum(tl.minimum(full_end, end), full_start)
    return Visits(start, full_start, full_end, end, tl.minimum(front, start))


@triton.jit
def tiles_of_split(visits, split, splits):
    """Share `split` of `splits` of these tiles: consecutive ones, the same number in each, fewer or none in the last.

    The tiles of first keys are in the first share.
    """
    share = tl.cdiv(visits.end - visits.start, splits)
    first = tl.minimum(visits.start + split * share, visits.end)
    end = tl.minimum(first + share, visits.end)
    front = tl.where(split == 0, visits.front, 0)
    return ordered(first, visits.full_start, visits.full_end, end, front)


@triton.jit
def listed_tiles(visible, b, h, tile, T):
    """The `Visits` from the lists of a tile of rows or of keys; no tiles if T is 0 (a closed head)."""
    counts = visible.lists.counts + _number_of_list(visible, b, h, tile) * 2
    taking_part = tl.minimum(T, 1)
    full = tl.load(counts) * taking_part
    return Visits(full * 0, full * 0, full, full + tl.load(counts + 1) * taking_part, full * 0)


@triton.jit
def _number_of_list(visible, b, h, tile):
    return b.to(tl.int64) * visible.lists.stride_b + h.to(tl.int64) * visible.lists.stride_h + tile


@triton.jit
def _list_of(visible, b, h, tile):
    return visible.lists.tiles + _number_of_list(visible, b, h, tile) * (2 * visible.lists.length)


@triton.jit
def full_tile(visible, b, h, tile, place):
    """The tile at `place` among the full tiles for a `tile` of rows or of keys."""
    if visible.lists is not None:
        place = tl.load(_list_of(visible, b, h, tile) + place)
    return place


@triton.jit
def tile_count(visits):
    """The number of tiles, full and partial."""
    return visits.front + visits.end - visits.start


@triton.jit
def tile_at(visits, index):
    """The tile at `index` among all tiles, in ascending order."""
    return tl.where(index < visits.front, index, visits.start + index - visits.front)


@triton.jit
def partial_count(visits):
    """The number of partial tiles."""
    return visits.full_start - visits.start + visits.end - visits.full_end + visits.front


@triton.jit
def partial_tile(visible, b, h, tile, index, visits):
    """The tile at `index` among the partial tiles for a `tile` of rows or of keys."""
    if visible.lists is None:
        before = visits.full_start - visits.start
        number = tl.where(index < before, visits.start + index, visits.full_end + index - before)
        if visible.first_keys is not None:
            number = tl.where(number < visits.end, number, number - visits.end)
    else:
        number = tl.load(_list_of(visible, b, h, tile) + visible.lists.length + index)
    return number


@triton.jit
def pairs_visible(visible, terms, pairs, lo, hi, T, S, bias):
    """bool, True where the row sees the key; `lo` and `hi` are the ranges of the rows, with their shape.

    `bias` is the bias of the pairs; -inf hides a pair.
    """
    keys = pairs.keys
    seen = keys >= lo
    if visible.first_keys is not None:
        seen = seen | (keys < first_keys_of(visible, pairs.h))
    seen = seen & (keys < hi)
    if visible.key_visible is not None:
        at = pairs.b.to(tl.int64) * visible.stride_keys + keys
        seen = seen & (tl.load(visible.key_visible + at, mask=keys < S, other=0) != 0)
    if visible.dense is not None:
        of_batch = pairs.b.to(tl.int64) * visible.dense.stride_b
        at = pair_addresses(visible.dense, visible.far_dense, of_batch, pairs)
        seen = seen & (tl.load(at, mask=(pairs.rows < T) & (keys < S), other=0) != 0)
    if terms.bias is not None:
        seen = seen & (bias != float("-inf"))
    return seen


@triton.jit
def keys_visible(visible, terms, b, h, rows, lo, hi, keys, T, S):
    """`pairs_visible` [M, N] of query rows of a head, with their ranges, and keys; also the pairs and their bias."""
    pairs = Pairs(b, h, rows[:, None], keys[None, :])
    bias = load_bias(terms, pairs, T, S)
    seen = pairs_visible(visible, terms, pairs, lo[:, None], hi[:, None], T, S, bias)
    return seen, pairs, bias


# ---------------------------------------------------------------------- lists
@triton.jit
def _own_list(H, T, S, BY_KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of a program's lists: batch, head, and their tile of rows (with BY_KEYS of keys)."""
    owners = tl.cdiv(S, BLOCK_N) if BY_KEYS else tl.cdiv(T, BLOCK_M)
    pair = tl.program_id(0) // owners
    return pair // H, pair % H, tl.program_id(0) % owners


@triton.jit
def _lists_kernel(
    visible, terms, support, lists, H, T, S, BY_KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """A program writes the two lists of one tile of rows, or with BY_KEYS of keys, and their lengths."""
    b, h, owner = _own_list(H, T, S, BY_KEYS, BLOCK_M, BLOCK_N)
    if BY_KEYS:
        visits = tiles_that_see(visible, b, h, owner * BLOCK_N, T, S, BLOCK_N, BLOCK_M)
    else:
        rows = owner * BLOCK_M + tl.arange(0, BLOCK_M)
        lo, hi = ranges(visible, b, h, rows, T, S)
        visits = tiles_in_ranges(visible, b, h, lo, hi, rows, T, BLOCK_N)
    length = lists.length
    at = lists.tiles + tl.program_id(0).to(tl.int64) * (2 * length)
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
        seen, pairs, _ = keys_visible(visible, terms, b, h, rows, lo, hi, keys, T, S)
        there = (rows < T)[:, None] & (keys < S)[None, :]
        # A full tile is loaded without a mask, so it must end within T or S; the owner's rows or keys need not.
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
    of_program = lists.counts + tl.program_id(0).to(tl.int64) * 2
    tl.store(of_program, full)
    tl.store(of_program + 1, partial)


@triton.jit
def _ranges_kernel(
    visible, lists, H, T, S, BY_KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr
):
    """The lists of `_lists_kernel` where ranges alone say which pairs are visible, AT_ONCE tiles at a time."""
    b, h, owner = _own_list(H, T, S, BY_KEYS, BLOCK_M, BLOCK_N)
    length = lists.length
    at = lists.tiles + tl.program_id(0).to(tl.int64) * (2 * length)
    full, partial = owner * 0, owner * 0
    for start in range(0, length, AT_ONCE):
        tile = start + tl.arange(0, AT_ONCE)
        if BY_KEYS:
            row_tile, key_tile = tile, tile * 0 + owner
            whole = (row_tile + 1) * BLOCK_M <= T
        else:
            row_tile, key_tile = tile * 0 + owner, tile
            whole = (key_tile + 1) * BLOCK_N <= S
        rows = (row_tile * BLOCK_M)[:, None] + tl.arange(0, BLOCK_M)[None, :]
        lo, hi = ranges(visible, b, h, rows, T, S)  # [AT_ONCE, BLOCK_M]
        first = (key_tile * BLOCK_N)[:, None]
        end = tl.minimum(first + BLOCK_N, S)
        sees_some = (lo < end) & (hi > first)
        sees_all = ((lo <= first) & (hi >= end)) | (rows >= T)
        is_seen = (tile < length) & (tl.max(sees_some.to(tl.int32), 1) != 0)
        is_full = is_seen & whole & (tl.min(sees_all.to(tl.int32), 1) != 0)
        is_partial = is_seen & ~is_full
        count_full, count_partial = is_full.to(tl.int32), is_partial.to(tl.int32)
        tl.store(at + full + tl.cumsum(count_full) - 1, tile, mask=is_full)
        tl.store(at + length + partial + tl.cumsum(count_partial) - 1, tile, mask=is_partial)
        full += tl.sum(count_full)
        partial += tl.sum(count_partial)
    of_program = lists.counts + tl.program_id(0).to(tl.int64) * 2
    tl.store(of_program, full)
    tl.store(of_program + 1, partial)


@triton.jit
def _supported(support, head, pairs, T, S, there):
    """bool, False for pairs in a tile outside of the support; `head` is an index over all batches and heads."""
    row_tiles, key_tiles = tl.cdiv(T, support.block_m), tl.cdiv(S, support.block_n)
    tile = head.to(tl.int64) * row_tiles + pairs.rows // support.block_m
    at = support.ptr + tile * key_tiles + pairs.keys // support.block_n
    return tl.load(at, mask=there, other=0) != 0


def with_tile_lists(
    call: Call, of: Operands, tiles: Tiles, by_keys: bool = False, support: Support | None = None, listed: bool = False
) -> Operands:
    """The operands for kernels with these tiles, with lists of tiles if they are needed or `listed`.

    With `by_keys`, lists have tiles of rows for every tile of keys, not the other way around. Tiles outside of
    `support` are in no list. An entmax kernel without a support lists its tiles itself.
    """
    if support is None and call.alpha is not None:
        return of
    if of.visible.dense is None and of.terms.bias is None and support is None and not listed:
        return of
    B, H, T, S = call.sizes
    batches, heads = _varying_pairs(call) if support is None else (B, H)
    row_tiles, key_tiles = -(-T // tiles.block_m), -(-S // tiles.block_n)
    owners, length = (key_tiles, row_tiles) if by_keys else (row_tiles, key_tiles)
    count = batches * heads * owners
    strides = heads * owners if batches != 1 else 0, owners if heads != 1 else 0
    numbers = call.query.new_empty((count, 2, length), dtype=torch.int32)
    lists = TileLists(numbers, numbers.new_empty(count, 2), length, *strides)
    if all(each is None for each in (call.dense_mask, call.key_visible, call.first_keys, of.terms.bias, support)):
        launch(
            _ranges_kernel, count, call.query, tiles, of.visible, lists, heads, T, S,
            BY_KEYS=by_keys, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            AT_ONCE=max(2, min(triton.next_power_of_2(length), SCAN.value // tiles.block_m)),
        )  # fmt: skip
    else:
        launch(
            _lists_kernel, count, call.query, tiles, of.visible, of.terms, support, lists, heads, T, S,
            BY_KEYS=by_keys, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        )  # fmt: skip
    return of._replace(visible=of.visible._replace(lists=lists))


def _varying_pairs(call: Call) -> tuple[int, int]:
    """The numbers of batches and heads whose visible pairs may differ: those of the call, or 1 if all see the same."""
    dense, bias, table = call.dense_mask, call.bias, call.offset_bias
    of_batches = [part.shape[0] for part in (call.k_lo, call.key_visible, dense) if part is not None]
    of_heads = [2 if call.intervals.by_head else 1]
    if dense is not None:
        of_heads.append(dense.shape[1])
    if bias is not None:
        of_batches += bias.shape[:2]
        of_heads.append(bias.shape[2])
    if table is not None:
        of_heads.append(table.shape[0])
    batches, heads = (any(size != 1 for size in sizes) for sizes in (of_batches, of_heads))
    return call.B if batches else 1, call.H if heads else 1
