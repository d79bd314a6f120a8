"""Calls of the operators with something wrong, and what they have to raise."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
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


def refused(operator: str, kind: type[Exception], message: str, **bad: Any) -> None:
    """The call raises `kind` with a text that starts with `message`, and so does `explain`."""
    arguments = {**good(operator), **bad}
    run = getattr(hk, operator)
    with pytest.raises(kind, match="^" + re.escape(message)):
        run(**arguments)
    with pytest.raises(kind, match="^" + re.escape(message)):
        hk.explain(run, **arguments)
