"""Importance of heads in modules of the package, and in a plain PyTorch model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from tests.analysis.importance_formulas import (
    REDUCED,
    pair,
)
from tests.support.alike import assert_alike
from tests.support.nn_layers import formula, layer_of

importance = hk.analysis.importance


# ---------------------------------------------------------------------- modules of the package
class Encoder(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, key_padding_mask=hidden)[0]
        return x.masked_fill(hidden[..., None], 0)


X = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(0)).double()
HIDDEN = torch.tensor([[False] * 7, [True] * 2 + [False] * 5])


def of_encoder(model: Any, data: tuple[Tensor, Tensor]) -> Tensor:
    return model(*data).square().sum((1, 2))


def test_a_module_by_its_formula_beside_learned_gates() -> None:
    layer = layer_of(dropout=0.5)
    gate = hk.nn.HardConcrete(4, stretch=(-0.1, 1.1))
    gate.log_alpha.data = torch.tensor([-3.0, -1.0, 0.5, 4.0]).double()  # closed, two between, open
    layer.head_gate = gate
    model = Encoder(layer).train()
    with pytest.warns(UserWarning, match="disagree"):
        gates = gate.export()
    assert gates[0] == 0
    ones = torch.ones(2, 4, 7, dtype=torch.float64, requires_grad=True)
    visible = ~(HIDDEN[:, None, :, None] | HIDDEN[:, None, None, :])
    heads = formula(layer, X, X, visible.expand(2, 4, 7, 7), (ones * gates[:, None])[..., None])
    out = (X + heads).masked_fill(HIDDEN[..., None], 0).square().sum((1, 2))
    terms = torch.autograd.grad(out.sum(), ones)[0] * ~HIDDEN[:, None]
    for reduce, reduced in REDUCED.items():
        found = importance(model, [(X, HIDDEN)], of_encoder, reduce=reduce)
        assert_alike(found.scores[0], reduced(terms).detach())
        assert found.scores[0][0] == 0
        assert (found.scores[0][1:] > 0).all()
    left_out = importance(model, [(X, HIDDEN)], of_encoder, method="leave_one_out").scores[0]
    assert left_out[0] == 0
    for head in (1, 2, 3):
        some = gates.clone()
        some[head] = 0
        heads = formula(layer, X, X, visible.expand(2, 4, 7, 7), some[:, None, None])
        without = (X + heads).masked_fill(HIDDEN[..., None], 0).square().sum((1, 2))
        assert_alike(left_out[head], (without - out).mean().detach())
    assert layer.head_gate is gate


def test_one_head_is_left_out_beside_gates_that_depend_on_the_example() -> None:
    class ByExample(hk.nn.HeadGate):
        num_heads = 4

        def forward(self, batch_size: int, length: int) -> Tensor:
            return torch.arange(1.0, 1 + batch_size * 4).view(batch_size, 4).double() / 4

        def export(self) -> Tensor:
            return torch.ones(4).double()

        def keep(self, heads: Any) -> None:
            raise AssertionError

    layer = layer_of()
    layer.head_gate = ByExample()
    gates = layer.head_gate(2, 7)
    visible = ~(HIDDEN[:, None, :, None] | HIDDEN[:, None, None, :]).expand(2, 4, 7, 7)

    def expected(gates: Tensor) -> Tensor:
        heads = formula(layer, X, X, visible, gates[:, :, None, None])
        return (X + heads).masked_fill(HIDDEN[..., None], 0).square().sum((1, 2)).mean().detach()

    model = Encoder(layer)
    found = importance(model, [(X, HIDDEN)], of_encoder, method="leave_one_out").scores[0]
    for head in range(4):
        without = gates.clone()
        without[:, head] = 0
        assert_alike(found[head], expected(without) - expected(gates))
    assert not layer.head_gate._forward_hooks


def test_padding_alone_has_no_confidence() -> None:
    _, ours, arguments = pair("bert")
    arguments["attention_mask"].zero_()
    with pytest.raises(ValueError, match=r"data has no token that reaches a head"):
        importance(ours, [arguments], method="confidence")


def test_weights_of_inference_mode_have_no_gradients() -> None:
    with torch.inference_mode():
        layer = hk.nn.GatedMultiheadAttention(8, 2)
    data = [torch.randn(2, 3, 8)]

    def loss(model: Any, batch: Tensor) -> Tensor:
        return model(batch)[0].square().sum((1, 2))

    for method in ("gradient", "fisher"):
        with pytest.raises(ValueError, match=r"model has weights of inference mode"):
            importance(layer, data, loss, method=method)
    assert importance(layer, data, loss, method="leave_one_out").scores[0].any()


def test_collaborative_heads_score_too() -> None:
    layer = hk.nn.CollaborativeMultiheadAttention(24, 4, shared_dim=8, dtype=torch.float64)
    model = Encoder(layer)
    found = importance(model, [(X, HIDDEN)], of_encoder).scores[0]
    step = 1e-6
    for head in range(4):
        values = []
        for change in (-step, step):
            gates = torch.ones(4, dtype=torch.float64)
            gates[head] += change
            layer.head_gate = hk.nn.FixedGate(gates)
            values.append(of_encoder(model, (X, HIDDEN)))
        layer.head_gate = None
        slope = (values[1] - values[0]) / (2 * step)
        assert_alike(found[head], slope.abs().mean().detach(), dtype=torch.float32)


def test_a_head_that_another_one_repeats_is_not_missed() -> None:
    """Two heads do the same and one of them would do; by itself either is needed."""
    layer = layer_of(bias=False)
    features = {head: slice(6 * head, 6 * head + 6) for head in range(4)}
    layer.out_proj.weight.data.zero_()
    for head, out in ((0, 0), (2, 1)):
        layer.out_proj.weight.data[out, features[head]] = 1.0

    class Enough(nn.Module):
        """Whether the first two outputs are what they are in the whole model with one head each, or more."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = layer
            with torch.no_grad():
                self.aim = layer(X)[0][..., :2]

        def forward(self, x: Tensor) -> Tensor:
            ratio = self.layer(x)[0][..., :2] / self.aim
            return (1 - ratio.clamp(0, 1)).sum((1, 2))

    model = Enough()
    alone = importance(model, [X], lambda model, x: model(x), method="leave_one_out").scores[0]
    for weight in (layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight):
        weight.data[features[1]] = weight.data[features[0]]
    layer.out_proj.weight.data[0, features[1]] = 1.0
    twice = importance(model, [X], lambda model, x: model(x), method="leave_one_out").scores[0]
    assert_alike(alone, torch.tensor([7.0, 0.0, 7.0, 0.0]).double())
    assert_alike(twice, torch.tensor([0.0, 0.0, 7.0, 0.0]).double())
