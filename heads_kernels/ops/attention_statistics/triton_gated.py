"""Attention statistics of gated attention's scores in Triton: `scale * Q_h K_h^T`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from heads_kernels.ops.attention_statistics.op import AttentionStatistics
from heads_kernels.ops.attention_statistics.triton_stream import fresh_rows, see_tile, store_rows
from heads_kernels.ops.operator import Call
from heads_kernels.ops.triton.load import load_tile, load_whole_tile
from heads_kernels.ops.triton.operands import bytes_of, rows_of, terms_of, with_positive_scale
from heads_kernels.ops.triton.scores import finish, load_bias, scale_log2_of
from heads_kernels.ops.triton.softmax import SMALLEST, product
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import launch, padded, tiles_for
from heads_kernels.ops.triton.visible import (
    full_tile,
    pairs_visible,
    partial_tile,
    ranges,
    tiles_seen,
)


@triton.jit
def _gated_kernel(
    query, key, terms, visible, excluded, stride_excluded, lse, max_prob, argmax, entropy, H, T, S, GROUP, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program reads every key that BLOCK_M rows of a head see and keeps five numbers a row on chip."""
    tiles = tl.cdiv(T, BLOCK_M)
    pair = tl.program_id(0) // tiles
    b, h = pair // H, pair % H
    hk = h // GROUP
    first_row = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    lo, hi = ranges(visible, b, rows, T, S)  # [BLOCK_M]
    own = first_row // BLOCK_M
    start, full_start, full_end, end = tiles_seen(visible, b, h, own, lo, hi, rows, T, BLOCK_N)
    q = load_tile(query, b, h, first_row, rows < T, D, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    scale_log2 = tl.maximum(scale_log2_of(scale, terms), SMALLEST)
    kept = fresh_rows(BLOCK_M)
    zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for place in range(full_start, full_end):
        first = full_tile(visible, b, h, own, place) * BLOCK_N
        k = load_whole_tile(key, b, hk, first, D, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        keys = first + tl.arange(0, BLOCK_N)
        bias = load_bias(terms, b, h, rows[:, None], keys[None, :], T, S)
        scores, _ = finish(product(q, tl.trans(k), zeros), bias, terms, scale)
        kept = see_tile(kept, scores, excluded, stride_excluded, b, keys, S, scale_log2)
    for index in tl.range(0, full_start - start + end - full_end, num_stages=1):
        first = partial_tile(visible, b, h, own, index, start, full_start, full_end) * BLOCK_N
        keys = first + tl.arange(0, BLOCK_N)
        k = load_tile(key, b, hk, first, keys < S, D, BLOCK_N, BLOCK_D)
        bias = load_bias(terms, b, h, rows[:, None], keys[None, :], T, S)
        scores, _ = finish(product(q, tl.trans(k), zeros), bias, terms, scale)
        seen = pairs_visible(
            visible, terms, b, h, lo[:, None], hi[:, None], rows[:, None], keys[None, :], T, S, bias
        )
        scores = tl.where(seen, scores, float("-inf"))
        kept = see_tile(kept, scores, excluded, stride_excluded, b, keys, S, scale_log2)
    at = pair.to(tl.int64) * T + rows
    store_rows(kept, terms, h, lse, max_prob, argmax, entropy, at, rows < T, scale_log2)


def gated_statistics(call: Call, excluded: Tensor | None, statistics: AttentionStatistics) -> None:
    """Fill `statistics`."""
    query, key = call.query, call.key
    (B, H, T, D), (_, Hk, S, _) = query.shape, key.shape
    scale, query = with_positive_scale(call.scale, query)
    tiles = tiles_for("attention_statistics.gated", query, D, 0)
    launch(
        _gated_kernel, B * H * -(-T // tiles.block_m), query, tiles,
        rows_of(query), rows_of(key), terms_of(call), visible_to_tiles(call, tiles), *bytes_of(excluded), *statistics,
        H, T, S, H // max(Hk, 1), scale,
        D=D, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=padded(D),
    )  # fmt: skip
