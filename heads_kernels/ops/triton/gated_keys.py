"""Gated attention backward in Triton: `dkey` and `dvalue`, by tiles of keys.

    p = exp(scores - lse)        dp = dattended value^T        dscores = p * (dp - delta)        dattended = g * dout
    dvalue = p^T dattended       dkey = scale * dscores^T query

Dropout multiplies `p` in `dvalue`, and `dp`, by what it keeps. Tiles of scores are transposed, `[BLOCK_N, BLOCK_M]`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.call import Call
from heads_kernels.ops.buffers import split_parts, splits_of, sum_parts
from heads_kernels.ops.triton.entmax import dropped, gradient_of_tile, weigh
from heads_kernels.ops.triton.gate import head_gate, open_rows
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import load_tile, store_tile
from heads_kernels.ops.triton.operands import (
    Pairs,
    Place,
    Rows,
    Splits,
    has_terms,
    operator_of,
    rows_of,
    sizes_of,
)
from heads_kernels.ops.triton.rows import FirstPass, as_rows, load_row_terms
from heads_kernels.ops.triton.scores import finish, load_bias
from heads_kernels.ops.triton.softmax import kept, product
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import tile_constants, tiles_for
from heads_kernels.ops.triton.visible import (
    full_tile,
    listed_tiles,
    pairs_visible,
    partial_count,
    partial_tile,
    ranges,
    tiles_that_see,
)


class OwnKeys(NamedTuple):
    """The keys and values of a program, in a kernel: [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]."""

    k: Any
    v: Any


class KeySums(NamedTuple):
    """Sums of a program's keys and values, in a kernel: [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]."""

    dkey: Any
    dvalue: Any


class KeysWritten(NamedTuple):
    """What the kernel writes; None for what is not asked for."""

    dkey: Rows | None
    dvalue: Rows | None
    end: None = None


@triton.jit
def _rows_tile(
    of, reads, of_head, keys, sums, tile, place, sizes, PARTIAL: tl.constexpr, TILE: tl.constexpr
):
    """`sums` after one tile of query rows of the head of `place`, which has the program's keys."""
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    b, h = place.b, place.h
    first_row = tile * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    row_terms = load_row_terms(reads, of_head, b, h, rows, sizes, TILE)
    there = None
    if PARTIAL:
        there = row_terms.finite
    q = load_tile(
        of.query, b, h, first_row, there, TILE.d, BLOCK_M, TILE.block_d
    )  # [BLOCK_M, BLOCK_D]
    do = load_tile(
        reads.dattended, b, h, first_row, there, TILE.dv, BLOCK_M, TILE.block_dv
    )  # [BLOCK_M, BLOCK_DV]
    pairs = Pairs(b, h, rows[None, :], place.at[:, None])
    bias = load_bias(of.terms, pairs, sizes.T, sizes.S)
    zeros = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    scores, cap = finish(
        product(keys.k, tl.trans(q), zeros), bias, of.terms, sizes.scale
    )  # [BLOCK_N, BLOCK_M]
    seen = None
    if PARTIAL:
        lo, hi = ranges(of.visible, b, h, rows, sizes.T, sizes.S)
        seen = pairs_visible(
            of.visible, of.terms, pairs, lo[None, :], hi[None, :], sizes.T, sizes.S, bias
        )
    row_terms = as_rows(row_terms)
    p, slope = weigh(scores, row_terms, seen, of.terms, h, sizes.scale)
    keep = None
    if of.dropout is not None:
        # As bytes: Triton cannot pass bits through shared memory.
        keep = tl.trans(kept(of.dropout, b, h, rows, place.first, BLOCK_N).to(tl.int8)) != 0
    dkey, dvalue = sums.dkey, sums.dvalue
    if TILE.needs_value:
        weights = dropped(p * row_terms.g, keep, of.dropout)
        dvalue = product(weights.to(do.dtype), do, dvalue)
    if TILE.needs_key:
        dp = product(keys.v, tl.trans(do), zeros)
        dscores = gradient_of_tile(slope, dp, keep, cap, seen, row_terms, of)
        dkey = product(dscores.to(q.dtype), q, dkey)
    return KeySums(dkey, dvalue)


@triton.jit
def _keys_kernel(of, reads, written, sizes, splits, TILE: tl.constexpr):
    """A program owns BLOCK_N keys of a key head and sums over the query heads that read it (a part of them, `splits`,
    where key heads alone would not fill the GPU; the parts are added up afterwards). Key, value and both sums stay on
    chip.
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    S, group = sizes.S, sizes.group
    tiles = tl.cdiv(S, BLOCK_N)
    Hk = sizes.H // group
    first_key = (tl.program_id(0) % tiles) * BLOCK_N
    split = tl.program_id(0) // (tiles * Hk * splits.batches)
    b = tl.program_id(0) // (tiles * Hk) % splits.batches
    hk = tl.program_id(0) // tiles % Hk
    at = first_key + tl.arange(0, BLOCK_N)
    keys = OwnKeys(
        load_tile(of.key, b, hk, first_key, at < S, TILE.d, BLOCK_N, TILE.block_d),
        load_tile(of.value, b, hk, first_key, at < S, TILE.dv, BLOCK_N, TILE.block_dv),
    )
    sums = KeySums(
        tl.zeros((BLOCK_N, TILE.block_d), tl.float32),
        tl.zeros((BLOCK_N, TILE.block_dv), tl.float32),
    )
    own = first_key // BLOCK_N
    if (of.visible.lists is None) and (of.visible.by_head is None):
        visits = tiles_that_see(
            of.visible, b, hk * group, first_key, sizes.T, S, BLOCK_N, TILE.block_m
        )
    heads = tl.cdiv(group, splits.shares)
    for index in range(tl.minimum(heads, group - split * heads)):
        h = hk * group + split * heads + index
        place = Place(b, h, hk, first_key, at)
        if of.visible.lists is not None:
            visits = listed_tiles(of.visible, b, h, own, sizes.T)
        elif of.visible.by_head is not None:
            visits = tiles_that_see(of.visible, b, h, first_key, sizes.T, S, BLOCK_N, TILE.block_m)
        of_head = head_gate(reads.gate, b, h, TILE)
        # A closed head has no tiles.
        taking_part = tl.minimum(open_rows(reads.gate, b, h, sizes.T, TILE), 1)
        full = (visits.full_end - visits.full_start) * taking_part
        for number in range(visits.full_start, visits.full_start + full):
            tile = full_tile(of.visible, b, h, own, number)
            sums = _rows_tile(of, reads, of_head, keys, sums, tile, place, sizes, False, TILE)
        for number in tl.range(0, partial_count(visits) * taking_part, num_stages=1):
            tile = partial_tile(of.visible, b, h, own, number, visits)
            sums = _rows_tile(of, reads, of_head, keys, sums, tile, place, sizes, True, TILE)
    part = split * splits.batches + b
    if written.dkey is not None:
        store_tile(
            written.dkey, part, hk, first_key, S, sums.dkey * sizes.scale, TILE.d, BLOCK_N, TILE.block_d
        )  # fmt: skip
    if written.dvalue is not None:
        store_tile(
            written.dvalue, part, hk, first_key, S, sums.dvalue, TILE.dv, BLOCK_N, TILE.block_dv
        )


def keys_pass(call: Call, first: FirstPass, dkey: Tensor, dvalue: Tensor) -> None:
    """Fill `dkey` and `dvalue`; an empty one is not computed.

    Of heads wider than 128 the sums of both do not fit into registers: each has a launch of its own.
    """
    if not (dkey.numel() or dvalue.numel()):
        return
    if dkey.numel() and dvalue.numel() and max(dkey.shape[3], dvalue.shape[3]) > 128:
        nothing = dkey.new_empty(0)
        keys_pass(call, first, dkey, nothing)
        keys_pass(call, first, nothing, dvalue)
        return
    (B, _, _, D), (_, Hk, S, Dv) = call.query.shape, call.value.shape
    tiles = tiles_for(f"{operator_of(call)}.keys", call.query, D, Dv, has_terms(call))
    programs = B * Hk * -(-S // tiles.block_n)
    sizes = sizes_of(call)
    splits = splits_of(sizes.group, programs, call.query)
    parts = [(grad, split_parts(grad, splits)) for grad in (dkey, dvalue)]
    of_key, of_value = (rows_of(part) if grad.numel() else None for grad, part in parts)
    of = first.operands
    visible = visible_to_tiles(
        call, of.terms, of.visible, tiles, by_keys=True, support=first.support
    )
    launch(
        _keys_kernel, programs * splits, call.query, tiles,
        of._replace(visible=visible), first.reads, KeysWritten(of_key, of_value), sizes, Splits(B, splits),
        TILE=tile_constants(
            tiles, D, Dv, gate=first.kind, activation=call.gate_activation,
            needs_key=dkey.numel() > 0, needs_value=dvalue.numel() > 0,
        ),
    )  # fmt: skip
    for grad, part in parts:
        sum_parts(part, grad, splits)
