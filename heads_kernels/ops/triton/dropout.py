"""The dropout mask of a tile: Philox4x32-10 of the seed and the element, as `heads_kernels.ops.philox` defines it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kept(dropout, b, h, rows, first_key, BLOCK_N: tl.constexpr):
    """bool `[M, BLOCK_N]`, True where the probability of row i and key j is kept; `first_key` is a multiple of 4."""
    seed = tl.load(dropout.seed)
    quads = (first_key // 4 + tl.arange(0, BLOCK_N // 4))[None, :]  # [1, BLOCK_N / 4]
    zero = (rows[:, None] + quads) * 0  # [M, BLOCK_N / 4]
    w0, w1, w2, w3 = tl.philox(seed, quads + zero, rows[:, None] + zero, h + zero, b + zero)
    # Key j reads word j & 3.
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))  # [M, BLOCK_N]
    return words.to(tl.uint32, bitcast=True) >= tl.cast(dropout.threshold, tl.uint32)
