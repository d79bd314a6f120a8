"""The operators in ten lines of PyTorch and its autograd, independent of the backends, to test the oracle.

The `[T, S]` matrix is stored and nothing is skipped; hidden values must be finite.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from heads_kernels.batch import expand_bias
from heads_kernels.call import Call
from heads_kernels.offset_bias import diagonals


class Plain(NamedTuple):
    """The result of `plain`: out `[B, H, T, Dv]`, lse or thresholds `[B, H, T]`, probabilities `[B, H, T, S]`."""

    out: Tensor
    lse: Tensor
    probabilities: Tensor


def plain(call: Call, kept: Tensor | None = None) -> Plain:
    """The formula of a parsed call, differentiable. Dropout: `kept` `[B, H, T, S]` is 0, or 1 over the share kept."""
    p = call
    if p.mixing is None:
        group = p.H // max(p.Hk, 1)
        scores = p.query @ p.key.repeat_interleave(group, 1).mT
    else:
        scores = (p.query[:, None] * p.mixing[:, None]) @ p.key[:, None].mT
    if p.content_bias is not None:
        scores = scores + p.content_bias[:, :, None]
    scores = scores * p.scale
    if p.softcap:
        scores = p.softcap * torch.tanh(scores / p.softcap)
    if p.bias is not None:
        scores = scores + expand_bias(p.bias, p.B)
    if p.offset_bias is not None:
        scores = scores + diagonals(p.offset_bias, p.T, p.S)
    visible = p.intervals.to_dense(p.T, p.S, scores.device) & (scores > -torch.inf)
    scores = scores.masked_fill(~visible, -torch.inf)
    sink = scores.new_full((p.H,), -torch.inf) if p.sinks is None else p.sinks
    scores = torch.cat([scores, sink[:, None, None].expand(*scores.shape[:3], 1)], -1)
    sees = (scores > -torch.inf).any(-1, keepdim=True)  # [B, H, T, 1]
    probabilities = (scores.masked_fill(~sees, 0.0).softmax(-1) * sees)[..., :-1]
    lse = scores.logsumexp(-1)
    if p.alpha is not None:
        probabilities, lse = entmax(scores[..., :-1], (p.alpha - 1)[:, None, None])
    if p.value is None:
        return Plain(scores.new_empty(0), lse, probabilities)
    weights = probabilities if kept is None else probabilities * kept
    out = weights @ p.value.repeat_interleave(p.H // max(p.value.shape[1], 1), 1)
    if p.gate is not None:
        gate = {"identity": lambda g: g, "sigmoid": torch.sigmoid, "softplus": F.softplus}[p.gate_activation](p.gate)
        gate = gate[None] if gate.dim() == 1 else gate
        out = out * gate[(...,) + (None,) * (4 - gate.dim())]
    return Plain(out, lse, probabilities)


def entmax(scores: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities `[B, H, T, S]` and thresholds `[B, H, T]` of scores, -inf where hidden; `order` is `[H, 1, 1]`.

    Thresholds are found by bisection, and differentiated by one step of Newton's method from there.
    """
    if not scores.shape[-1]:
        return scores, scores.new_full(scores.shape[:-1], -torch.inf)
    visible = scores > -torch.inf
    sees = visible.any(-1, keepdim=True)
    top = scores.amax(-1, keepdim=True).detach().masked_fill(~sees, 0.0)
    scores = scores.where(visible, top - 2 / order.detach())  # outside of the support
    with torch.no_grad():
        low = top  # one probability is 1
        high = top + 1 / order  # all are 0
        for _ in range(100):
            middle = (low + high) / 2
            enough = _powers(scores, middle, order)[0].sum(-1, keepdim=True) >= 1
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    p, slopes = _powers(scores, low, order)
    slope = slopes.sum(-1, keepdim=True).detach().masked_fill(~sees, 1.0)
    threshold = low + (p.sum(-1, keepdim=True) - 1) / slope
    p = _powers(scores, threshold, order)[0]
    return p * visible, threshold.masked_fill(~sees, -torch.inf)[..., 0]


def _powers(scores: Tensor, threshold: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """`[1 + order (scores - threshold)]_+` to the powers `1 / order` and `1 / order - 1`."""
    above = order * (scores - threshold)
    inside = above > -1
    logs = torch.log1p(above.where(inside, torch.zeros_like(above)))
    return (logs / order).exp() * inside, (logs * (1 / order - 1)).exp() * inside
