"""The stream of gated attention in Triton: a tile of query rows against every tile of keys that it sees."""

from __future__ import annotations

import triton
import triton.language as tl

from heads_kernels.ops.triton.load import load_tile, load_whole_tile
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
    query, key, value, terms, visible, dropout, b, h, first_row, T, S, GROUP, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`attended` [BLOCK_M, BLOCK_DV], `lse` [BLOCK_M] and whether they see anything, of the rows of a head.

    Rows that see nothing have 0, and -inf or their sink. With T 0 (a closed head) nothing is read, and lse is -inf.
    `scale` is not negative. The query tile, scores, probabilities and the accumulator stay on chip.
    """
    rows = first_row + tl.arange(0, BLOCK_M)
    lo, hi = ranges(visible, b, rows, T, S)  # [BLOCK_M]
    own = first_row // BLOCK_M
    start, full_start, full_end, end = tiles_seen(visible, b, h, own, lo, hi, rows, T, BLOCK_N)
    q = load_tile(query, b, h, first_row, rows < T, D, BLOCK_M, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    scale_log2 = tl.maximum(scale_log2_of(scale, terms), SMALLEST)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    for place in range(full_start, full_end):
        tile = full_tile(visible, b, h, own, place)
        acc, row_max, row_sum = _attend_tile(
            q, key, value, terms, visible, dropout, acc, row_max, row_sum, lo, hi, tile, b, h, GROUP, rows, T, S, scale,
            scale_log2,
            False, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    for index in tl.range(0, full_start - start + end - full_end, num_stages=1):
        tile = partial_tile(visible, b, h, own, index, start, full_start, full_end)
        acc, row_max, row_sum = _attend_tile(
            q, key, value, terms, visible, dropout, acc, row_max, row_sum, lo, hi, tile, b, h, GROUP, rows, T, S, scale,
            scale_log2,
            True, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV,
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
def _attend_tile(
    q, key, value, terms, visible, dropout, acc, row_max, row_sum, lo, hi, tile, b, h, GROUP, rows, T, S, scale,
            scale_log2,
    PARTIAL: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One tile of keys: `acc`, `row_max` and `row_sum` after it. In a PARTIAL tile pairs are masked one by one."""
    first = tile * BLOCK_N
    hk = h // GROUP
    keys = first + tl.arange(0, BLOCK_N)
    if PARTIAL:
        k = load_tile(key, b, hk, first, keys < S, D, BLOCK_N, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        v = load_tile(value, b, hk, first, keys < S, DV, BLOCK_N, BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
    else:
        k = load_whole_tile(key, b, hk, first, D, BLOCK_N, BLOCK_D)
        v = load_whole_tile(value, b, hk, first, DV, BLOCK_N, BLOCK_DV)
    bias = load_bias(terms, b, h, rows[:, None], keys[None, :], T, S)
    raw = product(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), tl.float32))
    scores, _ = finish(raw, bias, terms, scale)  # [BLOCK_M, BLOCK_N]
    if PARTIAL:
        seen = pairs_visible(
            visible, terms, b, h, lo[:, None], hi[:, None], rows[:, None], keys[None, :], T, S, bias
        )
        scores = tl.where(seen, scores, float("-inf"))
    p, row_max, row_sum, alpha = online_softmax(scores, row_max, row_sum, scale_log2)
    if dropout is not None:
        p = tl.where(kept(dropout, b, h, rows, first, BLOCK_N), p, 0.0)
    p = p.to(v.dtype)
    acc = acc * alpha[:, None]
    acc = guarded_product(p, v, seen, acc) if PARTIAL else product(p, v, acc)
    return acc, row_max, row_sum
