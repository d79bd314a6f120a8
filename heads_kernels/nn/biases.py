"""What the attention modules add to their scores: a bias, or a float mask of `torch.nn.MultiheadAttention`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from heads_kernels.batch import check_bias_shape
from heads_kernels.checks import check_companion
from heads_kernels.errors import refuse
from heads_kernels.mask.terms import readable
from heads_kernels.nn.masks import PAIRS, check_pairs
from heads_kernels.offset_bias import OffsetBias


def is_bias(attn_mask: object, is_causal: bool) -> bool:
    """Whether `attn_mask` is added to scores: a float tensor with a gradient, or with values other than 0 and -inf.

    Values are read on the CPU only. Elsewhere every float tensor is a bias, whose -inf hides as a mask does. With
    `is_causal` nothing of it is read: ValueError if it has a gradient.
    """
    if not isinstance(attn_mask, Tensor) or not attn_mask.is_floating_point():
        return False
    if is_causal:
        if attn_mask.requires_grad:
            refuse(
                "attn_mask",
                "requires a gradient, but is not read with is_causal",
                "pass it as bias",
            )
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
        attn_mask: `[T, S]` or `[B * H, T, S]`, to be added where it is no mask.
        query: the bias has to be on its device.
        sizes: (batch dimensions, H, T, S), the keys of a cache counted in S.
        self_attention: rows and keys are of one sequence.
        kept_heads: of a pruned layer, the numbers that its heads had before.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if attn_mask is not None:
        if bias is not None:
            instead = "add them, or pass the part that hides as a bool mask, True = hidden"
            refuse("attn_mask", "is a float tensor beside bias", instead)
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
            refuse("bias", was, "pass it as it was before starting_at")
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
    instead = f"pass {H}, as the layer has, or 1"
    if kept_heads is not None:
        instead += f"; of the heads before pruning it has {kept_heads.tolist()}"
    refuse("bias", f"has {heads} heads", instead)
