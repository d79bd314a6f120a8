"""Calls of the operators with something wrong, and what they have to raise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.ops.calls import tensors

B, H, Hk, T, S, D, Dv = 2, 4, 2, 5, 7, 8, 6
GATED, COLLABORATIVE = "gated_attention", "collaborative_attention"
BOTH = (GATED, COLLABORATIVE)
Bad = dict[str, Any]


def f32(*shape: int) -> Tensor:
    return torch.zeros(shape)


def good(operator: str) -> dict[str, Any]:
    """Arguments that are served, made anew."""
    return dict(tensors(operator, dtype=torch.float32))
