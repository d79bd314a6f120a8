"""alpha-entmax of rows of scores, its threshold and its derivatives (Correia, Niculae, Martins 2019).

    p = [(alpha - 1) s - tau]_+ ^ (1 / (alpha - 1)) = [1 + order (s - threshold)]_+ ^ (1 / order)

with `order = alpha - 1` in (0, 1] and `threshold = (tau + 1) / order`, which tends to the log of the sum of exp(s) as
alpha tends to 1. Unlike with `tau`, the terms do not cancel there.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from heads_kernels.checks import refuse, shown
from heads_kernels.ops.formula import NEG_INF

#: A limit, for arithmetic whose rounding keeps moving a threshold up; at most 11 were seen, in float64.
_MOST_STEPS: Final = 64


def check_alpha_values(alpha: Tensor) -> None:
    """Refuse values for which entmax is not defined."""
    alpha = _unwrapped(alpha)
    outside = ~((alpha > 1) & (alpha <= 2))
    if bool(outside.any()):
        refuse(
            "alpha",
            f"has the value {shown(alpha[outside][0].item())}",
            "pass values in (1, 2]: 2 is sparsemax, and towards 1 it is softmax (gated_attention)",
        )


def order_of(alpha: Tensor) -> Tensor:
    """`alpha - 1`, `[H, 1, 1]`; refuses values for which entmax is not defined."""
    check_alpha_values(alpha)
    return (alpha - 1.0)[:, None, None]


def row_logs(finished: Tensor, threshold: Tensor, order: Tensor, pairs: Tensor | None) -> Tensor:
    """`ln p` `[B, H, T, S]` of finished scores, -inf outside of `pairs` and in rows that see no key."""
    top, above = threshold[..., None]
    logs = log_probabilities(finished - top, above, order)
    logs = logs.masked_fill(top == NEG_INF, NEG_INF)
    return logs if pairs is None else logs.masked_fill(~pairs, NEG_INF)


def log_probabilities(scores: Tensor, threshold: Tensor, order: Tensor) -> Tensor:
    """`ln p` of `scores` `[B, H, T, S]`, -inf outside of the support.

    `threshold` is `[B, H, T, 1]`, `order` `[H, 1, 1]`; scores and threshold are relative to the same number.
    """
    return torch.log1p((order * (scores - threshold)).clamp(min=-1.0)) / order


def slopes(logs: Tensor, order: Tensor) -> Tensor:
    """`p ^ (2 - alpha)` inside of the support and 0 outside, from `ln p`."""
    return torch.exp((1.0 - order) * logs).masked_fill(logs == NEG_INF, 0.0)


def threshold(scores: Tensor, visible: Tensor | None, order: Tensor) -> Tensor:
    """The threshold at which the visible probabilities of a row add up to 1, in two numbers, `[2, B, H, T]`.

    They are the largest score of the row, -inf if it sees no key, and the distance of the threshold above it.
    Newton's method solves `sum(p) ^ order = 1`, from the largest score. The left side is a norm of the excess over the
    threshold, so it is convex and decreasing: the threshold only increases, until rounding or `_MOST_STEPS` stops it.
    For equal scores, and in the limit of softmax, the first step is exact.
    """
    if visible is not None:
        scores = scores.masked_fill(~visible, NEG_INF)
    if scores.shape[-1] == 0:
        empty = scores.new_full(scores.shape[:-1], NEG_INF)
        return torch.stack([empty, torch.zeros_like(empty)])
    top = scores.amax(-1, keepdim=True)
    below = scores - top.masked_fill(top == NEG_INF, 0.0)
    shift = torch.zeros_like(top)
    for _ in range(_MOST_STEPS):
        logs = log_probabilities(below, shift, order)
        total = logs.exp().sum(-1, keepdim=True)
        excess = -torch.expm1(-order * total.log()) / order * total
        step = (excess / slopes(logs, order).sum(-1, keepdim=True)).clamp(min=0.0)
        moved = shift + step.masked_fill(top == NEG_INF, 0.0)
        if not bool(_unwrapped(moved > shift).any()):
            break
        shift = moved
    return torch.stack([top, moved])[..., 0]


def _unwrapped(tensor: Tensor) -> Tensor:
    """The tensor that transforms of `torch.func` have wrapped: under `torch.vmap`, the numbers of the whole batch."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def alpha_derivative(logs: Tensor, order: Tensor) -> Tensor:
    """`dp / dalpha` `[B, H, T, S]` from `ln p`, 0 outside of the support.

    The closed form of the paper (proposition 1),

        (p - share) / order^2 - (p ln p + share * entropy) / order,   share = p^(2 - alpha) / sum p^(2 - alpha),

    is a difference of large terms where alpha is near 1. Here their first-order parts are cancelled analytically.
    """
    inside = logs.masked_fill(logs == NEG_INF, 0.0)
    p = logs.exp()
    x = -order * inside
    first = torch.expm1(x) / order
    series = x.square() * (0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x / 720))))
    small = x.abs() < torch.finfo(x.dtype).eps ** (1 / 6)
    second = torch.where(small, series, torch.expm1(x) - x) / order.square()
    entropy, mean_first, mean_second = ((p * each).sum(-1, keepdim=True) for each in (-inside, first, second))
    change = mean_second - second - inside * mean_first - first * entropy
    return p * change / (1.0 + order * mean_first)
