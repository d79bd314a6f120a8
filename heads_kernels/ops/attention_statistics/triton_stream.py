"""The statistics of query rows in Triton, tile by tile: what is kept of a row, and how a tile of scores changes it."""

from __future__ import annotations

import triton
import triton.language as tl

from heads_kernels.ops.triton.scores import add_sink
from heads_kernels.ops.triton.softmax import LN2, log_sum_exp, online_softmax


@triton.jit
def fresh_rows(BLOCK_M: tl.constexpr):
    """`row_max`, `row_sum`, `spread`, `best`, `where` of rows that have seen no key, [BLOCK_M] each.

    row_sum is the sum of `p = 2**(scale_log2 * (score - row_max))`, spread that of `p * scale_log2 * (score -
    row_max)`; best is the largest score of a key that is not excluded, where the first key that has it.
    """
    nothing = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    zeros = tl.zeros((BLOCK_M,), tl.float32)
    return nothing, zeros, zeros, nothing, tl.full((BLOCK_M,), 2147483647, tl.int32)


@triton.jit
def see_tile(rows, scores, excluded, stride_excluded, b, keys, S, scale_log2):
    """The rows after `scores` [BLOCK_M, BLOCK_N], hidden ones -inf, of `keys` [BLOCK_N]."""
    row_max, row_sum, spread, best, where = rows
    old_max, old_sum = row_max, row_sum
    p, row_max, row_sum, alpha = online_softmax(scores, row_max, row_sum, scale_log2)
    below = tl.where(old_sum > 0.0, (old_max - row_max) * scale_log2, 0.0)
    depth = tl.where(p > 0.0, (scores - row_max[:, None]) * scale_log2, 0.0)
    spread = alpha * (spread + old_sum * below) + tl.sum(p * depth, 1)
    if excluded is not None:
        at = excluded + b.to(tl.int64) * stride_excluded + keys
        scores = tl.where(
            (tl.load(at, mask=keys < S, other=1) != 0)[None, :], float("-inf"), scores
        )
    tile_best = tl.max(scores, 1)
    here = tl.min(tl.where(scores == tile_best[:, None], keys[None, :], 2147483647), 1)
    # Tiles do not come in the order of their keys: among equals the smaller key counts.
    better = (tile_best > best) | ((tile_best == best) & (here < where))
    return row_max, row_sum, spread, tl.maximum(best, tile_best), tl.where(better, here, where)


@triton.jit
def store_rows(rows, terms, h, lse, max_prob, argmax, entropy, at, there, scale_log2):
    """Write the four statistics of rows at element `at` [BLOCK_M]."""
    row_max, row_sum, spread, best, where = rows
    sees = row_sum != 0.0
    counts = sees & (best > float("-inf"))
    share = 1.0 / tl.where(sees, row_sum, 1.0)
    largest = tl.exp2(tl.where(counts, (best - row_max) * scale_log2, 0.0)) * share
    row_lse = log_sum_exp(row_max, row_sum, scale_log2)
    spent = tl.log(tl.where(sees, row_sum, 1.0)) - spread * share * LN2
    if terms.sinks is not None:
        # Probabilities p = w * q, of which q are those without the sink: -sum p ln p = w * (-sum q ln q - ln w).
        with_sink, of_keys = add_sink(row_lse, terms, h)
        largest = largest * of_keys
        spent = tl.where(of_keys == 0.0, 0.0, of_keys * (spent - (row_lse - with_sink)))
        row_lse = with_sink
    tl.store(lse + at, row_lse, mask=there)
    tl.store(
        max_prob + at,
        tl.where(row_sum == row_sum, tl.where(counts, largest, 0.0), row_sum),
        mask=there,
    )
    tl.store(argmax + at, tl.where(counts, where, -1).to(tl.int64), mask=there)
    tl.store(entropy + at, tl.where(sees, spent, 0.0), mask=there)
