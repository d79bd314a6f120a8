"""Operators as functions of tensors, as PyTorch's checks take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import heads_kernels as hk
from heads_kernels import functional
from heads_kernels.ops.philox import seed_of

B, H, T, S, D, Dv = 2, 4, 5, 7, 8, 6


def function(
    operator: str, backend: str, names: list[str], **options: Any
) -> Callable[..., Tensor]:
    """The operator as a function of the tensors `names`, in their order."""

    def run(*values: Tensor) -> Tensor:
        arguments = with_offsets(dict(zip(names, values, strict=True)))
        out: Tensor = getattr(hk, operator)(**arguments, backend=backend, **options)
        return out

    return run


def with_offsets(arguments: dict[str, Tensor]) -> dict[str, Any]:
    """Arguments of a call: of an `offset_table` an `OffsetBias` is made."""
    given: dict[str, Any] = dict(arguments)
    if "offset_table" in given:
        given["bias"] = hk.OffsetBias(given.pop("offset_table"))
    return given


def fixed_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        functional, "draw_seed", lambda device: seed_of(2**40 + 1, b=1, h=2, i=3, j=4)
    )
