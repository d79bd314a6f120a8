"""Masks and biases of the attention modules: arguments of `torch.nn.MultiheadAttention` as a `hk.Mask` and a bias."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

from heads_kernels.batch import flatten_companion
from heads_kernels.checks import DTYPES, check_companion, check_tensor, refuse, refuse_type
from heads_kernels.mask import Mask
from heads_kernels.mask.kept import readable
from heads_kernels.mask.terms import Causal, Dense, KeyMask, QueryMask, Term
from heads_kernels.offset_bias import OffsetBias

Bias: TypeAlias = Tensor | OffsetBias | None


def mask_and_bias(
    query: Tensor,
    sizes: tuple[int, ...],
    *,
    mask: Mask | None,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    bias: Bias,
    self_attention: bool,
    hides_rows: bool,
    kept_heads: Tensor | None,
) -> tuple[Mask, Bias]:
    """All masks of one call of a module as one, and what is added to its scores; arguments as in `Multihead.forward`.

    In self-attention the rows are the last T keys, since earlier ones are cached, and `hides_rows` hides the rows of
    padded keys; otherwise the first row is aligned with the first key. `sizes` are (batch dimensions, H, T, S), S with
    cached keys; `kept_heads` are the original numbers of the heads of a pruned layer.
    """
    if mask is not None and not isinstance(mask, Mask):
        refuse_type("mask", mask, "pass a hk.Mask, or a tensor as key_padding_mask or attn_mask, True = hidden")
    *batch, H, T, S = sizes
    terms: tuple[Term, ...] = ()
    if is_causal:
        if isinstance(attn_mask, Tensor) and attn_mask.requires_grad:
            refuse("attn_mask", "requires a gradient, but is not read with is_causal", "pass it as bias")
        terms += (Causal("lower_right" if self_attention else "upper_left"),)
    elif attn_mask is not None:
        pairs = _pairs(attn_mask, sizes)
        if not _is_bias(pairs):
            visible = _visible("attn_mask", pairs)
            terms += (Dense(visible[None, None] if visible.dim() == 2 else visible.flatten(0, -4)),)
        elif bias is None:
            check_companion("attn_mask", pairs, query)
            bias = pairs
        else:
            instead = "pass their sum as bias, or a bool attn_mask, True = hidden"
            refuse("attn_mask", "is a float tensor, and bias is given too", instead)
    if key_padding_mask is not None:
        _check_hides("key_padding_mask", key_padding_mask, "[..., S]", (len(batch) + 1,))
        if len(batch) > 1:
            batched = tuple(batch)
            key_padding_mask = flatten_companion("key_padding_mask", key_padding_mask, batched, "S")
        real = _visible("key_padding_mask", key_padding_mask)
        terms += (KeyMask(real, "key_padding_mask"),)
        if self_attention and hides_rows:
            terms += (QueryMask(real[:, S - T :], "key_padding_mask"),)
    whole = (Mask() if mask is None else mask) & Mask.of(terms)
    if isinstance(bias, OffsetBias):
        _check_heads(bias.heads, H, kept_heads)
        if self_attention and T != S:
            if bias.start:
                was = f"starts at row {bias.start}, but with this cache rows start at {S - T}"
                refuse("bias", was, "pass the bias without starting_at")
            bias = bias.starting_at(S - T)
    elif isinstance(bias, Tensor) and bias.dim() > 2:  # the rest is checked by the operator
        _check_heads(bias.shape[-3], H, kept_heads)
    return whole, bias


def _pairs(attn_mask: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """`attn_mask` as `[T, S]` or of the sizes (batch dimensions, H, T, S)."""
    *batch, H, T, S = sizes
    BH = math.prod(batch) * H
    _check_hides("attn_mask", attn_mask, "[T, S] or [B * H, T, S]", (2, 3))
    if attn_mask.shape not in ((T, S), (BH, T, S)):
        was = f"has shape {list(attn_mask.shape)}, but scores are {list(sizes)}"
        refuse("attn_mask", was, f"pass [{T}, {S}] or [{BH}, {T}, {S}]")
    return attn_mask if attn_mask.dim() == 2 else attn_mask.view(sizes)


def _is_bias(pairs: Tensor) -> bool:
    """Whether it is added to scores; its values are read only on the CPU."""
    if not pairs.is_floating_point():
        return False
    if pairs.requires_grad or not readable(pairs):
        return True
    return not bool(((pairs == 0) | (pairs == -torch.inf)).all())


def _check_hides(argument: str, hidden: object, layout: str, ranks: tuple[int, ...]) -> None:
    """Refuse what is no bool or floating tensor of these ranks."""
    if isinstance(hidden, Mask):
        refuse(argument, "is a Mask", "pass a hk.Mask as mask=", TypeError)
    check_tensor(argument, hidden, f"pass a bool tensor {layout}, True = hidden", ranks, (torch.bool, *DTYPES))


def _visible(argument: str, hidden: Tensor) -> Tensor:
    """A mask of the modules as bool, True = visible."""
    if hidden.dtype == torch.bool:
        return ~hidden
    visible = hidden == 0
    if readable(hidden) and not bool((visible | (hidden == -torch.inf)).all()):
        refuse(argument, "holds floats other than 0 and -inf", "pass a bool tensor, True = hidden")
    return visible


def _check_heads(heads: int, H: int, kept_heads: Tensor | None) -> None:
    if heads in (1, H):
        return
    instead = f"pass {H} heads, as the layer has, or 1"
    if kept_heads is not None:
        instead += f"; the pruned layer kept the original heads {kept_heads.tolist()}"
    refuse("bias", f"has {heads} heads", instead)
