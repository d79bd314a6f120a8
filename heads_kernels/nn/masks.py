"""Masks and biases of the attention modules: arguments of `torch.nn.MultiheadAttention` as a `hk.Mask` and a bias."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from heads_kernels.batch import check_bias_shape
from heads_kernels.checks import check_companion, refuse
from heads_kernels.mask import Mask
from heads_kernels.mask.kept import readable
from heads_kernels.mask.terms import Causal, Dense, KeyMask, QueryMask, Term
from heads_kernels.offset_bias import OffsetBias

PAIRS = "[T, S] or [B * H, T, S]"


def module_mask(
    sizes: tuple[int, int, int, int],
    *,
    mask: Mask | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    self_attention: bool = False,
    hides_rows: bool = True,
) -> Mask:
    """All masks of one call of a module as one.

    Args:
        sizes: (B, H, T, S); S includes cached keys.
        mask: a native mask; the others hide more.
        key_padding_mask: `[B or 1, S]`; bool with True = hidden, or floating with 0 = visible and -inf = hidden. In
            self-attention the rows are the last T keys, and the row of a hidden key is fully masked.
        attn_mask: `[T, S]` or `[B * H, T, S]`, the same for pairs, unless it is a bias (`is_bias`). Not read if
            `is_causal`.
        is_causal: row i sees keys up to its own position; in self-attention the last row is aligned with the last key
            (earlier keys are cached), otherwise the first row with the first key.
        self_attention: whether rows and keys belong to one sequence.
        hides_rows: whether `key_padding_mask` hides rows in self-attention.

    Raises:
        TypeError, ValueError: an argument is invalid, by name. Floats other than 0 and -inf are found only on the CPU;
            elsewhere everything except 0 is hidden.
    """
    if mask is not None and not isinstance(mask, Mask):
        instead = "pass a hk.Mask, or a tensor as key_padding_mask or attn_mask, True = hidden"
        refuse("mask", f"is a {type(mask).__name__}", instead, TypeError)
    _, _, T, S = sizes
    terms: tuple[Term, ...] = ()
    if is_causal:
        terms += (Causal("lower_right" if self_attention else "upper_left"),)
    elif attn_mask is not None:
        terms += (Dense(_pairs(attn_mask, sizes)),)
    if key_padding_mask is not None:
        real = _visible("key_padding_mask", key_padding_mask, "[B, S]", (2,))
        terms += (KeyMask(real, "key_padding_mask"),)
        if self_attention and hides_rows:
            terms += (QueryMask(real[:, S - T :], "key_padding_mask"),)
    return (Mask() if mask is None else mask) & Mask.of(terms)


def _pairs(attn_mask: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    """`attn_mask` as bool `[1, 1, T, S]` or `[B, H, T, S]`, True = visible."""
    visible = _visible("attn_mask", attn_mask, PAIRS, (2, 3))
    check_pairs(visible, sizes)
    return visible[None, None] if visible.dim() == 2 else visible.view(sizes)


def check_pairs(attn_mask: Tensor, sizes: tuple[int, int, int, int]) -> None:
    """`attn_mask` is `[T, S]` or `[B * H, T, S]` of these sizes (B, H, T, S)."""
    B, H, T, S = sizes
    if attn_mask.shape not in ((T, S), (B * H, T, S)):
        was = f"has shape {list(attn_mask.shape)}, but B, H, T, S are {list(sizes)}"
        refuse("attn_mask", was, f"pass [{T}, {S}] or [{B * H}, {T}, {S}]")


def _visible(argument: str, hidden: Tensor, layout: str, ranks: tuple[int, ...]) -> Tensor:
    """A mask of the modules as bool, True = visible."""
    instead = f"pass a bool tensor {layout}, True = hidden"
    if not isinstance(hidden, Tensor):
        if isinstance(hidden, Mask):
            instead = "pass a hk.Mask as mask="
        refuse(argument, f"is a {type(hidden).__name__}", instead, TypeError)
    if hidden.dim() not in ranks:
        refuse(argument, f"has shape {list(hidden.shape)}", instead)
    if hidden.dtype == torch.bool:
        return ~hidden
    if not hidden.is_floating_point():
        refuse(argument, f"has dtype {hidden.dtype}", instead, TypeError)
    visible = hidden == 0
    if readable(hidden) and not bool((visible | (hidden == -torch.inf)).all()):
        refuse(argument, "holds floats other than 0 and -inf", instead)
    return visible


def is_bias(attn_mask: object, is_causal: bool) -> bool:
    """Whether `attn_mask` is added to scores: a float tensor with a gradient, or with values other than 0 and -inf.

    Values are read only on the CPU. Elsewhere every float tensor is a bias, whose -inf hides as a mask does. With
    `is_causal` it is not read, and a ValueError is raised if it requires a gradient.
    """
    if not isinstance(attn_mask, Tensor) or not attn_mask.is_floating_point():
        return False
    if is_causal:
        if attn_mask.requires_grad:
            was = "requires a gradient, but is not read with is_causal"
            refuse("attn_mask", was, "pass it as bias")
        return False
    if attn_mask.requires_grad or not readable(attn_mask):
        return True
    return not bool(((attn_mask == 0) | (attn_mask == -torch.inf)).all())


def module_bias(
    bias: Tensor | OffsetBias | None,
    attn_mask: Tensor | None,
    query: Tensor,
    sizes: tuple[int, ...],
    *,
    self_attention: bool,
    kept_heads: Tensor | None,
) -> Tensor | OffsetBias | None:
    """The bias of one call of a module, as the operators take it.

    Args:
        bias: broadcastable to `sizes`; or an `OffsetBias`, whose rows in self-attention are the last T keys.
        attn_mask: `[T, S]` or `[B * H, T, S]`, if it is a bias.
        query: the bias must be on its device.
        sizes: (batch dimensions, H, T, S); S includes cached keys.
        self_attention: whether rows and keys belong to one sequence.
        kept_heads: the original numbers of the heads of a pruned layer.

    Raises:
        TypeError, ValueError: an argument is invalid, by name.
    """
    if attn_mask is not None:
        if bias is not None:
            instead = "pass their sum as bias, or a bool attn_mask, True = hidden"
            refuse("attn_mask", "is a float tensor, and bias is given too", instead)
        return _of_mask(attn_mask, query, sizes)
    if bias is None:
        return None
    H, T, S = sizes[-3:]
    if isinstance(bias, OffsetBias):
        _check_heads(bias.heads, H, kept_heads)
        if not self_attention or T == S:
            return bias
        if bias.start:
            was = f"starts at row {bias.start}, but with this cache rows start at {S - T}"
            refuse("bias", was, "pass the bias without starting_at")
        return bias.starting_at(S - T)
    check_companion("bias", bias, query)
    _check_heads(bias.shape[-3] if bias.dim() > 2 else 1, H, kept_heads)
    check_bias_shape(bias, sizes)
    return bias


def _of_mask(attn_mask: Tensor, query: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """A float `attn_mask` with the dimensions of a bias."""
    *batch, H, T, S = sizes
    if attn_mask.dim() not in (2, 3):
        refuse("attn_mask", f"has shape {list(attn_mask.shape)}", f"pass {PAIRS}")
    check_companion("attn_mask", attn_mask, query)
    check_pairs(attn_mask, (math.prod(batch), H, T, S))
    return attn_mask if attn_mask.dim() == 2 else attn_mask.view(sizes)


def _check_heads(heads: int, H: int, kept_heads: Tensor | None) -> None:
    if heads in (1, H):
        return
    instead = f"pass {H} heads, as the layer has, or 1"
    if kept_heads is not None:
        instead += f"; the pruned layer kept the original heads {kept_heads.tolist()}"
    refuse("bias", f"has {heads} heads", instead)
