"""From products of queries and keys to probabilities, and to the gradient of scores: softmax, entmax and dropout.

    score = softcap * tanh(scale * raw / softcap) + bias

Without a cap and a bias, scores in kernels are the raw products, and the scale is a factor of the single multiply-add
of their softmax; with a cap or a bias, scores are final, and the factor is log2(e). Kernels are compiled for one or the
other. The softmax is in base 2: `p = 2**(scale_log2 * (score - row_max))`. Scores with terms may be large, so the
difference is computed first: it does not overflow, and it is exact near the maximum. Products accumulate in float32.
Dropout is Philox4x32-10 of the seed and the element, as `heads_kernels.ops.philox` defines it.

alpha-entmax in place of softmax is computed as in `csrc/cpu/entmax.h` (Correia, Niculae, Martins 2019):

    p = [1 + order (s - threshold)]_+ ^ (1 / order)        order = alpha - 1

The threshold of a row makes its probabilities add up to 1. It is saved in place of lse, to which it tends as order
tends to 0, as two numbers: the largest score, and the distance of the threshold above it. Kernels are compiled for
softmax or entmax, by `terms.alpha`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from heads_kernels.ops.triton.load import pair_addresses

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
#: The smallest normal float32, in place of a scale of 0.
SMALLEST: tl.constexpr = tl.constexpr(2.0**-126)
_ROOT_HALF: tl.constexpr = tl.constexpr(0x3F3504F3)  # bits of sqrt(1/2)
_ONE: tl.constexpr = tl.constexpr(0x3F800000)
_MANTISSA: tl.constexpr = tl.constexpr(0x7FFFFF)


@triton.jit
def product(a, b, acc):
    """`acc + a @ b`; float32 operands are multiplied as float32, not as tf32.

    Triton's `tf32x3` (three products in tf32) would be as accurate in a simulation of the forward pass, and by counting
    cycles its loops would take 0.55 to 0.75 of the time on sm_80 and sm_90. But it takes 190 to 255 registers in place
    of 75 to 116, 1.2 to 1.3 times as long on GeForce, and numbers above 0x1.ffdffep127 become infinite.
    """
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def finite_part(tile):
    """`tile` with 0 for NaN and infinities: for products whose other factor is nan for pairs that see one of them."""
    wide = tile.to(tl.float32)
    return tl.where((wide - wide) == 0.0, wide, 0.0).to(tile.dtype)


@triton.jit
def poison(operand):
    """float32 `[N]`: nan for the rows of `operand` [N, W] that are not finite, 0 for others.

    It is added to the scores of keys before hidden ones become -inf. Query rows that see such a key then become nan,
    and no others, so the product with `finite_part(operand)` needs no mask.
    """
    wide = operand.to(tl.float32)
    return tl.sum(wide - wide, 1)


@triton.jit
def load_bias(terms, pairs, T, S):
    """float32: the bias of `pairs`; 0 without one.

    Call it before the product of query and key, which hides the load.
    """
    values = 0.0
    if terms.bias is not None:
        bias = terms.bias
        entry = (pairs.b // bias.inner).to(tl.int64) * bias.stride_outer
        entry += (pairs.b % bias.inner).to(tl.int64) * bias.stride_inner
        at = pair_addresses(bias, terms.far_bias, entry, pairs)
        there = (pairs.rows < T) & (pairs.keys < S)
        values = tl.load(at, mask=there, other=0.0).to(tl.float32)
    return values


@triton.jit
def finish(raw, bias, terms, scale):
    """The scores of `raw` products, and the slope of the cap, by which the gradient of a score is multiplied."""
    scores, slope = raw, 1.0
    if terms.softcap is not None:
        share = _tanh(raw * scale * (1.0 / terms.softcap))
        scores = terms.softcap * share
        slope = 1.0 - share * share
    elif terms.bias is not None:
        scores = raw * scale
    if terms.bias is not None:
        scores = scores + bias
    return scores, slope


@triton.jit
def _tanh(x):
    """tanh within 2 units in the last place: the formulas of Cephes' `tanhf`."""
    size = tl.abs(x)
    square = x * x
    series = -5.70498872745e-3 * square + 2.06390887954e-2
    series = series * square - 5.37397155531e-2
    series = series * square + 1.33314422036e-1
    series = series * square - 3.33332819422e-1
    small = x + x * square * series
    large = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(size < 0.625, small, tl.where(x < 0.0, -large, large))


@triton.jit
def natural(scores, scale, terms):
    """Final scores: raw ones times the scale."""
    if (terms.softcap is None) and (terms.bias is None):
        scores = scores * scale
    return scores


# ---------------------------------------------------------------------- softmax
@triton.jit
def softmax_scale(scale, terms):
    """The factor of scores in the softmax, in base 2.

    It is above 0, as the online form requires: the largest score stays the largest, and hidden scores stay -inf.
    """
    scale_log2 = LOG2E
    if (terms.softcap is None) and (terms.bias is None):
        scale_log2 = tl.maximum(scale * LOG2E, SMALLEST)
    return scale_log2


@triton.jit
def weights_over(scores, row_max, scale_log2, terms):
    """`2**(scale_log2 * (score - row_max))`; `row_max` is finite and broadcasts to the scores.

    Raw scores have the rounding error of `row_max * scale_log2` in common, as in `online_softmax`, whose sums are the
    divisors.
    """
    if (terms.softcap is None) and (terms.bias is None):
        p = tl.exp2(tl.fma(scores, scale_log2, -(row_max * scale_log2)))
    else:
        p = tl.exp2((scores - row_max) * scale_log2)
    return p


@triton.jit
def online_softmax(scores, row_max, row_sum, scale_log2, terms):
    """One tile of the softmax of rows: probabilities relative to the new `row_max`, and `row_max`, `row_sum`, `alpha`.

    scores [M, N], hidden ones -inf; row_max [M] is the largest score so far, row_sum [M] the sum of probabilities.
    Multiply earlier sums by `alpha` [M]. Rows without a visible score so far have row_max -inf.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    # Exactly 1 where the maximum stays. The difference of two products would compile to a fused multiply-add, which
    # leaves the rounding error of one product in every tile.
    alpha = tl.exp2((row_max - base) * scale_log2)
    if (terms.softcap is None) and (terms.bias is None):
        p = tl.exp2(scores * scale_log2 - (base * scale_log2)[:, None])
    else:
        p = tl.exp2((scores - base[:, None]) * scale_log2)
    return p, new_max, row_sum * alpha + tl.sum(p, 1), alpha


@triton.jit
def log_sum_exp(row_max, row_sum, scale_log2, terms):
    """Natural logarithm of the sum of exponentials; -inf for a row without a visible score."""
    if (terms.softcap is None) and (terms.bias is None):
        row_max = row_max * scale_log2 * LN2
    return tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log(row_sum))


@triton.jit
def add_sink(lse, terms, h):
    """`lse` with the sink of the head, and the share of the probability that remains for keys; both [M]."""
    sink = tl.load(terms.sinks + h).to(tl.float32)
    row_max = tl.maximum(lse, sink)
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    whole = base + tl.log(tl.exp(lse - base) + tl.exp(sink - base))
    return whole, tl.where(lse == float("-inf"), 0.0, tl.exp(lse - whole))


@triton.jit
def prepared(lse, terms):
    """`lse` in the form that `probabilities` takes: in base 2 for raw scores."""
    if (terms.softcap is None) and (terms.bias is None) and (terms.alpha is None):
        lse = lse * LOG2E
    return lse


@triton.jit
def probabilities(scores, lse, scale, terms):
    """`exp(score - lse)` of finished scores and of `prepared(lse)`, which broadcasts to the tile."""
    if (terms.softcap is None) and (terms.bias is None):
        p = tl.exp2(scores * (scale * LOG2E) - lse)
    else:  # the product with log2(e) alone may overflow
        p = tl.exp2((scores - lse) * LOG2E)
    return p


# ---------------------------------------------------------------------- entmax
@triton.jit
def load_order(terms, h):
    """`alpha - 1` of head h; nan for an alpha outside of (1, 2], which makes the whole head nan."""
    alpha = tl.load(terms.alpha + h)
    return tl.where((alpha > 1.0) & (alpha <= 2.0), alpha - 1.0, float("nan"))


@triton.jit
def log1p(y):
    """ln(1 + y) for y >= -1, finite for -1, by the method of fdlibm: near 1, `tl.log` is accurate to 2^-22 only."""
    u = 1.0 + y
    lost = (y - (u - 1.0)) / tl.maximum(u, SMALLEST)
    # u = 2^n (1 + f), with 1 + f between sqrt(1/2) and sqrt(2).
    shifted = u.to(tl.int32, bitcast=True) + (_ONE - _ROOT_HALF)
    n = ((shifted >> 23) - (_ONE >> 23)).to(tl.float32)
    f = ((shifted & _MANTISSA) + _ROOT_HALF).to(tl.float32, bitcast=True) - 1.0
    s = f / (f + 2.0)
    z = s * s
    half = 0.5 * f * f
    r = ((0.24279078841 * z + 0.28498786688) * z + 0.40000972152) * z + 0.66666662693
    return n * LN2 + (f - (half - s * (half + z * r)) + lost)


@triton.jit
def above_threshold(scores, top, above, order):
    """`order * (score - threshold)` of the threshold `top + above`, at least -1; nan stays nan."""
    y = (scores - top) * order - above * order
    return tl.where(y < -1.0, -1.0, y)


@triton.jit
def powers(y, order):
    """Probabilities `(1 + y) ^ (1 / order)`, and their slopes `p ^ (2 - alpha)`: the derivatives by their scores with a
    fixed threshold, 0 where p is 0."""
    u = 1.0 + y
    if order == 1.0:
        p = u
        slope = tl.where(u == 0.0, 0.0, 1.0)
    elif order == 0.5:
        p = u * u
        slope = u
    else:
        p = tl.where(u == 0.0, 0.0, tl.exp2(log1p(y) * (LOG2E / order)))
        slope = tl.where(p == 0.0, 0.0, p / u)
    return p, slope


# ---------------------------------------------------------------------- gradients
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


@triton.jit
def dropped(tile, keep, dropout):
    """`tile` where dropout keeps it, times its scale, else 0; `keep` is None without dropout."""
    if dropout is not None:
        tile = tl.where(keep, tile * dropout.scale, 0.0)
    return tile


@triton.jit
def weigh(scores, of_rows, seen, terms, h, scale):
    """Probabilities of `scores`, 0 where they are not `seen` (None: all are), and the slopes for `gradient_of_tile`.

    `of_rows` are the terms of `rows.load_row_terms`, broadcast to the tile.
    """
    if terms.alpha is None:
        slope = probabilities(scores, of_rows.lse, scale, terms)
        p = slope
        if seen is not None:
            p = tl.where(seen, p, 0.0)
    else:
        order = load_order(terms, h)
        y = above_threshold(natural(scores, scale, terms), of_rows.lse, of_rows.above, order)
        if seen is not None:
            y = tl.where(seen, y, -1.0)
        p, slope = powers(y, order)
    return p, slope


@triton.jit
def gradient_of_tile(slope, dp, keep, cap, seen, of_rows, of):
    """The gradient of scores before scale, 0 where they are not `seen`.

        dscores = slope * (g * dropped(dp) - delta) * cap

    `slope` is from `weigh`, `cap` is the slope of the cap, and `of_rows` is as in `weigh`. delta is the sum of dout *
    attended of a row with softmax, and the mean of dp weighted by the slopes with entmax.
    """
    dscores = slope * (dropped(dp, keep, of.dropout) * of_rows.g - of_rows.delta) * cap
    if of.terms.alpha is not None:
        dscores = tl.where(slope == 0.0, 0.0, dscores)  # hidden pairs too
    elif seen is not None:
        dscores = tl.where(seen, dscores, 0.0)
    return dscores
