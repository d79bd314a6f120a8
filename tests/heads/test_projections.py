"""Surgery on projections that are more than a weight and a bias is refused by name."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.convert import collaborate
from heads_kernels.heads import attention_layers, projected_layers
from tests.support.alike import assert_alike
from tests.support.model_state import state
from tests.support.tiny_models import build, outputs


class Lora(nn.Module):
    """As peft's layers are made: the projection, and something beside it."""

    def __init__(self, base_layer: Any) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        self.lora = nn.Linear(self.in_features, self.out_features)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora(x)


def packed(linear: nn.Linear) -> nn.Linear:
    """A weight of 4 bits, two to a byte, in a column, as bitsandbytes has it."""
    bytes_ = torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8)
    linear.weight = nn.Parameter(bytes_, requires_grad=False)
    return linear


class Slow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def slow(linear: nn.Linear) -> nn.Linear:
    linear.__class__ = Slow
    return linear


def hooked(linear: nn.Linear) -> nn.Linear:
    linear.register_forward_hook(lambda module, inputs, out: out * 2)
    return linear


def patched(linear: nn.Linear) -> nn.Linear:
    linear.forward = lambda x: x  # type: ignore[method-assign]
    return linear


def offloaded(linear: Any) -> Any:
    """As accelerate does: a hook with the weights, and a forward that asks it for them."""
    linear._hf_hook = types.SimpleNamespace(offload=True)
    return patched(linear)


def masked(linear: nn.Linear) -> nn.Linear:
    linear.register_buffer("weight_mask", torch.ones_like(linear.weight))
    return linear


REFUSED = {
    Lora: r"has an adapter, .*Lora; merge .*merge_and_unload",
    packed: r"has a Parameter of dtype torch.uint8 as its weight; {} the model before it is quantised",
    slow: r"is a .*Slow; {} a model of nn\.Linear or Conv1D, before it is quantised or wrapped",
    hooked: r"has forward hooks; remove them first",
    patched: r"has a replaced forward; restore its forward",
    offloaded: r"is offloaded; load the model whole",
    masked: r"has weight_mask beside its weight; fold them into the weight",
    nn.utils.parametrizations.spectral_norm: r"is parametrised; .*remove_parametrizations",
}


@pytest.mark.parametrize("wrap", REFUSED)
def test_what_no_surgery_serves(wrap: Any) -> None:
    message = r"layer 0 .*: its key projection " + REFUSED[wrap]
    model = hk.integrations.transformers.use(build("bert"))
    for layer in model.encoder.layer:
        layer.attention.self.key = wrap(layer.attention.self.key)
    before = state(model)
    with pytest.raises(ValueError, match=message.format("prune")):
        hk.heads.prune(model, {1: [0], 0: [1]})
    with pytest.raises(ValueError, match=message.format("convert")):
        collaborate(model, 8)
    assert state(model) == before


def test_quantised_models() -> None:
    model = hk.integrations.transformers.use(build("bert"))
    hk.heads.close(model, {0: [1]})
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})
    closed_before = outputs(quantised)
    hk.heads.reopen(quantised)
    hk.heads.close(quantised, {0: [1]})  # or afterwards
    assert_alike(outputs(quantised), closed_before)
    hk.heads.reopen(quantised)
    message = r"projection 'query' passes no gradient .*quantised: Linear\); train gates before"
    with pytest.raises(ValueError, match=message):
        hk.heads.gate(quantised, hk.nn.HardConcrete)
    with pytest.raises(ValueError, match=r"query projection is a .*quantized"):
        hk.heads.prune(quantised, {0: [1]})
    assert not any(layer.gate for layer in attention_layers(quantised))


def test_adapters_on_converted_layers() -> None:
    """Parts of a projection are run, not read."""
    model = hk.integrations.transformers.use(build("bert"))
    collaborate(model, [20, 20], progress=False)
    without = outputs(model)
    for layer in projected_layers(model):
        layer.key.linear.content = Lora(layer.key.linear.content)
    out = outputs(model)
    assert not torch.allclose(out, without)
    out.sum().backward()
    for layer in projected_layers(model):
        assert layer.key.linear.content.lora.weight.grad.any()


def test_replaced_modules_may_not_have_hooks() -> None:
    model = nn.Sequential(hk.nn.GatedMultiheadAttention(8, 2))
    handle = model[0].register_forward_hook(lambda *call: None)
    with pytest.raises(ValueError, match=r"layer 0 .*has forward hooks, which would be lost"):
        collaborate(model, 4)
    handle.remove()
    collaborate(model, 4, progress=False)
