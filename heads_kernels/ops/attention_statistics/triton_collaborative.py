"""Attention statistics of collaborative attention's scores in Triton: `scale * ((Q * m_h) K^T + content_bias_h)`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.ops.attention_statistics.op import AttentionStatistics
from heads_kernels.ops.attention_statistics.triton_stream import fresh_rows, see_tile, store_rows
from heads_kernels.ops.operator import Call
from heads_kernels.ops.triton.chunks import active_chunks, chunk_at, load_content_bias, mixed
from heads_kernels.ops.triton.load import load_columns
from heads_kernels.ops.triton.operands import (
    bytes_of,
    content_bias_of,
    mixing_of,
    rows_of,
    terms_of,
    with_positive_scale,
)
from heads_kernels.ops.triton.scores import finish, load_bias, scale_log2_of
from heads_kernels.ops.triton.softmax import SMALLEST, product
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import chunks_of, launch, tiles_for
from heads_kernels.ops.triton.visible import (
    full_tile,
    pairs_visible,
    partial_tile,
    ranges,
    tiles_seen,
)


@triton.jit
def _step(
    query, key, mixing, content_bias, terms, visible, excluded, stride_excluded, kept, scores, lo, hi, first_row,
    tile, place, count, numbers, b, h, T, S, scale, scale_log2,
    PARTIAL: tl.constexpr, DS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One chunk of one tile of keys; with the last chunk the rows see the tile."""
    column = chunk_at(numbers, place) * BLOCK_D
    first_key = tile * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_M)
    keys = first_key + tl.arange(0, BLOCK_N)
    q = load_columns(
        query, b, first_row, rows < T, column, DS, BLOCK_M, BLOCK_D
    )  # [BLOCK_M, BLOCK_D]
    k = load_columns(
        key, b, first_key, keys < S, column, DS, BLOCK_N, BLOCK_D
    )  # [BLOCK_N, BLOCK_D]
    scores = product(
        mixed(q, mixing, h, column, DS, BLOCK_D), tl.trans(k), scores
    )  # [BLOCK_M, BLOCK_N]
    if place == count - 1:
        if content_bias is not None:
            scores += load_content_bias(content_bias, b, h, keys, S)[None, :]
        bias = load_bias(terms, b, h, rows[:, None], keys[None, :], T, S)
        scores, _ = finish(scores, bias, terms, scale)
        if PARTIAL:
            seen = pairs_visible(
                visible, terms, b, h, lo[:, None], hi[:, None], rows[:, None], keys[None, :], T, S, bias,
            )  # fmt: skip
            scores = tl.where(seen, scores, float("-inf"))
        kept = see_tile(kept, scores, excluded, stride_excluded, b, keys, S, scale_log2)
        scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    return kept, scores


@triton.jit
def _collaborative_kernel(
    query, key, mixing, content_bias, terms, visible, excluded, stride_excluded, lse, max_prob, argmax, entropy,
    H, T, S, scale,
    DS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A program reads every key that BLOCK_M rows of a head see and keeps five numbers a row on chip."""
    tiles = tl.cdiv(T, BLOCK_M)
    h = tl.program_id(0) % H
    b = tl.program_id(0) // (H * tiles)
    first_row = (tiles - 1 - tl.program_id(0) // H % tiles) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    lo, hi = ranges(visible, b, rows, T, S)  # [BLOCK_M]
    own = first_row // BLOCK_M
    start, full_start, full_end, end = tiles_seen(visible, b, h, own, lo, hi, rows, T, BLOCK_N)
    count, numbers = active_chunks(mixing, h, DS, BLOCK_D, CHUNKS)
    scale_log2 = tl.maximum(scale_log2_of(scale, terms), SMALLEST)
    kept = fresh_rows(BLOCK_M)
    scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range((full_end - full_start) * count):
        kept, scores = _step(
            query, key, mixing, content_bias, terms, visible, excluded, stride_excluded, kept, scores, lo, hi,
            first_row, full_tile(visible, b, h, own, full_start + step // count), step % count,
            count, numbers, b, h, T, S, scale, scale_log2, False, DS, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    for step in tl.range(0, (full_start - start + end - full_end) * count, num_stages=1):
        kept, scores = _step(
            query, key, mixing, content_bias, terms, visible, excluded, stride_excluded, kept, scores, lo, hi,
            first_row, partial_tile(visible, b, h, own, step // count, start, full_start, full_end), step % count,
            count, numbers, b, h, T, S, scale, scale_log2, True, DS, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    at = (b * H + h).to(tl.int64) * T + rows
    store_rows(kept, terms, h, lse, max_prob, argmax, entropy, at, rows < T, scale_log2)


def collaborative_statistics(
    call: Call, excluded: Tensor | None, statistics: AttentionStatistics
) -> None:
    """Fill `statistics`."""
    query, key = call.query, call.key
    mixing, (B, H, T, S), Ds = call.mixing, call.scores, query.shape[-1]
    scale, query, content_bias = with_positive_scale(call.scale, query, call.content_bias)
    tiles = tiles_for("attention_statistics.collaborative", query, Ds, 0)
    launch(
        _collaborative_kernel, B * H * -(-T // tiles.block_m), query, tiles,
        rows_of(query), rows_of(key), mixing_of(mixing), content_bias_of(content_bias), terms_of(call),
        visible_to_tiles(call, tiles),
        *bytes_of(excluded), *statistics, H, T, S, scale,
        DS=Ds, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=tiles.block_d,
        CHUNKS=chunks_of(Ds, tiles.block_d),
    )  # fmt: skip
