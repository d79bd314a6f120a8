"""alpha-entmax in the place of softmax: `csrc/cpu/entmax.h` in Triton (Correia, Niculae, Martins 2019).

    p = [1 + order (s - threshold)]_+ ^ (1 / order)        order = alpha - 1

The threshold of a row makes its probabilities add up to 1. It is saved in the place of lse, to which it tends as order
tends to 0, in two numbers: the largest score, and how far the threshold is above it. Kernels are compiled for softmax
or entmax, by `terms.alpha`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from heads_kernels.ops.triton.scores import natural, probabilities
from heads_kernels.ops.triton.softmax import LN2, LOG2E, SMALLEST

_ROOT_HALF: tl.constexpr = tl.constexpr(0x3F3504F3)  # bits of sqrt(1/2)
_ONE: tl.constexpr = tl.constexpr(0x3F800000)
_MANTISSA: tl.constexpr = tl.constexpr(0x7FFFFF)


@triton.jit
def load_order(terms, h):
    """`alpha - 1` of head h; nan, which makes nan of the whole head, for an alpha outside of (1, 2]."""
    alpha = tl.load(terms.alpha + h)
    return tl.where((alpha > 1.0) & (alpha <= 2.0), alpha - 1.0, float("nan"))


@triton.jit
def log1p(y):
    """ln(1 + y) for y >= -1, finite for -1; by the method of fdlibm, for `tl.log` is only exact to 2^-22 near 1."""
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
    """Probabilities `(1 + y) ^ (1 / order)` and their slopes `p ^ (2 - alpha)`, by which they grow with their scores
    while the threshold is held: 0 where p is 0."""
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


@triton.jit
def weigh(scores, of_rows, seen, terms, h, scale):
    """Probabilities of `scores`, 0 where they are not `seen` (None: all are), and the slopes for `gradient_of_tile`.

    `of_rows` broadcasts to the tile: see `rows.load_row_terms`.
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
def dropped(tile, keep, dropout):
    """`tile` where dropout keeps it, times its scale, else 0; `keep` is None without dropout."""
    if dropout is not None:
        tile = tl.where(keep, tile * dropout.scale, 0.0)
    return tile


@triton.jit
def gradient_of_tile(slope, dp, keep, cap, seen, of_rows, of):
    """The gradient of scores before scale, 0 where they are not `seen`.

        dscores = slope * (g * dropped(dp) - delta) * cap

    `slope` is what `weigh` gave, `cap` the slope of the cap, `of_rows` as there. Its delta is a row's sum of dout *
    attended with softmax, else the mean of dp by the slopes.
    """
    dscores = slope * (dropped(dp, keep, of.dropout) * of_rows.g - of_rows.delta) * cap
    if of.terms.alpha is not None:
        dscores = tl.where(slope == 0.0, 0.0, dscores)  # hidden pairs too
    elif seen is not None:
        dscores = tl.where(seen, dscores, 0.0)
    return dscores
