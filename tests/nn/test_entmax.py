"""Layers with entmax in the place of softmax (`entmax=True`); test_attention.py has the formula."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import heads_kernels as hk
from heads_kernels.nn import GatedMultiheadAttention
from tests.support.alike import assert_alike
from tests.support.nn_layers import B, E, H
from tests.support.refusals import assert_refused

T = 9


def layer_of(*logits: float, dtype: torch.dtype = torch.float32) -> GatedMultiheadAttention:
    """Of sharp attention, with these `alpha_logits`."""
    made = GatedMultiheadAttention(E, H, entmax=True, dtype=dtype)
    assert made.alpha_logits is not None
    with torch.no_grad():
        made.alpha_logits.copy_(torch.tensor(logits))
        made.q_proj.weight.mul_(4)
    return made


def test_alpha_is_learned() -> None:
    made = GatedMultiheadAttention(E, H, entmax=True)
    assert torch.equal(made.alpha, torch.full((H,), 1.5))  # type: ignore[arg-type]
    made(torch.randn(B, T, E))[0].square().sum().backward()
    assert made.alpha_logits is not None
    assert made.alpha_logits.grad is not None
    assert made.alpha_logits.grad.all()
    assert "entmax=True" in repr(made)
    assert GatedMultiheadAttention(E, H).alpha is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_alpha_stays_where_entmax_is_defined(dtype: torch.dtype) -> None:
    made = layer_of(-1000.0, -30.0, 30.0, 1000.0, dtype=dtype)
    assert made.alpha is not None
    assert ((made.alpha > 1) & (made.alpha <= 2)).all()
    assert made(torch.randn(B, T, E, dtype=dtype))[0].isfinite().all()


def test_support_sizes_and_probabilities() -> None:
    torch.manual_seed(0)
    made, calls = nn.Sequential(layer_of(-2.0, 0.0, 1.0, 3.0)), list[Any]()
    with hk.analysis.observe(made, lambda layer, call: calls.append(call)):
        made[0](torch.randn(B, T, E), is_causal=True)
    (call,) = calls
    every_key = torch.eye(T).expand(B, H, T, T)
    options = {"alpha": call.alpha, "scale": call.scale, "is_causal": True}
    p = hk.entmax_attention(call.query, call.key, every_key, **options)
    assert_alike(call.probabilities(slice(0, T)), p)
    assert torch.equal(call.support_sizes(), (call.probabilities(slice(0, T)) > 0).sum(-1))
    assert (call.support_sizes()[:, -1] < call.support_sizes()[:, 0]).any()  # alpha 1.95 and 1.1
    assert_refused((call.statistics, "statistics is that of softmax"))


def test_what_is_of_softmax_is_refused() -> None:
    model, x = nn.Sequential(layer_of(0.0, 0.0, 0.0, 0.0)), torch.randn(B, T, E)
    mesh: Any = SimpleNamespace(size=lambda: 2)
    plan = hk.integrations.distributed.tensor_parallel_plan
    assert_refused(
        (lambda: hk.convert.collaborate(model, 8, progress=False), "has entmax, which collabor"),
        (lambda: plan(model, mesh), "has entmax, .* no DTensors"),
        (lambda: hk.analysis.relevance(model, [x]), "has entmax|of softmax"),
        unchanged=[model],
    )
    model[0].context = object()
    assert_refused((lambda: model[0](x), "context is set, but entmax"))
