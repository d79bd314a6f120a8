"""Rows whose gate per token is exactly 0: tiles of them are skipped on the CPU, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from tests.ops.calls import DIFFERENTIABLE, call, tensors
from tests.support.alike import assert_alike

B, H, T, S = 2, 4, 200, 150
#: The backends that skip them, and the formula; those that compute them have the named cases.
SKIPPING = [row for row in DIFFERENTIABLE if row[1] in ("cpu", "eager")]
OPEN = 70  # rows 70 to 199 are closed: the tiles from row 128 on as a whole


def gates(dtype: torch.dtype = torch.float32) -> Tensor:
    gate = 0.5 + torch.rand(B, H, T, dtype=dtype)
    gate[:, 0::2, OPEN:] = 0.0
    gate[1, 1, :64] = 0.0
    return gate


def both(operator: str, backend: str, gate: Tensor, **given: Any) -> dict[str, Tensor]:
    """The output and the gradients, those of a gate among them if it requires one."""
    torch.manual_seed(0)
    arguments = tensors(operator, B=B, H=H, T=T, S=S, dtype=torch.float32)
    leaves = {name: each.requires_grad_() for name, each in arguments.items()}
    if gate.requires_grad:
        leaves["gate"] = gate
    out = call(operator, backend, **(arguments | {"gate": gate}), **given)
    grads = torch.autograd.grad(out, list(leaves.values()), torch.randn_like(out))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize("closed_grad", [True, False])
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize(("operator", "backend"), SKIPPING)
def test_they_are_factors_of_0(
    operator: str, backend: str, learned: bool, closed_grad: bool
) -> None:
    gate = gates().requires_grad_(learned)
    found = both(operator, backend, gate, closed_grad=closed_grad)
    expected = both(operator, "eager", gate, closed_grad=closed_grad)
    assert_alike(found, expected)
    assert (found["out"][gate == 0] == 0).all()


@pytest.mark.parametrize("backend", ["cpu"])
@pytest.mark.parametrize("operator", ["gated_attention", "collaborative_attention"])
def test_closed_tiles_are_not_computed(operator: str, backend: str) -> None:
    """NaN in their queries, and in the gradient of their outputs, reaches nothing."""
    arguments = tensors(operator, B=B, H=H, T=T, S=S, dtype=torch.float32)
    gate = gates()
    gate[:, :, 128:] = 0.0
    clean = [each.clone().requires_grad_() for each in arguments.values()]
    arguments["query"][..., 128:, :] = float("nan")
    dirty = [each.clone().requires_grad_() for each in arguments.values()]
    dout = None
    results = []
    for leaves in (clean, dirty):
        named = dict(zip(arguments, leaves, strict=True))
        out = call(operator, backend, **named, gate=gate, closed_grad=False)
        dout = torch.randn_like(out) if dout is None else dout.clone()
        if leaves is dirty:
            dout[:, :, 128:] = float("nan")
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_without_gradients_too() -> None:
    query, key, value = (torch.randn(1, 2, 130, 16) for _ in range(3))
    gate = torch.ones(1, 2, 130)
    gate[:, :, 64:] = 0.0
    query[:, :, 128:] = float("nan")
    out = hk.gated_attention(query, key, value, gate=gate, backend="cpu")
    assert (out[:, :, 64:] == 0).all()
    assert out[:, :, :64].isfinite().all()
