"""The terms of a score between the product of query and key and the softmax: `heads_kernels.ops.scores` in Triton.

    score = softcap * tanh(scale * raw / softcap) + bias

Without a cap and a bias the scores of kernels are the raw products, and `scale_log2` of their softmax contains `scale`;
with either of them the scores are final, and `scale_log2` is log2(e). Kernels are compiled for one or the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from heads_kernels.ops.triton.load import pair_addresses
from heads_kernels.ops.triton.softmax import LOG2E


@triton.jit
def load_bias(terms, pairs, T, S):
    """float32: the bias of `pairs`; 0 where there is none.

    It is loaded before the product of query and key, to be on its way meanwhile.
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
    """The scores of `raw` products, and the slope of the cap: what the gradient of a score is multiplied by."""
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
def scale_log2_of(scale, terms):
    """What scores are multiplied by in the softmax, in base 2."""
    scale_log2 = LOG2E
    if (terms.softcap is None) and (terms.bias is None):
        scale_log2 = scale * LOG2E
    return scale_log2


@triton.jit
def natural(scores, scale, terms):
    """Finished scores, scaled where they are raw."""
    if (terms.softcap is None) and (terms.bias is None):
        scores = scores * scale
    return scores


@triton.jit
def prepared(lse, terms):
    """`lse` as `probabilities` reads it: in base 2 for raw scores."""
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


@triton.jit
def add_sink(lse, terms, h):
    """`lse` with the sink of the head, and the share of the softmax that is left to keys; both [M]."""
    sink = tl.load(terms.sinks + h).to(tl.float32)
    row_max = tl.maximum(lse, sink)
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    whole = base + tl.log(tl.exp(lse - base) + tl.exp(sink - base))
    return whole, tl.where(lse == float("-inf"), 0.0, tl.exp(lse - whole))


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
