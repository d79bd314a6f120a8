"""Layers with entmax in the place of softmax: `GatedMultiheadAttention(entmax=True)`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.nn import GatedMultiheadAttention
from tests.support.alike import assert_alike
from tests.support.nn_layers import B, E, H

T = 9


def layer(**options: Any) -> GatedMultiheadAttention:
    torch.manual_seed(0)
    made = GatedMultiheadAttention(E, H, entmax=True, **options)
    assert made.alpha_logits is not None
    with torch.no_grad():
        made.alpha_logits.copy_(torch.linspace(-2, 3, H))
        made.q_proj.weight.mul_(4)
    return made


def inputs(length: int = T) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(B, length, E)


def test_is_the_operator() -> None:
    made, x = layer(), inputs()
    query, key, value = (
        projection(x).unflatten(2, (H, E // H)).transpose(1, 2)
        for projection in (made.q_proj, made.k_proj, made.v_proj)
    )
    assert made.alpha is not None
    heads = hk.entmax_attention(query, key, value, alpha=made.alpha, scale=made.scale)
    assert_alike(made(x)[0], made.out_proj(heads.transpose(1, 2).flatten(2)))


def test_alpha_is_learned() -> None:
    made = GatedMultiheadAttention(E, H, entmax=True)
    assert torch.equal(made.alpha, torch.full((H,), 1.5))  # type: ignore[arg-type]
    made(inputs())[0].square().sum().backward()
    assert made.alpha_logits is not None
    assert made.alpha_logits.grad is not None
    assert made.alpha_logits.grad.all()
    assert "entmax=True" in repr(made)
    assert GatedMultiheadAttention(E, H).alpha is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_alpha_stays_where_entmax_is_defined(dtype: torch.dtype) -> None:
    made = layer(dtype=dtype)
    assert made.alpha_logits is not None
    with torch.no_grad():
        made.alpha_logits.copy_(torch.tensor([-1000.0, -30.0, 30.0, 1000.0]))
    assert made.alpha is not None
    assert ((made.alpha > 1) & (made.alpha <= 2)).all()
    assert made(inputs().to(dtype))[0].isfinite().all()


def test_support_sizes_and_probabilities() -> None:
    made, x = nn.Sequential(layer()), inputs()
    with hk.analysis.observe(made, lambda layer, call: calls.append(call)):
        calls: list[Any] = []
        made[0](x, is_causal=True)
    (call,) = calls
    every_key = torch.eye(T).expand(B, H, T, T)
    options = {"alpha": call.alpha, "scale": call.scale, "is_causal": True}
    p = hk.entmax_attention(call.query, call.key, every_key, **options)
    assert_alike(call.probabilities(slice(0, T)), p)
    assert torch.equal(call.support_sizes(), (call.probabilities(slice(0, T)) > 0).sum(-1))
    assert (call.support_sizes()[:, -1] < call.support_sizes()[:, 0]).any()  # alpha 1.95 and 1.1
    with pytest.raises(ValueError, match="statistics is that of softmax"):
        call.statistics()


def test_what_is_of_softmax_is_refused() -> None:
    model, distributed = nn.Sequential(layer()), hk.integrations.distributed
    mesh: Any = SimpleNamespace(size=lambda: 2)
    for call, words in (
        (lambda: hk.convert.collaborate(model, 8, progress=False), "has entmax, which collabor"),
        (lambda: distributed.tensor_parallel_plan(model, mesh), "has entmax, .* no DTensors"),
        (lambda: hk.analysis.relevance(model, [inputs()]), "has entmax|of softmax"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    model[0].context = object()
    with pytest.raises(ValueError, match="context is set, but entmax"):
        model[0](inputs())
