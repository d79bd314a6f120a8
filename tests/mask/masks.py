"""Tensors of masks, and masks in a call of fixed sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads_kernels.mask import Intervals, Mask, as_mask

B, H, T, S = 2, 3, 4, 5


def longs(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def all_real(*shape: int, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=torch.bool, device=device)


def in_a_call(mask: Mask, device: str = "cpu") -> Intervals:
    return mask.intervals(B, H, T, S, device)


def from_tensor(mask: Any) -> Mask:
    return as_mask(mask, (B, H, T, S))


def every_kind() -> Mask:
    """One mask with a term of every kind that a kernel serves, for B 2, T = S = 5."""
    return Mask(
        causal="lower_right",
        window=(3, 0),
        key_lengths=longs(4, 5),
        query_lengths=[5, 3],
        key_mask=torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 1, 1]]).bool(),
        query_mask=torch.tensor([[1, 1, 1, 1, 0]]).bool(),
        document_ids=longs(0, 0, 0, 1, 1),
    ) & Mask(causal=True, prefix_lengths=longs(2, 3))
