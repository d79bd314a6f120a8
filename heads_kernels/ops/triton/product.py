"""Products of tiles on tensor cores, accumulated in float32."""

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
def guarded_product(weights, operand, seen, acc):
    """`acc + weights @ operand`, where row n of `operand` reaches only the rows of `acc` that see it.

    weights [M, N] are 0 outside of `seen` [M, N]; in a plain product NaN and infinities of `operand` [N, W] would reach
    every row, for 0 * nan is nan. A row that sees one is nan.
    """
    wide = operand.to(tl.float32)
    bad = tl.min(((wide - wide) == 0.0).to(tl.int32), 1) == 0  # [N]
    poisoned = tl.max((seen & bad[None, :]).to(tl.int32), 1) != 0  # [M]
    acc = product(weights, finite_part(operand), acc)
    return tl.where(poisoned[:, None], float("nan"), acc)
