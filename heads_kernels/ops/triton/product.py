"""Products of tiles on tensor cores, accumulated in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, acc):
    """`acc + a @ b`; float32 operands are multiplied as float32, not as tf32."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def guarded_product(weights, operand, seen, acc):
    """`acc + weights @ operand`, where row n of `operand` reaches only the rows of `acc` that see it.

    weights [M, N] are 0 outside of `seen` [M, N]; in a plain product NaN and infinities of `operand` [N, W] would reach
    every row, for 0 * nan is nan. A row that sees one is nan.
    """
    wide = operand.to(tl.float32)
    finite = (wide - wide) == 0.0
    bad = tl.min(finite.to(tl.int32), 1) == 0  # [N]
    poisoned = tl.max((seen & bad[None, :]).to(tl.int32), 1) != 0  # [M]
    acc = product(weights, tl.where(finite, wide, 0.0).to(operand.dtype), acc)
    return tl.where(poisoned[:, None], float("nan"), acc)


@triton.jit
def sound_keys(scores, sound_rows):
    """bool `[N]`: False for keys that hold NaN or an infinity, by the raw `scores` [M, N] of the sound rows [M].

    Left out of a product with `dscores` (read as 0), such a key reaches only rows that see it: they are nan by `p`.
    """
    finite = ((scores - scores) == 0.0) | (sound_rows[:, None] == 0)
    return tl.min(finite.to(tl.int32), 0) != 0
