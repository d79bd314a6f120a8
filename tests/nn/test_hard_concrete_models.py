"""Hard Concrete gates in a model: penalties, compilation, checkpointing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import heads_kernels as hk
from tests.support.alike import assert_alike


# ---------------------------------------------------------------------- in a model
class Gated(nn.Module):
    """Some layers with gates of four heads; the last one's are the first one's too."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(hk.nn.HardConcrete(4) for _ in range(layers))
        self.shared = self.layers[0] if layers else None


def test_penalty_of_a_model() -> None:
    model = Gated(3)
    one = 4 / (1 + math.exp(-(2 + 0.33 * math.log(11))))
    assert hk.nn.l0_penalty(model).item() == pytest.approx(3 * one)
    assert hk.nn.l0_penalty(model, reduce="mean_layers").item() == pytest.approx(one)
    assert hk.nn.expected_open(model).item() == pytest.approx(3 * one)
    assert not hk.nn.expected_open(model).requires_grad
    hk.nn.l0_penalty(model).backward()
    assert all((gate.log_alpha.grad > 0).all() for gate in model.layers)


def test_bad_models() -> None:
    for function in (hk.nn.l0_penalty, hk.nn.expected_open):
        with pytest.raises(ValueError, match=r"model is a Gated without HardConcrete.*heads\.gate"):
            function(Gated(0))
    with pytest.raises(ValueError, match="reduce is 'mean'; use one of 'sum', 'mean_layers'"):
        hk.nn.l0_penalty(Gated(1), reduce="mean")


class Layer(nn.Module):
    """The smallest attention with a gate."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.head_gate = hk.nn.HardConcrete(4, openness=0.5, **options)
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        query, key, value = self.project(x).view(B, T, 3, 4, 8).permute(2, 0, 3, 1, 4)
        gate = self.head_gate(B, T)
        out = hk.gated_attention(
            query, key, value, gate=gate, closed_grad=self.head_gate.closed_grad
        )
        return out.transpose(1, 2).reshape(B, T, 32)


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore:The rules of HardConcrete disagree")
def test_fullgraph_compile(per_sample: bool, training: bool) -> None:
    layer = Layer(per_sample=per_sample).train(training)
    x = torch.randn(3, 5, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for call in (layer, compiled):
        torch.manual_seed(4)
        layer.zero_grad()
        out = call(x)
        (out.square().mean() + hk.nn.l0_penalty(layer)).backward()
        results.append((out.detach(), layer.head_gate.log_alpha.grad.clone()))
    assert_alike(results[0], results[1])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_replays_the_gates(use_reentrant: bool) -> None:
    layer = Layer(per_sample=True)
    x = torch.randn(3, 5, 32, requires_grad=True)
    results = []
    for again in (False, True):
        torch.manual_seed(4)
        layer.zero_grad()
        out = checkpoint(layer, x, use_reentrant=use_reentrant) if again else layer(x)
        torch.rand(7)  # something else draws before the backward pass
        out.square().mean().backward()
        results.append(layer.head_gate.log_alpha.grad.clone())
    assert results[0].abs().max() > 0
    assert torch.equal(results[0], results[1])


def test_sampled_closed_heads_get_the_gradients_of_the_full_backward_pass() -> None:
    """Leaving closed heads out of the backward pass changes nothing: the clamp has no slope."""
    layer = Layer()
    x = torch.randn(3, 5, 32)
    results = []
    for closed_grad in (False, True):
        layer.head_gate.closed_grad = closed_grad
        torch.manual_seed(6)
        layer.zero_grad()
        layer(x).square().mean().backward()
        results.append([p.grad.clone() for p in layer.parameters()])
    assert_alike(results[0], results[1])
