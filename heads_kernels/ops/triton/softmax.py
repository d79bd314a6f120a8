"""What attention does with tiles: products on tensor cores, the softmax of rows tile by tile, and dropout.

The softmax is in base 2: `p = 2**(scale_log2 * (score - row_max))`, where `scale_log2` is `scale * log2(e)`. Raw scores
stay unscaled until that one multiply-add. Scores with terms may be large: their difference is formed first, which no
finite score overflows and which is exact near the maximum. In the online form `scale_log2` must be above 0, so that the
largest score stays the largest and hidden scores stay -inf. Products accumulate in float32. Dropout is Philox4x32-10 of
the seed and the element, as `heads_kernels.ops.philox` defines it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, acc):
    """`acc + a @ b`; float32 operands are multiplied as float32, not as tf32."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def finite_part(tile):
    """`tile` with 0 for NaN and infinities: for products whose other factor is nan wherever one of them is seen."""
    wide = tile.to(tl.float32)
    return tl.where((wide - wide) == 0.0, wide, 0.0).to(tile.dtype)


@triton.jit
def poison(operand):
    """float32 `[N]`: nan for the rows of `operand` [N, W] that are not finite, 0 for others.

    Added to the scores of keys before hidden ones become -inf, it makes nan of those who see such a row, and of nobody
    else: the product with `finite_part(operand)` then needs no mask.
    """
    wide = operand.to(tl.float32)
    return tl.sum(wide - wide, 1)


LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
#: The smallest normal float32: what stands for a scale of 0.
SMALLEST: tl.constexpr = tl.constexpr(2.0**-126)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def online_softmax(scores, row_max, row_sum, scale_log2, terms):
    """One tile of a row's softmax: probabilities over the new `row_max`, and `row_max`, `row_sum`, `alpha`.

    scores [M, N], hidden ones -inf; row_max [M] the largest score so far, row_sum [M] the sum of probabilities. What
    was accumulated before is multiplied by `alpha` [M]. Rows without a visible score so far have row_max -inf.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    if (terms.softcap is None) and (terms.bias is None):
        base = base * scale_log2
        p = tl.exp2(scores * scale_log2 - base[:, None])
        alpha = tl.exp2(row_max * scale_log2 - base)
    else:
        p = tl.exp2((scores - base[:, None]) * scale_log2)
        alpha = tl.exp2((row_max - base) * scale_log2)
    return p, new_max, row_sum * alpha + tl.sum(p, 1), alpha


@triton.jit
def weights_over(scores, row_max, scale_log2, terms):
    """`2**(scale_log2 * (score - row_max))`; `row_max` is finite and broadcasts to the tile."""
    if (terms.softcap is None) and (terms.bias is None):
        p = tl.exp2(scores * scale_log2 - row_max * scale_log2)
    else:
        p = tl.exp2((scores - row_max) * scale_log2)
    return p


@triton.jit
def log_sum_exp(row_max, row_sum, scale_log2, terms):
    """Natural logarithm of the sum of exponentials; -inf for a row without a visible score."""
    if (terms.softcap is None) and (terms.bias is None):
        row_max = row_max * scale_log2 * LN2
    return tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log(row_sum))


@triton.jit
def kept(dropout, b, h, rows, first_key, BLOCK_N: tl.constexpr):
    """bool `[M, BLOCK_N]`, True where the probability of row i and key j is kept; `first_key` is a multiple of 4."""
    seed = tl.load(dropout.seed)
    b += tl.load(dropout.seed + 1).to(tl.int32)
    h += tl.load(dropout.seed + 2).to(tl.int32)
    i = rows[:, None] + tl.load(dropout.seed + 3).to(tl.int32)  # [M, 1]
    j = tl.load(dropout.seed + 4).to(tl.int32) + first_key
    quads = (j // 4 + tl.arange(0, BLOCK_N // 4))[None, :]  # [1, BLOCK_N / 4]
    zero = (i + quads) * 0  # [M, BLOCK_N / 4]
    w0, w1, w2, w3 = tl.philox(seed, quads + zero, i + zero, h + zero, b + zero)
    # Key j reads word j & 3.
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))  # [M, BLOCK_N]
    return words.to(tl.uint32, bitcast=True) >= tl.cast(dropout.threshold, tl.uint32)
