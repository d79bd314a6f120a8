"""Tiles of scores: products of query rows and keys of a head that has its own query, or mixes a shared one.

Mixing vectors are read in chunks of BLOCK_D features; a head skips chunks that are all zero, so heads that use few
features take few steps per tile. The number of steps is determined on the device. If a head uses at most RESIDENT
features, its chunks of the query are gathered into one tile, mixed once, and stay on chip like the query of an ordinary
head; so do the same features of keys. Otherwise the backward passes take RESIDENT features of a gradient at a time, and
the other features of the head, up to REST, are a second tile on chip. Where that does not fit, and in the forward pass,
scores are computed chunk by chunk in every tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from heads_kernels.ops.triton.load import add_columns, head_of, load_features, load_keys, load_tile, load_values
from heads_kernels.ops.triton.operands import Pairs, Place
from heads_kernels.ops.triton.scores import finish, load_bias, product
from heads_kernels.ops.triton.visible import pairs_visible, ranges

#: The list of all chunks in order: 0xFEDCBA9876543210 as an int64.
ALL_CHUNKS: tl.constexpr = tl.constexpr(-0x0123456789ABCDF0)


class Chunks(NamedTuple):
    """A list of chunks, in a kernel: its length, and their numbers for `chunk_at`."""

    length: Any
    numbers: Any


class Features(NamedTuple):
    """The features in a tile of queries or keys, in a kernel.

    `columns` and `used` [W] are those of the list `chunks` from place `first` on; None: all features of a head that has
    its own query. `scored` is None if these features give the scores, together with the features `rest` [REST] unless
    that is None; else it is the list of all chunks that do.
    """

    columns: Any = None
    used: Any = None
    chunks: Any = None
    first: Any = 0
    scored: Any = None
    rest: Any = None
    rest_used: Any = None


class QueryRows(NamedTuple):
    """The query rows of a program for a head, in a kernel: `q` [BLOCK_M, W], and the range of keys of each [BLOCK_M].

    `q` is None if scores are computed chunk by chunk; `rest` [BLOCK_M, REST] has the features `features.rest`.
    """

    place: Any
    q: Any
    features: Any
    lo: Any
    hi: Any
    rest: Any = None


class OwnKeys(NamedTuple):
    """The keys of a program for a head, in a kernel: `k` [BLOCK_N, W], `v` [BLOCK_N, BLOCK_DV] and `content` [BLOCK_N].

    `k` is None if scores are computed chunk by chunk, `content` if there is no content bias; `rest` [BLOCK_N, REST] has
    the features `features.rest`.
    """

    place: Any
    k: Any
    v: Any
    content: Any
    features: Any
    rest: Any = None


class KeyTiles(NamedTuple):
    """Descriptors of keys and values, in a kernel; None: they are loaded through pointers."""

    key: Any = None
    value: Any = None


class ScoreTile(NamedTuple):
    """Scores, in a kernel, and the tiles loaded for them: keys and values, or query rows and their dattended.

    `cap` is the slope of the cap. An absent field is a number, because Triton 3.6 cannot return a tuple with None.
    """

    scores: Any
    cap: Any
    seen: Any  # of partial tiles
    operand: Any  # [BLOCK, W]
    weighed: Any  # [BLOCK, BLOCK_DV]


# ---------------------------------------------------------------------- rows of a program
@triton.jit
def own_rows(of, program, H, T, BLOCK_M: tl.constexpr):
    """Batch, head and first row of a `program`; the last rows of a head (the longest under a causal mask) come first.

    Programs are ordered by head. With collaborative attention, consecutive programs are the heads of one tile of rows,
    because they read the same query and key.
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
def place_of_rows(of, sizes, TILE: tl.constexpr):
    """The place of a program that owns rows of one head."""
    b, h, first_row = own_rows(of, tl.program_id(0), sizes.H, sizes.T, TILE.block_m)
    return Place(b, h, h // sizes.group, first_row, first_row + tl.arange(0, TILE.block_m))


# ---------------------------------------------------------------------- chunks
@triton.jit
def load_mixing(mixing, h, columns, used):
    """float32 `[W]`: the features `columns` of a head's mixing vector, 0 where they are not `used`; [W] both."""
    at = mixing.ptr + h.to(tl.int64) * mixing.stride_h + columns.to(tl.int64) * mixing.stride_d
    return tl.load(at, mask=used, other=0.0).to(tl.float32)


@triton.jit
def mixed(tile, mixing, h, columns, used):
    """`tile` [M, W] of features of a shared query or key times the head's mixing, rounded to the dtype of the tile."""
    return (tile.to(tl.float32) * load_mixing(mixing, h, columns, used)[None, :]).to(tile.dtype)


@triton.jit
def active_chunks(mixing, h, TILE: tl.constexpr):
    """The chunks of a head that are not all zero.

    A head without such chunks still takes one step per tile, over chunk 0: its scores are its content bias.
    """
    chunks = tl.arange(0, TILE.chunks)
    return listed(are_active(mixing, h, chunks, tl.arange(0, TILE.block_d), TILE), chunks)


@triton.jit
def are_active(mixing, h, chunks, features, TILE: tl.constexpr):
    """int32 `[chunks]`: 1 for each of the `chunks` with a number other than 0; `features` is 0 to BLOCK_D - 1."""
    d = chunks[:, None] * TILE.block_d + features[None, :]  # [chunks, BLOCK_D]
    at = mixing.ptr + h.to(tl.int64) * mixing.stride_h + d.to(tl.int64) * mixing.stride_d
    used = tl.load(at, mask=d < TILE.d, other=0.0) != 0.0  # in the dtype of mixing
    return tl.max(used.to(tl.int32), 1)


@triton.jit
def listed(active, chunks):
    """The list of the chunks that are `active`, or of chunk 0 if none is; `chunks` is 0 to their number less 1."""
    place = (tl.cumsum(active) - active).to(tl.int64)
    numbers = tl.sum(tl.where(active != 0, chunks.to(tl.int64) << (4 * place), 0))
    return Chunks(tl.maximum(tl.sum(active), 1), numbers)


@triton.jit
def chunk_at(chunks, place):
    """The number of the chunk at `place` in the list."""
    return ((chunks.numbers >> (4 * place)) & 15).to(tl.int32)


@triton.jit
def fill(chunks, STEPS: tl.constexpr):
    """Whether STEPS is the least power of two that is at least the number of listed chunks."""
    return (chunks.length > STEPS // 2) & (chunks.length <= STEPS)


@triton.jit
def gathered(chunks, first, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """The features of the listed chunks from place `first` on, and which of them exist; both [COLUMNS]."""
    place = first + tl.arange(0, COLUMNS) // TILE.block_d
    columns = chunk_at(chunks, place) * TILE.block_d + tl.arange(0, COLUMNS) % TILE.block_d
    return columns, (place < chunks.length) & (columns < TILE.d)


@triton.jit
def others(chunks, first, TILE: tl.constexpr):
    """`gathered`, both [REST], of the listed chunks beside the RESIDENT features from place `first` on."""
    step = tl.arange(0, TILE.rest) // TILE.block_d
    place = tl.where(step < first, step, step + TILE.resident // TILE.block_d)
    columns = chunk_at(chunks, place) * TILE.block_d + tl.arange(0, TILE.rest) % TILE.block_d
    return columns, (place < chunks.length) & (columns < TILE.d)


@triton.jit
def halves(tile):
    """The left and the right half of `tile` [M, W]."""
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def add_chunks(rows, b, first, L, chunks, place, values, TILE: tl.constexpr):
    """Add `values` [BLOCK, W] to the features of the listed chunks from `place` on; only in rows that the program owns.

    W is halved down to one chunk, since `values` leave few registers for the loads.
    """
    if values.shape[1] > TILE.block_d:
        low, high = halves(values)
        add_chunks(rows, b, first, L, chunks, place, low, TILE)
        place += low.shape[1] // TILE.block_d
        add_chunks(rows, b, first, L, chunks, place, high, TILE)
    else:
        end = tl.where(chunks.length > place, L, 0)
        column = chunk_at(chunks, place) * TILE.block_d
        add_columns(rows, b, first, end, column, values, TILE.d)


# ---------------------------------------------------------------------- tiles of scores
@triton.jit
def load_query(of, features, b, h, first, there, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """`[BLOCK, W]`: rows of the query of a head, mixed if it is shared; `there` is as in `load_tile`."""
    if features.columns is None:
        q = load_tile(of.query, b, h, first, there, TILE.d, BLOCK, TILE.block_d)
    else:
        q = load_mixed(of, b, h, first, there, features.columns, features.used, BLOCK)
    return q


@triton.jit
def load_mixed(of, b, h, first, there, columns, used, BLOCK: tl.constexpr):
    """`[BLOCK, W]`: the features `columns` of rows of a shared query, mixed; the rest as in `load_features`."""
    q = load_features(of.query, b, first, there, columns, used, BLOCK)
    return mixed(q, of.mixing, h, columns, used)


@triton.jit
def load_key(of, tiles, features, b, hk, first, there, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """`[BLOCK, W]`: keys of a key head; `tiles` and `there` are as in `load_keys`."""
    if features.columns is None:
        k = load_keys(of.key, tiles, b, hk, first, there, TILE.d, BLOCK, TILE.block_d)
    else:
        k = load_features(of.key, b, first, there, features.columns, features.used, BLOCK)
    return k


@triton.jit
def load_content_bias(content_bias, b, h, keys, S):
    """float32 `[N]`: the content bias of keys, 0 without one.

    It is clamped to 2^120, so that its product with the scale is finite. A power of 2 makes that product exact: clamped
    scores are equal to their maximum in the softmax.
    """
    at = head_of(content_bias, b, h) + keys.to(tl.int64) * content_bias.stride_l
    values = tl.load(at, mask=keys < S, other=0.0).to(tl.float32)
    most: tl.constexpr = 2.0**120
    bounded = tl.minimum(tl.maximum(values, -most), most)
    return tl.where(tl.abs(values) < float("inf"), bounded, values)


@triton.jit
def _chunk_by_chunk(
    of, chunks, place, first_row, rows, first_key, keys, BY_KEYS: tl.constexpr, BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Products [BLOCK_M, BLOCK_N] of the head of `place`, or BY_KEYS [BLOCK_N, BLOCK_M], over a list of chunks.

    `rows` and `keys` are which of them exist; None: all.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_D: tl.constexpr = TILE.block_d
    b, h = place.b, place.h
    HEIGHT: tl.constexpr = BLOCK_N if BY_KEYS else BLOCK_M
    WIDTH: tl.constexpr = BLOCK_M if BY_KEYS else BLOCK_N
    raw = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for number in range(chunks.length):
        columns = chunk_at(chunks, number) * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = None
        if TILE.d == 0 or TILE.d % BLOCK_D != 0:
            inside = columns < TILE.d
        q = load_features(of.query, b, first_row, rows, columns, inside, BLOCK_M)
        k = load_features(of.key, b, first_key, keys, columns, inside, BLOCK_N)
        q = mixed(q, of.mixing, h, columns, columns < TILE.d)  # [BLOCK_M, BLOCK_D]
        raw = product(k, tl.trans(q), raw) if BY_KEYS else product(q, tl.trans(k), raw)
    return raw


@triton.jit
def raw_scores(of, tiles, query, first, there, sizes, BLOCK_N: tl.constexpr, TILE: tl.constexpr):
    """Products [BLOCK_M, BLOCK_N] of a program's rows and the keys from `first` on, these keys, and their values.

    `there` is as in `load_keys`. The compiler removes loads whose results are not used.
    """
    place, features = query.place, query.features
    b, h = place.b, place.h
    keys = first + tl.arange(0, BLOCK_N)
    if of.content_bias is not None:
        content = load_content_bias(of.content_bias, b, h, keys, sizes.S)
    k, v = 0, 0
    if features.scored is not None:
        rows = place.at < sizes.T
        raw = _chunk_by_chunk(of, features.scored, place, place.first, rows, first, there, False, BLOCK_N, TILE)
    if (features.scored is None) or (features.columns is not None):
        k = load_key(of, tiles.key, features, b, place.hk, first, there, BLOCK_N, TILE)
    # Loaded before the product: after it, the float32 pass by query rows would take all registers and spill.
    if of.value is not None:
        v = load_keys(of.value, tiles.value, b, place.hk, first, there, TILE.dv, BLOCK_N, TILE.block_dv)
    if features.rest is not None:
        k_rest = load_features(of.key, b, first, there, features.rest, features.rest_used, BLOCK_N)
    if features.scored is None:
        raw = product(query.q, tl.trans(k), tl.zeros((TILE.block_m, BLOCK_N), tl.float32))
    if features.rest is not None:
        raw = product(query.rest, tl.trans(k_rest), raw)
    if of.content_bias is not None:
        raw += content[None, :]
    return raw, k, v


@triton.jit
def scores_of_keys(of, tiles, query, first, sizes, PARTIAL: tl.constexpr, BLOCK_N: tl.constexpr, TILE: tl.constexpr):
    """Scores [BLOCK_M, BLOCK_N] of a program's rows and the keys from `first` on; `tiles` are as in `load_keys`."""
    place = query.place
    keys = first + tl.arange(0, BLOCK_N)
    heads = place.h
    if of.grouped is not None:
        heads = heads[:, None]
    there = None
    if PARTIAL:
        there = keys < sizes.S
    pairs = Pairs(place.b, heads, place.at[:, None], keys[None, :])
    bias = load_bias(of.terms, pairs, sizes.T, sizes.S)
    raw, k, v = raw_scores(of, tiles, query, first, there, sizes, BLOCK_N, TILE)
    scores, cap = finish(raw, bias, of.terms, sizes.scale)
    seen = True
    if PARTIAL:
        lo, hi = query.lo[:, None], query.hi[:, None]
        seen = pairs_visible(of.visible, of.terms, pairs, lo, hi, sizes.T, sizes.S, bias)
    return ScoreTile(scores, cap, seen, k, v)


@triton.jit
def scores_of_rows(of, dattended, keys, first, there, sizes, PARTIAL: tl.constexpr, TILE: tl.constexpr):
    """Scores [BLOCK_N, BLOCK_M] of a program's keys and the query rows from `first` on.

    `there` says which rows are read, as in `load_tile`; `dattended` may be None.
    """
    BLOCK_M: tl.constexpr = TILE.block_m
    place, features = keys.place, keys.features
    b, h = place.b, place.h
    rows = first + tl.arange(0, BLOCK_M)
    q, do = 0, 0
    if (features.scored is None) or (features.columns is not None):
        q = load_query(of, features, b, h, first, there, BLOCK_M, TILE)
    if features.rest is not None:
        q_rest = load_mixed(of, b, h, first, there, features.rest, features.rest_used, BLOCK_M)
    if dattended is not None:
        do = load_values(dattended, b, h, first, there, BLOCK_M, TILE)
    pairs = Pairs(b, h, rows[None, :], place.at[:, None])
    bias = load_bias(of.terms, pairs, sizes.T, sizes.S)
    if features.scored is not None:
        raw = _chunk_by_chunk(
            of, features.scored, place, first, there, place.first, place.at < sizes.S, True, TILE.block_n, TILE
        )
    else:
        raw = product(keys.k, tl.trans(q), tl.zeros((TILE.block_n, BLOCK_M), tl.float32))
    if features.rest is not None:
        raw = product(keys.rest, tl.trans(q_rest), raw)
    if keys.content is not None:
        raw += keys.content[:, None]
    scores, cap = finish(raw, bias, of.terms, sizes.scale)
    seen = True
    if PARTIAL:
        lo, hi = ranges(of.visible, b, h, rows, sizes.T, sizes.S)
        seen = pairs_visible(of.visible, of.terms, pairs, lo[None, :], hi[None, :], sizes.T, sizes.S, bias)
    return ScoreTile(scores, cap, seen, q, do)
