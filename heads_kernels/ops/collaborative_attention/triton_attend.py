"""The stream of collaborative attention in Triton: a tile of query rows of a head against every key that it sees.

The mixed query is formed chunk by chunk, beside the chunk of keys that it meets, and is never in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from heads_kernels.ops.triton.chunks import active_chunks, chunk_at, load_content_bias, mixed
from heads_kernels.ops.triton.load import load_columns, load_tile
from heads_kernels.ops.triton.scores import add_sink, finish, load_bias, scale_log2_of
from heads_kernels.ops.triton.softmax import (
    SMALLEST,
    guarded_product,
    kept,
    log_sum_exp,
    online_softmax,
    product,
)
from heads_kernels.ops.triton.visible import (
    full_tile,
    pairs_visible,
    partial_tile,
    ranges,
    tiles_seen,
)


@triton.jit
def attend(
    query, key, value, mixing, content_bias, terms, visible, dropout, b, h, first_row, T, S, scale,
    DS: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """`attended` [BLOCK_M, BLOCK_DV], `lse` [BLOCK_M] and whether they see anything, of the rows of a head.

    Rows that see nothing have 0, and -inf or their sink. With T 0 (a closed head) no row and no key is read, and lse
    is -inf. `scale` is not negative. Scores, probabilities and the accumulator stay on chip.
    """
    rows = first_row + tl.arange(0, BLOCK_M)
    lo, hi = ranges(visible, b, rows, T, S)  # [BLOCK_M]
    own = first_row // BLOCK_M
    start, full_start, full_end, end = tiles_seen(visible, b, h, own, lo, hi, rows, T, BLOCK_N)
    count, numbers = active_chunks(mixing, h, DS, BLOCK_D, CHUNKS)
    scale_log2 = tl.maximum(scale_log2_of(scale, terms), SMALLEST)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range((full_end - full_start) * count):
        tile = full_tile(visible, b, h, own, full_start + step // count)
        acc, row_max, row_sum, scores = _attend_step(
            query, key, value, mixing, content_bias, terms, visible, dropout, acc, row_max, row_sum, scores, lo, hi,
            rows, first_row, tile, step % count, count, numbers, b, h, T, S, scale, scale_log2,
            False, DS, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    for step in tl.range(0, (full_start - start + end - full_end) * count, num_stages=1):
        tile = partial_tile(visible, b, h, own, step // count, start, full_start, full_end)
        acc, row_max, row_sum, scores = _attend_step(
            query, key, value, mixing, content_bias, terms, visible, dropout, acc, row_max, row_sum, scores, lo, hi,
            rows, first_row, tile, step % count, count, numbers, b, h, T, S, scale, scale_log2,
            True, DS, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    share = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    if dropout is not None:
        share = share * dropout.scale
    lse, sees = log_sum_exp(row_max, row_sum, scale_log2), row_sum != 0.0
    if terms.sinks is not None:
        lse, of_keys = add_sink(lse, terms, h)
        share = share * of_keys
        lse = tl.where(rows < T, lse, float("-inf"))
    return acc * share[:, None], lse, sees


@triton.jit
def _attend_step(
    query, key, value, mixing, content_bias, terms, visible, dropout, acc, row_max, row_sum, scores, lo, hi, rows,
    first_row, tile, place, count, numbers, b, h, T, S, scale, scale_log2,
    PARTIAL: tl.constexpr, DS: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One chunk of one tile of keys; with the last chunk the tile's softmax and its product with the values."""
    last = place == count - 1
    column = chunk_at(numbers, place) * BLOCK_D
    first_key = tile * BLOCK_N
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
    if last:
        v = load_tile(
            value, b, h, first_key, keys < S, DV, BLOCK_N, BLOCK_DV
        )  # [BLOCK_N, BLOCK_DV]
        if content_bias is not None:
            scores += load_content_bias(content_bias, b, h, keys, S)[None, :]
        bias = load_bias(terms, b, h, rows[:, None], keys[None, :], T, S)
        scores, _ = finish(scores, bias, terms, scale)
        if PARTIAL:
            seen = pairs_visible(
                visible, terms, b, h, lo[:, None], hi[:, None], rows[:, None], keys[None, :], T, S, bias,
            )  # fmt: skip
            scores = tl.where(seen, scores, float("-inf"))
        p, row_max, row_sum, alpha = online_softmax(scores, row_max, row_sum, scale_log2)
        if dropout is not None:
            p = tl.where(kept(dropout, b, h, rows, first_key, BLOCK_N), p, 0.0)
        if PARTIAL:
            acc = guarded_product(p.to(v.dtype), v, seen, acc * alpha[:, None])
        else:
            acc = product(p.to(v.dtype), v, acc * alpha[:, None])
        scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    return acc, row_max, row_sum, scores
