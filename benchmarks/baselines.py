"""What people write today, to compare with: eager PyTorch, and SDPA times the gate.

Masks and everything else that does not depend on the values are made before the clock starts.
Padded query rows are computed like any other, as these forms do; their values mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from heads_kernels.offset_bias import OffsetBias
from heads_kernels.ops.gate import activate, as_4d
from heads_kernels.testing import Inputs

Call = Callable[[], Tensor]


@dataclass(frozen=True, eq=False)
class _Masks:
    """The mask of a call in the forms that eager PyTorch and SDPA take; True = may attend."""

    visible: Tensor | None  # bool [B | 1, H | 1, T | 1, S], without the causal part if is_causal
    additive: Tensor | None  # the whole mask, 0 or -inf
    is_causal: bool


def baselines(inputs: Inputs) -> dict[str, Call]:
    """`eager` and `sdpa`: the same call in PyTorch, reading (and differentiating) the same tensors.

    A cap, sinks and entmax have `eager` alone: SDPA has none of them. Raises `ValueError` for a mask under which a row
    sees nothing, unless it is padding.
    """
    masks = _masks(inputs)
    found = {"eager": _eager(inputs, masks)}
    if not ({"sinks", "alpha"} & inputs.tensors.keys() or "softcap" in inputs.options):
        found["sdpa"] = _sdpa(inputs, masks)
    return found


def _query_and_key(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """By head. In collaborative attention the mixed query `[B, H, T, Ds]` is in memory, as in the authors' code."""
    t = inputs.tensors
    if "mixing" not in t:
        return t["query"], t["key"]
    return t["query"][:, None] * t["mixing"].to(t["query"].dtype)[:, None], t["key"][:, None]


def _eager(inputs: Inputs, masks: _Masks) -> Call:
    t, scale = inputs.tensors, inputs.parsed().scale
    softcap, sinks = inputs.options.get("softcap"), t.get("sinks")

    def call() -> Tensor:
        (query, key), value = _query_and_key(inputs), t["value"]
        group = query.shape[1] // value.shape[1]
        if group > 1:
            value = value.repeat_interleave(group, 1)
            key = key if key.shape[1] == 1 else key.repeat_interleave(group, 1)
        scores = query @ key.mT * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        for added in (_bias(inputs, scale), masks.additive):
            if added is not None:
                scores = scores + added
        if "alpha" in t:
            p = _Entmax.apply(scores, t["alpha"][:, None, None])  # type: ignore[no-untyped-call]
        elif sinks is None:
            p = scores.softmax(-1)
        else:
            column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            p = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
        return times_gate(p @ value, inputs)

    return call


class _Entmax(torch.autograd.Function):
    """alpha-entmax by bisection with the closed form of its gradients: the arithmetic of the `entmax` package."""

    _STEPS = 50

    @staticmethod
    def forward(ctx: Any, scores: Tensor, alpha: Tensor) -> Tensor:
        order = alpha - 1
        z = scores * order
        low = z.amax(-1, keepdim=True) - 1
        width = 1 - (1 / scores.shape[-1]) ** order
        for _ in range(_Entmax._STEPS):
            width = width / 2
            p = (z - low - width).clamp(min=0) ** (1 / order)
            low = torch.where(p.sum(-1, keepdim=True) >= 1, low + width, low)
        p = (z - low).clamp(min=0) ** (1 / order)
        p = p / p.sum(-1, keepdim=True)
        ctx.save_for_backward(p, alpha)
        return p

    @staticmethod
    def backward(ctx: Any, dp: Tensor) -> Any:
        p, alpha = ctx.saved_tensors
        slopes = torch.where(p > 0, p ** (2 - alpha), 0.0)
        share = slopes / slopes.sum(-1, keepdim=True)
        dscores = slopes * (dp - (dp * share).sum(-1, keepdim=True))
        entropy = torch.where(p > 0, p * p.log(), 0.0)
        dalpha = (p - share) / (alpha - 1) ** 2
        dalpha = dalpha - (entropy - share * entropy.sum(-1, keepdim=True)) / (alpha - 1)
        return dscores, (dp * dalpha).sum_to_size(alpha.shape)


def _sdpa(inputs: Inputs, masks: _Masks) -> Call:
    """A bias and what is hidden are one float mask; a shared key is expanded as a view. Where one query row sees all of
    a cache, the heads of a group are rows of one key head, which is faster."""
    value, scale = inputs.tensors["value"], inputs.parsed().scale

    def call() -> Tensor:
        query, key = _query_and_key(inputs)
        if "mixing" in inputs.tensors:
            key = key.expand(-1, query.shape[1], -1, -1)
        mask, is_causal, bias = masks.visible, masks.is_causal, _bias(inputs, scale)
        if bias is not None:
            mask = bias if masks.additive is None else bias + masks.additive
            is_causal = False
        grouped = query.shape[1] != key.shape[1]
        if grouped and query.shape[2] == 1 and mask is None:
            rows = query.reshape(*key.shape[:2], -1, query.shape[3])
            out = F.scaled_dot_product_attention(rows, key, value, scale=scale)
            return times_gate(out.reshape(*query.shape[:3], -1), inputs)
        out = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
        return times_gate(out, inputs)

    return call


def _bias(inputs: Inputs, scale: float) -> Tensor | None:
    """What is added to the scores, in the dtype of the query; of a table of offsets made dense in every call."""
    tensors = inputs.tensors
    dtype = tensors["query"].dtype
    if "content_bias" in tensors:
        return tensors["content_bias"].to(dtype)[:, :, None] * scale
    if "bias" in tensors:
        return tensors["bias"].to(dtype)
    if "offset_table" not in tensors:
        return None
    T, S = tensors["query"].shape[-2], tensors["key"].shape[-2]
    return OffsetBias(tensors["offset_table"]).to_dense(T, S).to(dtype)


def times_gate(out: Tensor, inputs: Inputs) -> Tensor:
    """`out` `[B, H, T, Dv]` times the activated gate of the call."""
    gate = inputs.tensors.get("gate")
    if gate is None:
        return out
    gate = activate(gate, inputs.options.get("gate_activation", "identity"))
    return out * as_4d(gate).to(out.dtype)


def _masks(inputs: Inputs) -> _Masks:
    problem = inputs.parsed()
    T, S, dtype = problem.T, problem.S, problem.query.dtype
    is_causal = bool(inputs.options.get("is_causal"))
    whole = problem.intervals.to_dense(T, S, problem.query.device)  # [B | 1, H | 1, T, S]
    keys = whole.any(-2, keepdim=True)  # [B | 1, H | 1, 1, S]
    triangle = torch.ones(T, S, dtype=torch.bool, device=whole.device).tril()
    simple = keys & triangle if is_causal else keys.expand(whole.shape)
    rows = whole.any(-1, keepdim=True)
    if not torch.equal(simple & rows, whole):  # a window, or a dense mask
        if not rows.all():
            raise ValueError(f"attn_mask of {inputs.operator} has rows that see nothing; no baseline")
        return _Masks(whole, _additive(whole, dtype), False)
    # Padded query rows: nobody masks them by hand.
    if keys.all():
        if not is_causal:
            return _Masks(None, None, False)
        return _Masks(None, _additive(triangle, dtype), True)
    visible = simple if is_causal else keys
    return _Masks(visible, _additive(visible, dtype), False)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return zeros.masked_fill(~visible, float("-inf"))
