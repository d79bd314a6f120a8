"""Tensors of masks, and one mask with every kind of term."""

from __future__ import annotations

import torch
from torch import Tensor

from heads_kernels.mask import Mask


def longs(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def all_real(*shape: int, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=torch.bool, device=device)


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
