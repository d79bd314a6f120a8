"""How tests call an operator on each backend, skipping those that cannot serve it.

Tensors are made on PyTorch's default device, which `pytest --device` sets.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.backends import BACKENDS
from heads_kernels.call import Call
from heads_kernels.dispatch import choose
from heads_kernels.parse import parse
from heads_kernels.testing import Case, Inputs
from tests.support.alike import assert_alike

#: The operators with softmax, by name; tests/ops/test_entmax.py has what is particular to entmax.
OPERATORS = ("gated_attention", "collaborative_attention")

NAMES = [row.name for row in BACKENDS]

#: Every (operator, backend) of them: their results have a gradient.
DIFFERENTIABLE = [(operator, name) for operator in OPERATORS for name in NAMES]

#: The same and statistics of rows.
EVERY = [*DIFFERENTIABLE, *(("attention_statistics", name) for name in NAMES)]


def parsed(operator: str, *arguments: Any, **options: Any) -> Call:
    """The call of these arguments."""
    return parse(operator, *arguments, **options)[0]


def inputs_of(case: Case, backend: str, dtype: torch.dtype = torch.float32) -> Inputs:
    """The tensors of a case; skips the test where `backend` cannot serve it."""
    inputs = case.make(dtype)
    choice = choose(inputs.parsed(), backend)
    if choice.backend is None:
        pytest.skip(str(choice))
    return inputs


def serve(operator: str, backend: str, /, **arguments: Any) -> None:
    """Skip the test, with the reasons, where `backend` cannot serve this call."""
    choice = hk.explain(operator, backend=backend, **arguments)
    if choice.backend is None:
        pytest.skip(str(choice))


def call(operator: str, backend: str, /, **arguments: Any) -> Any:
    """The operator on `backend`; skips the test where it cannot serve the call."""
    serve(operator, backend, **arguments)
    return getattr(hk, operator)(backend=backend, **arguments)


def assert_same_bits(backend: str, found: Any, expected: Any) -> None:
    """Tensors, or dicts and sequences of them, that a fused kernel has computed in one order of sums.

    `eager` computes with a BLAS library, which promises no order.
    """
    if backend == "eager":
        assert_alike(found, expected)
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
    else:
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(backend, one, other)


def tensors(
    operator: str,
    *,
    B: int = 2,
    H: int = 4,
    Hk: int = 2,
    Hv: int | None = None,
    T: int = 5,
    S: int = 7,
    D: int = 8,
    Dv: int = 6,
    dtype: torch.dtype = torch.float64,
    grad: bool = False,
) -> dict[str, Tensor]:
    """Random tensor arguments of `operator` by name, without a gate; `Hv` is H by default."""
    if operator in ("gated_attention", "entmax_attention"):
        shapes = {"query": (B, H, T, D), "key": (B, Hk, S, D), "value": (B, Hk, S, Dv)}
    elif operator == "collaborative_attention":
        shapes = {
            "query": (B, T, D),
            "key": (B, S, D),
            "value": (B, H if Hv is None else Hv, S, Dv),
            "mixing": (H, D),
            "content_bias": (B, H, S),
        }
    else:
        shapes = {"query": (B, H, T, D), "key": (B, Hk, S, D)}
    return {name: torch.randn(s, dtype=dtype).requires_grad_(grad) for name, s in shapes.items()}


def good(operator: str) -> dict[str, Any]:
    """Small arguments that are served, made anew."""
    return dict(tensors(operator, dtype=torch.float32))
