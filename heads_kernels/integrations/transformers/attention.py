"""The attention function that transformers' models call: gates, head masks and key padding in the operator."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from heads_kernels.errors import refuse
from heads_kernels.functional import attention_statistics, gated_attention
from heads_kernels.integrations.transformers.head_masks import head_mask
from heads_kernels.integrations.transformers.masks import PreparedMask
from heads_kernels.mask import Mask
from heads_kernels.nn import HeadGate
from heads_kernels.ops.attention_statistics.op import AttentionStatistics

#: The name of the package among transformers' attention implementations.
NAME: Final = "heads_kernels"

#: What models may ask of their attention function that the operator does not compute.
_UNSERVED: Final = {
    "softcap": "scores under a tanh",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "indices": "keys chosen by index",
    "block_indices": "keys chosen by index",
    "cache": "a paged cache",
}


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PreparedMask | Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = None,
    output_gate: Tensor | None = None,
    gate_activation: str = "identity",
    **kwargs: Any,
) -> tuple[Tensor, AttentionStatistics | None]:
    """`gated_attention` as an attention function of transformers (`AttentionInterface`).

    The gate of a head is the product of `module.head_gate` (`hk.nn.HeadGate`), if the module has one, and of the head
    mask that was given to the model: `head_mask`, `decoder_head_mask` or `cross_attn_head_mask`, `[H]` or `[L, H]`, of
    any floating dtype or integers, with gradient. Closed heads cost nothing.

    The operators take no additive mask. A call with a `position_bias`, a float mask, or a bool mask that differs by
    row and is no `PreparedMask` runs as transformers' own SDPA function, and its output times the gate. A layer that
    was pruned has the buffer `kept_heads`: the bias and head masks are of the heads as they were.

    Args:
        module: the layer that calls.
        query: `[B, H, T, D]`; `key`, `value`: `[B, Hk, S, D]` and `[B, Hk, S, Dv]`.
        attention_mask: what `prepare_mask` gave; a bool tensor, True = may attend; or a float tensor to add.
        is_causal, sliding_window: read where there is no mask; `module.is_causal` stands in for None.
        output_gate: logits `[B, H, T]` or `[B, H, T, Dv]` of an output-gated layer, under `gate_activation`.

    Returns:
        `[B, T, H, Dv]`, contiguous; and with `output_attentions=True`, in the place of the `[B, H, T, S]` map of
        probabilities, the `hk.AttentionStatistics` of the layer.

    Raises:
        ValueError: softcap, sinks, sparse indices, a paged cache, or `output_attentions` beside an additive mask; a
            head mask that does not fit, or that is given to a model without `use(model)`.
    """
    _check_served(module, kwargs)
    B, H, T = query.shape[:3]
    if H == 0:  # every head is pruned; what is left of the keys may be there for a cache to count
        key, value = key[:, :0], value[:, :0]
    gate, closed_grad = _head_gate(module, B, H, kwargs)
    activation = "identity"
    if gate is None and output_gate is not None:
        gate, activation, output_gate = output_gate, gate_activation, None

    statistics = None
    if position_bias is not None or _is_dense(attention_mask):
        if output_attentions:
            was = f"is True, but {type(module).__name__} has an additive or dense mask"
            refuse("output_attentions", was, "use attn_implementation='eager' for maps")
        out = _by_sdpa(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, position_bias
        )
        if gate is not None:
            out = out * _by_token(gate, activation).to(out.dtype)
    else:
        mask = _mask(module, T, attention_mask, is_causal, sliding_window)
        heads = gated_attention(
            query,
            key,
            value,
            gate,
            attn_mask=mask,
            scale=scaling,
            gate_activation=activation,
            closed_grad=closed_grad,
            dropout_p=dropout,
        )
        out = heads.transpose(1, 2).contiguous()
        if output_attentions:
            statistics = attention_statistics(query, key, attn_mask=mask, scale=scaling)
    if output_gate is not None:  # beside gates of heads, which close heads in the operator
        out = out * _by_token(output_gate, gate_activation).to(out.dtype)
    return out, statistics


def _check_served(module: nn.Module, arguments: dict[str, Any]) -> None:
    for name, what in _UNSERVED.items():
        if arguments.get(name) is not None:
            was = f"is given by {type(module).__name__} ({what})"
            refuse(name, was, "the operator has none; use attn_implementation='sdpa' or 'eager'")


# ---------------------------------------------------------------------- masks
def _is_dense(attention_mask: PreparedMask | Tensor | None) -> bool:
    """Whether it is a tensor that no fused kernel reads: to be added, or different from row to row."""
    if not isinstance(attention_mask, Tensor):
        return False
    return attention_mask.dtype != torch.bool or attention_mask.shape[1:3] != (1, 1)


def _mask(
    module: nn.Module,
    T: int,
    attention_mask: PreparedMask | Tensor | None,
    is_causal: bool | None,
    sliding_window: int | None,
) -> Mask | Tensor:
    """The operator's mask. A call without one is read as stock SDPA reads it: a single row sees every key."""
    if attention_mask is not None:
        return attention_mask.mask if isinstance(attention_mask, PreparedMask) else attention_mask
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = T > 1 and bool(causal)
    if sliding_window is None or T == 1:
        return Mask(causal=causal)
    return Mask(causal=causal, window=(sliding_window - 1, 0 if causal else sliding_window - 1))


def _by_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PreparedMask | Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    position_bias: Tensor | None,
) -> Tensor:
    """Attention without gates, `[B, T, H, Dv]`, by transformers' own function."""
    if isinstance(attention_mask, PreparedMask):
        attention_mask = attention_mask.to_dense()
    kept: Tensor | None = getattr(module, "kept_heads", None)
    if position_bias is not None and kept is not None:
        position_bias = position_bias[:, kept]
    out: Tensor = sdpa_attention_forward(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        position_bias=position_bias,
    )[0]
    return out


def _by_token(gate: Tensor, activation: str) -> Tensor:
    """A gate of the operator as a factor of `[B, T, H, Dv]`."""
    if activation == "sigmoid":
        gate = gate.float().sigmoid()
    elif activation == "softplus":
        gate = nn.functional.softplus(gate.float())
    if gate.dim() <= 2:  # [H] or [B, H]
        return gate[..., None, :, None]
    return gate.transpose(1, 2) if gate.dim() == 4 else gate.transpose(1, 2)[..., None]


# ---------------------------------------------------------------------- gates of heads
def _head_gate(
    module: nn.Module, B: int, H: int, arguments: dict[str, Any]
) -> tuple[Tensor | None, bool]:
    """The gates of this pass, `[H]` or `[B, H]`, or None; and what the operator's `closed_grad` is to be."""
    head_gate: HeadGate | None = getattr(module, "head_gate", None)
    row = head_mask(module, H, arguments)
    if head_gate is None:
        return row, True
    gates = head_gate(B)
    if row is None:
        return gates, head_gate.closed_grad
    return gates * row, head_gate.closed_grad or row.requires_grad
