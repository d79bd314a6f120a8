"""Heads for tests of conversion."""

import torch

from heads_kernels.convert import Heads
from tests.support.nn_layers import random

H, D, D_in, D_in_k = 4, 6, 20, 18


def random_heads(H: int = H, D: int = D, D_in: int = D_in, D_in_k: int = D_in_k, bias: bool = True) -> Heads:
    """Heads whose singular values fall, and differ from head to head."""
    by_head = (1 + torch.arange(H))[:, None, None]
    fall = torch.logspace(0, -1, D, dtype=torch.float64)[:, None] / by_head
    query_bias = random(H, D) if bias else None
    return Heads(random(H, D, D_in) * fall, random(H, D, D_in_k), D**-0.5, query_bias)
