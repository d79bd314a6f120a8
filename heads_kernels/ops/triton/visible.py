"""Which keys a tile of query rows sees, and which query rows see a tile of keys.

A query row i sees the keys j of one half-open range, less those that `key_visible` hides (see
`heads_kernels.mask.Intervals`). Tiles outside of every range are never visited; tiles inside of the ranges of all their
rows take no mask arithmetic. So a loop runs over two lists of tiles, in this order:

    full      the tiles [full_start, full_end), where every row sees every key
    partial   those of [start, full_start) and [full_end, end), which are masked element by element

Where intervals do not say which tiles are full, `tile_lists` has written the lists before: the four numbers of `Visits`
then are places in them, and `full_tile` and `partial_tile` read the numbers of tiles there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from heads_kernels.ops.triton.load import pair_addresses

#: Rows looked at together by `rows_that_see`. Heuristic: 8 values a thread of 4 warps.
_SCAN: tl.constexpr = tl.constexpr(1024)


class Visits(NamedTuple):
    """The tiles of a loop, in a kernel: start <= full_start <= full_end <= end."""

    start: Any
    full_start: Any
    full_end: Any
    end: Any


@triton.jit
def ranges(visible, b, rows, T, S):
    """`lo`, `hi` of query `rows` (a tensor of any shape): `lo == hi == 0` where they see nothing.

    So do rows that are not there (`>= T`); a closed head has T 0.
    """
    lo = tl.maximum(rows + visible.band_lo, 0)
    hi = tl.minimum(rows + visible.band_hi, S)
    there = rows < T
    if visible.k_lo is not None:
        at = b.to(tl.int64) * visible.stride_rows + rows
        lo = tl.maximum(lo, tl.load(visible.k_lo + at, mask=there, other=0))
        hi = tl.minimum(hi, tl.load(visible.k_hi + at, mask=there, other=0))
    sees = there & (lo < hi)
    return tl.where(sees, lo, 0), tl.where(sees, hi, 0)


@triton.jit
def tiles_seen(visible, place, tile, lo, hi, T, BLOCK: tl.constexpr):
    """Tiles of keys for the query rows of `tile` with ranges `lo`, `hi`."""
    if visible.lists is None:
        visits = tiles_in_ranges(visible, place.b, lo, hi, place.at, T, BLOCK)
    else:
        visits = listed_tiles(visible, place.b, place.h, tile, T)
    return visits


@triton.jit
def tiles_in_ranges(visible, b, lo, hi, rows, T, BLOCK: tl.constexpr):
    """The same by intervals alone."""
    start, full_start, full_end, end = tiles_of_ranges(lo, hi, rows, T, BLOCK)
    if visible.key_visible is not None:
        # Full tiles end at the first hidden key.
        hole = full_end * BLOCK
        at = visible.key_visible + b.to(tl.int64) * visible.stride_keys
        for scan in range(full_start * BLOCK, tl.minimum(full_end, end) * BLOCK, _SCAN):
            keys = scan + tl.arange(0, _SCAN)
            seen = tl.load(at + keys, mask=keys < hole, other=1) != 0
            hole = tl.minimum(hole, tl.min(tl.where(seen, 2147483647, keys)))
        full_end = hole // BLOCK
    return ordered(start, full_start, full_end, end)


@triton.jit
def tiles_of_ranges(lo, hi, rows, T, BLOCK: tl.constexpr):
    """The four numbers of `Visits`, not in order, of rows with ranges `lo`, `hi` in which no key is hidden."""
    sees = lo < hi
    start = tl.min(tl.where(sees, lo, 2147483647), 0) // BLOCK
    end = tl.cdiv(tl.max(hi, 0), BLOCK)
    # Rows that are not there are not stored: they need no mask.
    there = rows < T
    full_start = tl.cdiv(tl.max(tl.where(there, lo, 0), 0), BLOCK)
    full_end = tl.min(tl.where(there, hi, 2147483647), 0) // BLOCK
    return tl.minimum(start, end), full_start, full_end, end


@triton.jit
def tiles_that_see(visible, b, first_key, T, S, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr):
    """Tiles of query rows for the keys `[first_key, first_key + BLOCK_N)`, as `tiles_in_ranges`.

    Where data decides (`k_lo`), rows between the first and the last that see a key count as partial unless all rows
    from the first to the last that see every key do see every key.
    """
    last_key = tl.minimum(first_key + BLOCK_N, S)  # exclusive
    whole = first_key < S  # what stands beyond the last key is not stored
    if visible.k_lo is None:
        # i + band_lo < last_key and first_key < i + band_hi; the full rows the other way around.
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
        for scan in range(0, T, _SCAN):
            i = scan + tl.arange(0, _SCAN)
            lo, hi = ranges(visible, b, i, T, S)
            sees = (lo < last_key) & (hi > first_key)
            first = tl.minimum(first, tl.min(tl.where(sees, i, 2147483647)))
            stop = tl.maximum(stop, tl.max(tl.where(sees, i + 1, 0)))
            every = (lo <= first_key) & (hi >= last_key)
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
    return ordered(start, tl.cdiv(full_first, BLOCK), full_end, end)


@triton.jit
def ordered(start, full_start, full_end, end):
    """The same with `start <= full_start <= full_end <= end`; no full tile is left where they cross."""
    full_start = tl.minimum(tl.maximum(full_start, start), end)
    full_end = tl.maximum(tl.minimum(full_end, end), full_start)
    return Visits(start, full_start, full_end, end)


@triton.jit
def tiles_of_split(visits, split, splits):
    """Share `split` of `splits` of these tiles: neighbours, as many in each share, fewer or none in the last ones."""
    share = tl.cdiv(visits.end - visits.start, splits)
    first = tl.minimum(visits.start + split * share, visits.end)
    end = tl.minimum(first + share, visits.end)
    return ordered(first, visits.full_start, visits.full_end, end)


@triton.jit
def listed_tiles(visible, b, h, tile, T):
    """The same of what `tile_lists` wrote for a tile of rows or of keys; no tiles where T is 0 (a closed head)."""
    counts = visible.lists.counts + _number_of_list(visible, b, h, tile) * 2
    taking_part = tl.minimum(T, 1)
    full = tl.load(counts) * taking_part
    return Visits(full * 0, full * 0, full, full + tl.load(counts + 1) * taking_part)


@triton.jit
def _number_of_list(visible, b, h, tile):
    return b.to(tl.int64) * visible.lists.stride_b + h.to(tl.int64) * visible.lists.stride_h + tile


@triton.jit
def full_tile(visible, b, h, tile, place):
    """The tile at `place` among the full ones of a `tile` of rows or of keys."""
    if visible.lists is not None:
        at = _number_of_list(visible, b, h, tile) * (2 * visible.lists.length)
        place = tl.load(visible.lists.tiles + at + place)
    return place


@triton.jit
def partial_count(visits):
    """How many partial tiles there are."""
    return visits.full_start - visits.start + visits.end - visits.full_end


@triton.jit
def partial_tile(visible, b, h, tile, index, visits):
    """The tile that stands at `index` in the list of partial tiles of a `tile` of rows or of keys."""
    if visible.lists is None:
        before = visits.full_start - visits.start
        number = tl.where(index < before, visits.start + index, visits.full_end + index - before)
    else:
        at = _number_of_list(visible, b, h, tile) * (2 * visible.lists.length)
        number = tl.load(visible.lists.tiles + at + visible.lists.length + index)
    return number


@triton.jit
def pairs_visible(visible, terms, pairs, lo, hi, T, S, bias):
    """bool, True where the row sees the key; `lo` and `hi` are the ranges of the rows, and broadcast as they do.

    `bias` is that of their scores: where it is -inf, the key is hidden.
    """
    keys = pairs.keys
    seen = (keys >= lo) & (keys < hi)
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
