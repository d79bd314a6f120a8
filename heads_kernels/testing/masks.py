"""Mask builders for the cases: each makes the `attn_mask` of a call from its sizes and device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from heads_kernels.mask import Mask


class Sizes(NamedTuple):
    """Sizes of a call."""

    B: int
    H: int
    T: int
    S: int


MaskBuilder = Callable[[Sizes, torch.device], "Mask | Tensor"]


def fixed(mask: Mask) -> MaskBuilder:
    """A mask that holds no tensors."""
    return lambda sizes, device: mask


causal: MaskBuilder = fixed(Mask(causal=True))
lower_right: MaskBuilder = fixed(Mask(causal="lower_right"))


def padded(*lengths: int, queries: bool = True, causal: bool = False) -> MaskBuilder:
    """Right padding of the keys, and of the query rows if `queries` (self-attention)."""
    return lambda sizes, device: Mask(
        causal=causal,
        key_lengths=torch.tensor(lengths, device=device),
        query_lengths=torch.tensor(lengths, device=device) if queries else None,
    )


def half_padded(sizes: Sizes, device: torch.device) -> Mask:
    """Half of every sequence is padding, rows and keys; the lengths are on the device."""
    keys, rows = (torch.full((sizes.B,), n // 2, device=device) for n in (sizes.S, sizes.T))
    return Mask(key_lengths=keys, query_lengths=rows)


def left_padded(sizes: Sizes, device: torch.device) -> Mask:
    """Batch b begins with 3 b + 2 padded keys (and rows, where T == S), causal: generation."""
    skip = (3 * torch.arange(sizes.B, device=device) + 2)[:, None]
    keys = torch.arange(sizes.S, device=device) >= skip
    return Mask(causal=True, key_mask=keys, query_mask=keys if sizes.T == sizes.S else None)


def holes(sizes: Sizes, device: torch.device) -> Mask:
    """Every third key and fifth row is hidden, shifted by the batch; batch 0 loses 20 keys more."""
    b = torch.arange(sizes.B, device=device)[:, None]
    j = torch.arange(sizes.S, device=device)
    keys = (j + b) % 3 != 0
    keys &= ~((b == 0) & (j >= 8) & (j < 28))
    rows = (torch.arange(sizes.T, device=device) + b) % 5 != 0
    return Mask(key_mask=keys, query_mask=rows)


def window_over_holes(sizes: Sizes, device: torch.device) -> Mask:
    """Each row sees only its own key, and consecutive keys are hidden: whole tiles of rows see no key."""
    j = torch.arange(sizes.S, device=device)[None]
    return Mask(window=(0, 0), key_mask=(j < 9) | (j > 66))


def streaming_over_holes(sizes: Sizes, device: torch.device) -> Mask:
    """Windows and first keys by head, over keys with holes; batch b begins with 3 b + 2 padded ones."""
    heads = torch.arange(sizes.H, device=device)
    sides = torch.stack((9 * heads - 1, heads * 0), 1)  # the first is unlimited
    b = torch.arange(sizes.B, device=device)[:, None]
    j = torch.arange(sizes.S, device=device)
    keys = ((j + b) % 7 != 0) & (j >= 3 * b + 2)
    first_keys = 7 * heads % 12
    return Mask(causal="lower_right", window=sides, first_keys=first_keys, key_mask=keys)


def by_head(*windows: tuple[int, int], first_keys: Sequence[int] | None = None) -> MaskBuilder:
    """A window for each head, causal with the last row at the last key."""
    return fixed(Mask(causal="lower_right", window=list(windows), first_keys=first_keys))


def packed(*documents: int, causal: bool = False) -> MaskBuilder:
    """Packed documents of these lengths; the rest is padding."""
    borders = [sum(documents[:n]) for n in range(len(documents) + 1)]

    def build(sizes: Sizes, device: torch.device) -> Mask:
        mask = Mask.from_cu_seqlens(torch.tensor(borders, device=device), sizes.S)
        return mask & Mask(causal=causal, query_lengths=[borders[-1]], key_lengths=[borders[-1]])

    return build


def prefix(*lengths: int) -> MaskBuilder:
    """A causal mask whose first `lengths[b]` keys all rows see."""
    return lambda sizes, device: Mask(causal=True, prefix_lengths=torch.tensor(lengths, device=device))


def key_padding_tensor(sizes: Sizes, device: torch.device) -> Tensor:
    """A bool tensor `[B, 1, 1, S]`, as transformers models pass it."""
    lengths = sizes.S - 5 * torch.arange(sizes.B, device=device)[:, None] - 1
    return (torch.arange(sizes.S, device=device) < lengths)[:, None, None]


def dense_rows(sizes: Sizes, device: torch.device) -> Tensor:
    """A dense bool tensor `[T, S]`; row 1 sees no key."""
    i = torch.arange(sizes.T, device=device)[:, None]
    j = torch.arange(sizes.S, device=device)
    return ((i * 7 + j * 5) % 4 != 0) & (i != 1)


def dense_blocks(sizes: Sizes, device: torch.device) -> Tensor:
    """A dense bool tensor `[B, 1, T, S]` of blocks of 50 by 70: hidden, visible, and mixed."""
    b, i, j = torch.meshgrid(
        *(torch.arange(size, device=device) for size in (sizes.B, sizes.T, sizes.S)), indexing="ij"
    )
    block = (i // 50 + j // 70 + b) % 3
    return ((block == 1) | ((block == 2) & ((i + j * 3) % 5 != 0)))[:, None]


def dense_heads(sizes: Sizes, device: torch.device) -> Tensor:
    """A dense bool tensor `[B, H, T, S]`, different for every head."""
    b, h, i, j = torch.meshgrid(*(torch.arange(size, device=device) for size in sizes), indexing="ij")
    return (i * 3 + j * 5 + h * 7 + b * 11) % 4 != 0
