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
