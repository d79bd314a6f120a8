"""The backward pass of both operators by tiles of keys: `dkey`, `dvalue` and `dcontent_bias`.

    p = exp(scores - lse)        dp = dattended value^T        dscores = p * (dp - delta)        dattended = g * dout
    dvalue = p^T dattended       dkey = scale * dscores^T query        dcontent_bias = scale * colsum(dscores)

With mixing, the query is `query * mixing_h`, and `dkey` is the sum over the heads. Dropout multiplies `dp`, and `p` in
`dvalue`, by 0 or its scale. Tiles of scores are transposed, `[BLOCK_N, BLOCK_M]`.

With mixing, the features of a head are gathered as in the forward pass (`score_tiles`): those of the keys stay on chip
for the whole head, and a tile of query rows is loaded and mixed once, for the scores and for `dkey`. The sum of a head
is added to `dkey` in memory, in float32; `queries` has the reason for that and for `disable_licm`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.call import Call
from heads_kernels.ops.buffers import split_parts, splits_of, sum_parts
from heads_kernels.ops.triton.gate import head_gate, open_rows
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import load_features, load_values, store_tile
from heads_kernels.ops.triton.operands import Place, Splits, rows_of, sizes_of
from heads_kernels.ops.triton.rows import FirstPass, Written, along, load_row_terms
from heads_kernels.ops.triton.score_tiles import (
    Chunks,
    Features,
    OwnKeys,
    active_chunks,
    add_chunks,
    fill,
    gathered,
    load_content_bias,
    load_key,
    others,
    scores_of_rows,
)
from heads_kernels.ops.triton.scores import dropped, gradient_of_tile, kept, product, weigh
from heads_kernels.ops.triton.tiles import tile_constants, tiles_of_pass
from heads_kernels.ops.triton.visible import (
    full_tile,
    partial_count,
    partial_tile,
    tiles_seeing,
    tiles_that_see,
    with_tile_lists,
)


class KeySums(NamedTuple):
    """Sums for a program's keys, in a kernel: [BLOCK_N, W], [BLOCK_N, BLOCK_DV], [BLOCK_N]."""

    dkey: Any
    dvalue: Any
    dcontent: Any


@triton.jit
def _rows_tile(of, reads, of_head, keys, written, sums, tile, sizes, PARTIAL: tl.constexpr, TILE: tl.constexpr):
    """`sums` after one tile of query rows of the head of `keys`."""
    place = keys.place
    first_row = tile * TILE.block_m
    rows = first_row + tl.arange(0, TILE.block_m)
    row_terms = load_row_terms(reads, of_head, place.b, place.h, rows, sizes, TILE)
    there = None
    if PARTIAL:
        there = row_terms.finite
    row_tile = scores_of_rows(of, reads.dattended, keys, first_row, there, sizes, PARTIAL, TILE)
    q, do, seen = row_tile.operand, row_tile.weighed, None
    if PARTIAL:
        seen = row_tile.seen
    row_terms = along(row_terms, 0)
    p, slope = weigh(row_tile.scores, row_terms, seen, of.terms, place.h, sizes.scale)
    keep = None
    if of.dropout is not None:
        # As bytes: Triton cannot pass bits through shared memory.
        keep = kept(of.dropout, place.b, place.h, rows, place.first, TILE.block_n).to(tl.int8)
        keep = tl.trans(keep) != 0
    dkey, dvalue, dcontent = sums.dkey, sums.dvalue, sums.dcontent
    if written.dvalue is not None:
        weights = dropped(p * row_terms.g, keep, of.dropout)
        dvalue = product(weights.to(do.dtype), do, dvalue)
    if (written.dkey is not None) or (written.dcontent_bias is not None):
        dp = product(keys.v, tl.trans(do), tl.zeros((TILE.block_n, TILE.block_m), tl.float32))
        dscores = gradient_of_tile(slope, dp, keep, row_tile.cap, seen, row_terms, of)
        if written.dcontent_bias is not None:
            dcontent += tl.sum(dscores, 1)
        if written.dkey is not None:
            dkey = product(dscores.to(do.dtype), q, dkey)
    return KeySums(dkey, dvalue, dcontent)


@triton.jit
def _no_sums(WIDTH: tl.constexpr, TILE: tl.constexpr):
    return KeySums(
        tl.zeros((TILE.block_n, WIDTH), tl.float32),
        tl.zeros((TILE.block_n, TILE.block_dv), tl.float32),
        tl.zeros((TILE.block_n,), tl.float32),
    )


@triton.jit
def _rows_of_head(of, reads, keys, written, sums, visits, taking_part, sizes, TILE: tl.constexpr):
    """`sums` after all tiles of query rows of the head of `keys`; a closed head, `taking_part` 0, has none."""
    b, h = keys.place.b, keys.place.h
    own = keys.place.first // TILE.block_n
    of_head = head_gate(reads.gate, b, h, TILE)
    full = (visits.full_end - visits.full_start) * taking_part
    for number in range(visits.full_start, visits.full_start + full):
        tile = full_tile(of.visible, b, h, own, number)
        sums = _rows_tile(of, reads, of_head, keys, written, sums, tile, sizes, False, TILE)
    for number in tl.range(0, partial_count(visits) * taking_part, num_stages=TILE.partial_stages):
        tile = partial_tile(of.visible, b, h, own, number, visits)
        sums = _rows_tile(of, reads, of_head, keys, written, sums, tile, sizes, True, TILE)
    return sums


@triton.jit
def _gated_keys_kernel(of, reads, written, sizes, splits, TILE: tl.constexpr):
    """A program owns BLOCK_N keys of a key head and sums over the query heads that read it.

    If the key heads alone would not fill the GPU, it sums over a part of them (`splits`), and the parts are added up
    afterwards. Key, value and both sums stay on chip.
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
    k = load_key(of, None, Features(), b, hk, first_key, at < S, BLOCK_N, TILE)
    v = load_values(of.value, b, hk, first_key, at < S, BLOCK_N, TILE)
    sums = _no_sums(TILE.block_d, TILE)
    heads = tl.cdiv(group, splits.shares)
    for index in range(tl.minimum(heads, group - split * heads)):
        h = hk * group + split * heads + index
        place = Place(b, h, hk, first_key, at)
        visits = tiles_seeing(of.visible, place, sizes, TILE)
        taking_part = tl.minimum(open_rows(reads.gate, b, h, sizes.T, TILE), 1)
        keys = OwnKeys(place, k, v, None, Features())
        sums = _rows_of_head(of, reads, keys, written, sums, visits, taking_part, sizes, TILE)
    part = split * splits.batches + b
    if written.dkey is not None:
        store_tile(written.dkey, part, hk, first_key, S, sums.dkey * sizes.scale, TILE.d)
    if written.dvalue is not None:
        store_tile(written.dvalue, part, hk, first_key, S, sums.dvalue, TILE.dv)


@triton.jit
def _add_head(of, reads, keys, visits, written, split, sizes, splits, TILE: tl.constexpr):
    """`dvalue` and `dcontent` of the head of `keys`; its term of `dkey` is added in memory, in float32.

    Features of the keys, if they give scores, are loaded here.
    """
    place, features = keys.place, keys.features
    there = place.at < sizes.S
    k, k_rest = None, None
    if features.scored is None:
        k = load_key(of, None, features, place.b, place.h, place.first, there, TILE.block_n, TILE)
    if features.rest is not None:
        k_rest = load_features(of.key, place.b, place.first, there, features.rest, features.rest_used, TILE.block_n)
    keys = OwnKeys(place, k, keys.v, keys.content, features, k_rest)
    sums = _no_sums(features.columns.shape[0], TILE)
    sums = _rows_of_head(of, reads, keys, written, sums, visits, 1, sizes, TILE)
    if written.dkey is not None:
        part, dkey = split * splits.batches + place.b, sums.dkey * sizes.scale
        add_chunks(written.dkey, part, place.first, sizes.S, features.chunks, features.first, dkey, TILE)
    return sums.dvalue, sums.dcontent


@triton.jit
def _collaborative_keys_kernel(of, reads, written, sizes, splits, TILE: tl.constexpr):
    """A program owns BLOCK_N keys and goes through the heads.

    If tiles alone would not fill the GPU, it takes a part of the heads (`splits`) in whole groups that share a value
    head, and the parts are added up afterwards. The sums of one head and `dvalue` of its group stay on chip; `dkey`
    starts as zeros. A head that uses more than `TILE.resident` features is computed once for every `TILE.resident`
    features of `dkey`.
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_D: tl.constexpr = TILE.block_d
    RESIDENT: tl.constexpr = TILE.resident
    H, T, S, group = sizes.H, sizes.T, sizes.S, sizes.group
    tiles = tl.cdiv(S, BLOCK_N)
    first_key = (tl.program_id(0) % tiles) * BLOCK_N
    b = tl.program_id(0) // tiles % splits.batches
    split = tl.program_id(0) // (tiles * splits.batches)
    at = first_key + tl.arange(0, BLOCK_N)
    if (of.visible.lists is None) and (of.visible.by_head is None):
        visits = tiles_that_see(of.visible, b, b * 0, first_key, T, S, BLOCK_N, TILE.block_m)
    dvalue = tl.zeros((BLOCK_N, TILE.block_dv), tl.float32)  # of the heads of a group so far
    heads = tl.cdiv(H // group, splits.shares) * group
    # disable_licm: hoisted addresses, which are the same for all heads, would take registers from the loops over tiles.
    for index in tl.range(0, tl.minimum(heads, H - split * heads), disable_licm=True):
        h = split * heads + index
        place = Place(b, h, h // group, first_key, at)
        if (of.visible.lists is not None) or (of.visible.by_head is not None):
            visits = tiles_seeing(of.visible, place, sizes, TILE)
        chunks = active_chunks(of.mixing, h, TILE)
        # A closed head has no chunks, so it takes none of the branches below.
        count = tl.where(open_rows(reads.gate, b, h, T, TILE) == 0, 0, chunks.length)
        chunks = Chunks(count, chunks.numbers)
        content = None
        if of.content_bias is not None:
            content = load_content_bias(of.content_bias, b, h, at, S)
        v = load_values(of.value, b, h // group, first_key, at < S, BLOCK_N, TILE)
        of_head = tl.zeros((BLOCK_N, TILE.block_dv), tl.float32)
        dcontent = tl.zeros((BLOCK_N,), tl.float32)
        for doubling in tl.static_range(0, TILE.doublings):
            if fill(chunks, 1 << doubling):
                columns, used = gathered(chunks, 0, BLOCK_D << doubling, TILE)
                keys = OwnKeys(place, None, v, content, Features(columns, used, chunks))
                of_head, dcontent = _add_head(of, reads, keys, visits, written, split, sizes, splits, TILE)
        if TILE.chunks * BLOCK_D > RESIDENT and count * BLOCK_D > RESIDENT:
            # Every round computes the same `dvalue` and `dcontent`; those of the last round are used.
            for number in range(0, count if written.dkey is not None else 1, RESIDENT // BLOCK_D):
                columns, used = gathered(chunks, number, RESIDENT, TILE)
                if TILE.rest:
                    rest, rest_used = others(chunks, number, TILE)
                    features = Features(columns, used, chunks, number, None, rest, rest_used)
                else:
                    features = Features(columns, used, chunks, number, chunks)
                keys = OwnKeys(place, None, v, content, features)
                of_head, dcontent = _add_head(of, reads, keys, visits, written, split, sizes, splits, TILE)
        dvalue = tl.where(h % group == 0, of_head, dvalue + of_head)
        if written.dvalue is not None:
            end_of_keys = tl.where((h + 1) % group == 0, S, 0)  # after the last head of a group
            store_tile(written.dvalue, b, h // group, first_key, end_of_keys, dvalue, TILE.dv)
        if written.dcontent_bias is not None:
            here = written.dcontent_bias + (b * H + h).to(tl.int64) * S + at
            tl.store(here, dcontent * sizes.scale, mask=at < S)


def keys_pass(call: Call, first: FirstPass, dkey: Tensor, dvalue: Tensor, dcontent_bias: Tensor) -> None:
    """Fill `dkey`, `dvalue` and `dcontent_bias`, except empty ones.

    For gated heads wider than 128, both sums do not fit into registers, so each has its own launch.
    """
    if not (dkey.numel() or dvalue.numel() or dcontent_bias.numel()):
        return
    mixes = call.mixing is not None
    if not mixes and dkey.numel() and dvalue.numel() and max(call.D, call.Dv) > 128:
        nothing = dkey.new_empty(0)
        keys_pass(call, first, dkey, nothing, nothing)
        keys_pass(call, first, nothing, dvalue, nothing)
        return
    B, S, value_heads = call.B, call.S, call.value.shape[1]
    tiles = tiles_of_pass(call, "keys")
    sizes = sizes_of(call)
    programs = B * -(-S // tiles.block_n)
    if mixes:  # programs share groups of heads, and each value head has one owner
        kernel, splits = _collaborative_keys_kernel, splits_of(max(value_heads, 1), programs, call.query)
        parts = [(dkey, split_parts(dkey, splits, torch.float32).zero_()), (dvalue, dvalue)]
    else:
        programs *= value_heads
        kernel, splits = _gated_keys_kernel, splits_of(sizes.group, programs, call.query)
        parts = [(grad, split_parts(grad, splits)) for grad in (dkey, dvalue)]
    of_key, of_value = (rows_of(part) if grad.numel() else None for grad, part in parts)
    of = with_tile_lists(call, first.operands, tiles, by_keys=True, support=first.support)
    launch(
        kernel, programs * splits, call.query, tiles,
        of, first.reads,
        Written(dkey=of_key, dvalue=of_value, dcontent_bias=dcontent_bias if dcontent_bias.numel() else None),
        sizes, Splits(B, splits),
        TILE=tile_constants(call, tiles),
    )  # fmt: skip
    for grad, part in parts:
        sum_parts(part, grad, splits)
