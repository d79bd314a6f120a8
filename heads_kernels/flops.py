"""FLOPs of the matrix products of attention (2 per multiply-add).

As in `torch.utils.flop_counter`, only matrix products count, not softmax, masks, mixing or gates. `pairs` is the number
of (query row, key) pairs that are computed: `B * H * T * S` in the dense count. A backward pass counts the scores
again, then dP, dV, dQ and dK.
"""

from __future__ import annotations


def forward_flops(pairs: int, D: int, Dv: int) -> int:
    """Scores `Q K^T` of width D, then `P V` of width Dv: `2 * pairs * (D + Dv)` (Cordonnier et al. 2020: D = Ds)."""
    return 2 * pairs * (D + Dv)


def backward_flops(pairs: int, D: int, Dv: int, dquery_width: int | None = None) -> int:
    """Scores, dQ and dK of width D, dP and dV of width Dv: `2 * pairs * (3 D + 2 Dv)`.

    `dquery_width` is the width of dQ if it differs from D: the gradient of a mixing vector needs all Ds features of
    `dS K`, including those that the scores of the head skip.
    """
    return 2 * pairs * (2 * D + (D if dquery_width is None else dquery_width) + 2 * Dv)
