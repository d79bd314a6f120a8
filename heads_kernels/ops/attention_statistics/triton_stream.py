"""The statistics of query rows in Triton, tile by tile: what is kept of a row, and how a tile of scores changes it."""

from __future__ import annotations

import triton
import triton.language as tl

from heads_kernels.ops.triton.scores import add_sink
from heads_kernels.ops.triton.softmax import LN2, log_sum_exp, online_softmax


@triton.jit
def fresh_rows(BLOCK_M: tl.constexpr):
    """`top`, `total`, `spread`, `best`, `where` of rows that have seen no key, [BLOCK_M] each.

    total is the sum of `p = 2**(steepness * (score - top))`, spread that of `p * steepness * (score - top)`; best is
    the largest score of a key that is not excluded, where the first key that has it.
    """
    nothing = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    zeros = tl.zeros((BLOCK_M,), tl.float32)
    return nothing, zeros, zeros, nothing, tl.full((BLOCK_M,), 2147483647, tl.int32)


@triton.jit
def see_tile(rows, scores, excluded, stride_excluded, b, keys, S, steepness):
    """The rows after `scores` [BLOCK_M, BLOCK_N], hidden ones -inf, of `keys` [BLOCK_N]."""
    top, total, spread, best, where = rows
    old_top, old_total = top, total
    p, top, total, shrink = online_softmax(scores, top, total, steepness)
    below = tl.where(old_total > 0.0, (old_top - top) * steepness, 0.0)
    depth = tl.where(p > 0.0, (scores - top[:, None]) * steepness, 0.0)
    spread = shrink * (spread + old_total * below) + tl.sum(p * depth, 1)
    if excluded is not None:
        at = excluded + b.to(tl.int64) * stride_excluded + keys
        scores = tl.where(
            (tl.load(at, mask=keys < S, other=1) != 0)[None, :], float("-inf"), scores
        )
    tile_best = tl.max(scores, 1)
    here = tl.min(tl.where(scores == tile_best[:, None], keys[None, :], 2147483647), 1)
    # Tiles do not come in the order of their keys: among equals the smaller key counts.
    better = (tile_best > best) | ((tile_best == best) & (here < where))
    return top, total, spread, tl.maximum(best, tile_best), tl.where(better, here, where)


@triton.jit
def store_rows(rows, terms, h, lse, max_prob, argmax, entropy, at, there, steepness):
    """Write the four statistics of rows at element `at` [BLOCK_M]."""
    top, total, spread, best, where = rows
    sees = total != 0.0
    counts = sees & (best > float("-inf"))
    share = 1.0 / tl.where(sees, total, 1.0)
    largest = tl.exp2(tl.where(counts, (best - top) * steepness, 0.0)) * share
    row_lse = log_sum_exp(top, total, steepness)
    spent = tl.log(tl.where(sees, total, 1.0)) - spread * share * LN2
    if terms.sinks is not None:
        # Probabilities p = w * q, of which q are those without the sink: -sum p ln p = w * (-sum q ln q - ln w).
        with_sink, of_keys = add_sink(row_lse, terms, h)
        largest = largest * of_keys
        spent = tl.where(of_keys == 0.0, 0.0, of_keys * (spent - (row_lse - with_sink)))
        row_lse = with_sink
    tl.store(lse + at, row_lse, mask=there)
    tl.store(
        max_prob + at, tl.where(total == total, tl.where(counts, largest, 0.0), total), mask=there
    )
    tl.store(argmax + at, tl.where(counts, where, -1).to(tl.int64), mask=there)
    tl.store(entropy + at, tl.where(sees, spent, 0.0), mask=there)
