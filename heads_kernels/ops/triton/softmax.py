"""The softmax of a row, tile by tile, in base 2: `p = 2**(steepness * (score - top))`.

`steepness` is `scale * log2(e)`. Scores stay unscaled until they meet it in one multiply-add; in the online form it has
to be above 0, so that the largest score stays the largest, and hidden scores -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
#: The smallest normal float32: what stands for a scale of 0.
SMALLEST: tl.constexpr = tl.constexpr(2.0**-126)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def online_softmax(scores, top, total, steepness):
    """One tile of a row's softmax: probabilities over the new `top`, and `top`, `total`, `shrink`.

    scores [M, N], hidden ones -inf; top [M] the largest score so far, total [M] the sum of probabilities. What was
    accumulated before has to be multiplied by `shrink` [M]. Rows without a visible score so far have top -inf.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top * steepness)
    p = tl.exp2(scores * steepness - base[:, None])
    shrink = tl.exp2(top * steepness - base)
    return p, new_top, total * shrink + tl.sum(p, 1), shrink


@triton.jit
def log_sum_exp(top, total, steepness):
    """Natural logarithm of the sum of exponentials; -inf for a row without a visible score."""
    return tl.where(total == 0.0, float("-inf"), top * steepness * LN2 + tl.log(total))


@triton.jit
def probabilities(scores, lse, steepness):
    """`exp(scale * scores - lse)`; lse broadcasts to the tile and is +inf for rows that see nothing."""
    return tl.exp2(scores * steepness - lse * LOG2E)
