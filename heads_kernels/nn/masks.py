"""What the attention modules let a row see: the masks of `torch.nn.MultiheadAttention` as one `hk.Mask`."""

from __future__ import annotations

import torch
from torch import Tensor

from heads_kernels.errors import refuse
from heads_kernels.mask import Mask
from heads_kernels.mask.terms import Causal, Dense, KeyMask, QueryMask, Term, readable

PAIRS = "[T, S] or [B * H, T, S]"


def module_mask(
    sizes: tuple[int, int, int, int],
    *,
    mask: Mask | None = None,
    key_padding_mask: Tensor | None = None,
    query_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    self_attention: bool = False,
    hides_rows: bool = True,
) -> Mask:
    """All that hides keys in one call of a module, as one mask.

    Args:
        sizes: (B, H, T, S), the keys of a cache counted in S.
        mask: a native mask; the others hide more.
        key_padding_mask: `[B or 1, S]`; bool with True = hidden, or floating with 0 = visible and -inf = hidden. In
            self-attention the rows are the last T keys, and a hidden key is a row that sees nothing.
        query_padding_mask: `[B or 1, T]`, the same for rows.
        attn_mask: `[T, S]` or `[B * H, T, S]`, the same for pairs, unless it is a bias (`biases`). Not read where
            `is_causal`.
        is_causal: row i sees keys up to its own position; in self-attention the last row stands beside the last key
            (a cache holds what came before), else the first row beside the first key.
        self_attention: rows and keys are of one sequence.
        hides_rows: whether `key_padding_mask` hides rows in self-attention.

    Raises:
        TypeError, ValueError: naming the argument. Floats other than 0 and -inf are found on the CPU only; elsewhere
            whatever is not 0 is hidden.
    """
    if mask is not None and not isinstance(mask, Mask):
        instead = "pass a hk.Mask; tensors go to key_padding_mask or attn_mask, True = hidden"
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
    if query_padding_mask is not None:
        real = _visible("query_padding_mask", query_padding_mask, "[B, T]", (2,))
        terms += (QueryMask(real, "query_padding_mask"),)
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
