"""A tile of query rows of a head against every key that it sees: the online softmax of both operators.

They differ in the query alone. That of gated attention is a tile of the head's own. Collaborative attention mixes the
query that its heads share: of a head that uses few features (`chunks`) those are gathered, mixed once and stay on chip
like a query of the head's own, and so are the same features of every tile of keys. Where a head uses more than RESIDENT
features, the mixed query is formed chunk by chunk, beside the chunk of keys that it meets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from heads_kernels.ops.triton.chunks import (
    active_chunks,
    active_features,
    chunk_at,
    load_content_bias,
    mixed,
)
from heads_kernels.ops.triton.descriptors import load_keys
from heads_kernels.ops.triton.entmax_forward import attend_sparse
from heads_kernels.ops.triton.load import load_columns, load_features, load_tile
from heads_kernels.ops.triton.operands import Pairs
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
from heads_kernels.ops.triton.visible import (
    Visits,
    full_tile,
    pairs_visible,
    partial_count,
    partial_tile,
    ranges,
    tiles_of_split,
    tiles_seen,
)


class Attended(NamedTuple):
    """Of the rows of a head, in a kernel: see `attend`."""

    rows: Any  # [BLOCK_M, BLOCK_DV]
    lse: Any
    above: Any
    sees: Any


class SoftmaxSums(NamedTuple):
    """Of rows of a head over keys, in a kernel, as of `online_softmax`: `acc` [BLOCK_M, BLOCK_DV], others [BLOCK_M]."""

    acc: Any
    row_max: Any
    row_sum: Any


class QueryTile(NamedTuple):
    """The query of a head, in a kernel: the tile `q` [BLOCK_M, W], and the features that `columns` and `used` [W] say.

    `columns` is None for a head with a query of its own, `q` for one that is mixed chunk by chunk, from `chunks`.
    """

    q: Any
    columns: Any
    used: Any
    chunks: Any


class Share(NamedTuple):
    """A share of the tiles of keys, in a kernel."""

    number: Any
    shares: Any


class KeyTiles(NamedTuple):
    """Descriptors of keys and values, in a kernel; None: they come through pointers."""

    key: Any
    value: Any


@triton.jit
def attend(of, tiles, place, sizes, TILE: tl.constexpr):
    """`attended` of the rows of a head, `lse`, `above` and whether they see anything.

    Rows that see nothing have 0, and -inf or their sink. With T 0 (a closed head) no row and no key is read, and lse is
    -inf. With entmax lse is the largest score, and the threshold is `above` it. Full tiles of keys come through the
    descriptors `tiles`, unless those are None. The scale is not negative. The query tile, scores, probabilities and the
    accumulator stay on chip.
    """
    if of.terms.alpha is None:
        sums = accumulate(of, tiles, place, None, sizes, TILE)
        attended = normalized(sums, of.terms, of.dropout, place, sizes)
    else:
        rows, lse, above, sees = attend_sparse(of, place, sizes, TILE)
        attended = Attended(rows, lse, above, sees)
    return attended


@triton.jit
def normalized(sums, terms, dropout, place, sizes):
    """What `attend` returns, of the sums over all keys that rows see."""
    row_sum = sums.row_sum
    share = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    if dropout is not None:
        share = share * dropout.scale
    scale_log2 = softmax_scale(sizes.scale, terms)
    lse, sees = log_sum_exp(sums.row_max, row_sum, scale_log2, terms), row_sum != 0.0
    if terms.sinks is not None:
        lse, of_keys = add_sink(lse, terms, place.h)
        share = share * of_keys
        lse = tl.where(place.at < sizes.T, lse, float("-inf"))
    return Attended(sums.acc * share[:, None], lse, lse, sees)


@triton.jit
def softmax_scale(scale, terms):
    """What scores are multiplied by in the softmax, in base 2: above 0, as the online form asks."""
    return tl.maximum(scale_log2_of(scale, terms), SMALLEST)


@triton.jit
def no_sums(ROWS: tl.constexpr, TILE: tl.constexpr):
    """The sums over no key."""
    return SoftmaxSums(
        tl.zeros((ROWS, TILE.block_dv), tl.float32),
        tl.full((ROWS,), float("-inf"), tl.float32),
        tl.zeros((ROWS,), tl.float32),
    )


@triton.jit
def accumulate(of, tiles, place, split, sizes, TILE: tl.constexpr):
    """The sums over all tiles of keys that the rows of `place` see, or over a `split` of them; None: over all.

    Its head is that of all rows, or [BLOCK_M] where heads that share a key head are the rows.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_D: tl.constexpr = TILE.block_d
    if of.mixing is None:
        head = place.h
        if of.grouped is not None:
            head = place.hk
        q = load_tile(
            of.query, place.b, head, place.first, place.at < sizes.T, TILE.d, BLOCK_M, BLOCK_D
        )  # [BLOCK_M, BLOCK_D]
        sums = _stream(of, tiles, QueryTile(q, None, None, None), place, split, sizes, TILE)
    else:
        chunks = active_chunks(of.mixing, place.h, TILE)
        count = chunks.length
        sums = no_sums(BLOCK_M, TILE)
        for doubling in tl.static_range(0, 5):  # widths of up to MOST_CHUNKS chunks
            if (BLOCK_D << doubling) <= TILE.resident:  # noqa: SIM102 (known when it is compiled)
                if (count > (1 << doubling) // 2) & (count <= (1 << doubling)):
                    columns, used = active_features(chunks, 0, BLOCK_D << doubling, TILE)
                    q = load_features(
                        of.query, place.b, place.first, place.at < sizes.T, columns, used, BLOCK_M
                    )
                    q = mixed(
                        q, of.mixing, place.h, columns, used
                    )  # [BLOCK_M, BLOCK_D << doubling]
                    query = QueryTile(q, columns, used, chunks)
                    sums = _stream(of, tiles, query, place, split, sizes, TILE)
        if TILE.chunks * BLOCK_D > TILE.resident:  # noqa: SIM102
            if count * BLOCK_D > TILE.resident:
                query = QueryTile(None, None, None, chunks)
                sums = _stream(of, tiles, query, place, split, sizes, TILE)
    return sums


@triton.jit
def _stream(of, tiles, query, place, split, sizes, TILE: tl.constexpr):
    """What `accumulate` returns, of a query."""
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    b, h = place.b, place.h
    lo, hi = ranges(of.visible, b, h, place.at, sizes.T, sizes.S)  # [BLOCK_M]
    own = place.first // BLOCK_M
    start, full_start, full_end, end, front = tiles_seen(
        of.visible, place, own, lo, hi, sizes.T, BLOCK_N
    )
    if (of.visible.lists is None) and (
        (of.visible.dense is not None) or (of.terms.bias is not None)
    ):
        full_end = full_start  # pairs may be hidden one by one
    visits = Visits(start, full_start, full_end, end, front)
    if split is not None:
        visits = tiles_of_split(visits, split.number, split.shares)
    STEP_N: tl.constexpr = BLOCK_N if tiles.key is None else tiles.key.block_shape[2]
    STEP: tl.constexpr = STEP_N // BLOCK_N
    # Full tiles that do not fill a step are visited as partial ones.
    full = (visits.full_end - visits.full_start) // STEP * STEP
    full_end = visits.full_start + full
    visits = Visits(visits.start, visits.full_start, full_end, visits.end, visits.front)
    sums = no_sums(BLOCK_M, TILE)
    for number in range(visits.full_start, visits.full_end, STEP):
        first = full_tile(of.visible, b, h, own, number) * BLOCK_N
        sums = _attend_tile(of, tiles, query, sums, None, None, first, place, sizes, STEP_N, TILE)
    for number in tl.range(0, partial_count(visits), num_stages=TILE.partial_stages):
        first = partial_tile(of.visible, b, h, own, number, visits) * BLOCK_N
        sums = _attend_tile(of, tiles, query, sums, lo, hi, first, place, sizes, BLOCK_N, TILE)
    return sums


@triton.jit
def _attend_tile(
    of, tiles, query, sums, lo, hi, first, place, sizes, BLOCK_N: tl.constexpr, TILE: tl.constexpr
):
    """The sums after BLOCK_N keys from `first` on; pairs are masked one by one where the ranges of rows are given."""
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_D: tl.constexpr = TILE.block_d
    b, h, rows, S = place.b, place.h, place.at, sizes.S
    keys = first + tl.arange(0, BLOCK_N)
    heads = h
    if of.grouped is not None:
        heads = h[:, None]
    there = None
    if lo is not None:
        there = keys < S
    pairs = Pairs(b, heads, rows[:, None], keys[None, :])
    bias = load_bias(of.terms, pairs, sizes.T, S)
    if of.content_bias is not None:
        content = load_content_bias(of.content_bias, b, h, keys, S)
    raw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if query.q is None:
        for number in range(query.chunks.length):
            column = chunk_at(query.chunks, number) * BLOCK_D
            features = column + tl.arange(0, BLOCK_D)
            q = load_columns(
                of.query, b, place.first, rows < sizes.T, column, TILE.d, BLOCK_M, BLOCK_D
            )
            k = load_columns(of.key, b, first, keys < S, column, TILE.d, BLOCK_N, BLOCK_D)
            q = mixed(q, of.mixing, h, features, features < TILE.d)  # [BLOCK_M, BLOCK_D]
            raw = product(q, tl.trans(k), raw)
    elif query.columns is not None:
        k = load_features(of.key, b, first, there, query.columns, query.used, BLOCK_N)
        raw = product(query.q, tl.trans(k), raw)
    else:
        k = load_keys(
            of.key, tiles.key, b, place.hk, first, there, TILE.d, BLOCK_N, BLOCK_D
        )  # [BLOCK_N, BLOCK_D]
        raw = product(query.q, tl.trans(k), raw)
    v = load_keys(
        of.value, tiles.value, b, place.hk, first, there, TILE.dv, BLOCK_N, TILE.block_dv
    )  # [BLOCK_N, BLOCK_DV]
    if of.content_bias is not None:
        raw += content[None, :]
    scores, _ = finish(raw, bias, of.terms, sizes.scale)  # [BLOCK_M, BLOCK_N]
    if lo is not None:
        seen = pairs_visible(
            of.visible, of.terms, pairs, lo[:, None], hi[:, None], sizes.T, S, bias
        )
        scores = tl.where(seen, scores + poison(v)[None, :], float("-inf"))
        v = finite_part(v)
    p, row_max, row_sum, alpha = online_softmax(
        scores, sums.row_max, sums.row_sum, softmax_scale(sizes.scale, of.terms), of.terms
    )
    if of.dropout is not None:
        p = tl.where(kept(of.dropout, b, heads, rows, first, BLOCK_N), p, 0.0)
    return SoftmaxSums(product(p.to(v.dtype), v, sums.acc * alpha[:, None]), row_max, row_sum)
