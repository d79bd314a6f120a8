"""Surgery on projections that are more than a weight and a bias: served where they are LoRA, else refused by name."""

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

PARTS = ("query", "key", "value", "dense")


class Lora(nn.Module):
    """As peft's LoRA layers are made: the projection and, by name of the adapter, two factors beside it."""

    def __init__(self, base_layer: Any, rank: int = 3) -> None:
        super().__init__()
        self.base_layer = base_layer
        is_linear = isinstance(base_layer, nn.Linear)
        self.in_features = base_layer.in_features if is_linear else base_layer.nx
        self.out_features = base_layer.out_features if is_linear else base_layer.nf
        self.fan_in_fan_out = not is_linear
        inner, outer = nn.Linear(self.in_features, rank, False), nn.Linear(rank, self.out_features)
        self.lora_A = nn.ModuleDict({"default": inner})
        self.lora_B = nn.ModuleDict({"default": outer})

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 0.5 * self.lora_B["default"](self.lora_A["default"](x))


class Dora(Lora):
    def __init__(self, base_layer: Any) -> None:
        super().__init__(base_layer)
        self.lora_magnitude_vector = nn.ParameterDict({"default": torch.ones(self.out_features)})


class Scaled(Lora):
    """Another adapter, such as IA3."""

    def __init__(self, base_layer: Any) -> None:
        super().__init__(base_layer)
        del self.lora_A, self.lora_B
        self.scales = nn.ParameterDict({"default": torch.ones(self.out_features)})


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


def adapted(name: str = "bert", wrap: Any = Lora, parts: tuple[str, ...] = PARTS) -> Any:
    """A model in use whose attention projections of these names are wrapped."""
    model = hk.integrations.transformers.use(build(name))
    torch.manual_seed(3)
    for part in list(model.modules()):
        if "Attention" in type(part).__name__ or type(part).__name__.endswith("SelfOutput"):
            for child, linear in list(part.named_children()):
                if child in parts:
                    setattr(part, child, wrap(linear))
    return model


# ---------------------------------------------------------------------- LoRA
CASES = {
    "bert": PARTS,
    "gpt2": ("c_attn", "c_proj"),
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "t5": ("q", "v"),
}


@pytest.mark.parametrize("name", CASES)
def test_lora_is_pruned_with_its_projections(name: str) -> None:
    model = adapted(name, parts=CASES[name])
    assert any(isinstance(part, Lora) for part in model.modules())
    layers = projected_layers(model)
    heads = {0: [1], layers[-1].index: list(range(layers[-1].num_heads))}
    hk.heads.close(model, heads)
    expected = outputs(model)
    hk.heads.prune(model, hk.heads.closed(model))
    assert_alike(outputs(model), expected)
    for part in model.modules():
        if isinstance(part, Lora):
            first, second = part.lora_A["default"], part.lora_B["default"]
            assert (first.in_features, second.out_features) == (part.in_features, part.out_features)
            assert first.weight.shape[1] == part.in_features
            assert second.weight.shape[0] == part.out_features
    outputs(model).sum().backward()


def test_pruned_lora_is_saved_and_loaded(tmp_path: Any) -> None:
    """Gates are folded into projections and adapters."""
    model, other = adapted(), adapted()
    hk.heads.gate(model, lambda heads: hk.nn.FixedGate(torch.linspace(0.0, 2.0, heads)))
    expected = outputs(model)
    hk.heads.prune(model, hk.heads.closed(model))
    assert_alike(outputs(model), expected)
    hk.heads.save(model, tmp_path / "model.safetensors")
    hk.heads.load(other, tmp_path / "model.safetensors")
    assert_alike(outputs(other), outputs(model))


def test_conversion_wants_adapters_of_scores_merged() -> None:
    for part in ("query", "key"):
        model = adapted(parts=(part,))
        before = state(model)
        message = rf"layer 0 .*: its {part} projection has an adapter, .*Lora; merge .*merge_and_u"
        with pytest.raises(ValueError, match=message):
            collaborate(model, 1000)
        assert state(model) == before
    model = adapted(parts=("value", "dense"))
    expected = outputs(model)
    assert all(collaborate(model, 32, progress=False).exact)
    assert_alike(outputs(model), expected)


# ---------------------------------------------------------------------- what is refused
REFUSED = {
    Dora: r"has an adapter, .*Dora with lora_magnitude_vector; merge .*merge_and_unload",
    Scaled: r"has an adapter, .*Scaled; merge .*merge_and_unload",
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
    model = adapted(wrap=wrap, parts=("key",))
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


# ---------------------------------------------------------------------- converted layers
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_adapters_on_converted_layers(name: str) -> None:
    """Parts of a projection are run, not read: adapters there learn, and are pruned with their heads."""
    model = adapted(name, parts=())
    collaborate(model, [20, 20], progress=False)
    shared = [
        part for part in model.modules() if isinstance(part, hk.heads.shared.SharedProjection)
    ]
    assert len(shared) == 4
    for part in shared:
        assert part(torch.randn(2, part.in_features)).shape == (2, part.out_features)
    without = outputs(model)
    for layer in projected_layers(model):
        layer.key.linear.content = Lora(layer.key.linear.content)
        if name == "gpt2":
            layer.module.c_attn.value = Lora(layer.module.c_attn.value)
    expected = outputs(model)
    assert not torch.allclose(expected, without)
    expected.sum().backward()
    adapters = [part for part in model.modules() if isinstance(part, Lora)]
    assert len(adapters) == {"bert": 2, "gpt2": 4}[name]
    for part in adapters:
        assert part.lora_B["default"].weight.grad.any()
    hk.heads.close(model, {0: [1, 3]})
    expected = outputs(model)
    hk.heads.prune(model, hk.heads.closed(model))
    assert_alike(outputs(model), expected)


def test_replaced_modules_may_not_have_hooks() -> None:
    model = nn.Sequential(hk.nn.GatedMultiheadAttention(8, 2))
    handle = model[0].register_forward_hook(lambda *call: None)
    with pytest.raises(ValueError, match=r"layer 0 .*has forward hooks, which would be lost"):
        collaborate(model, 4)
    handle.remove()
    collaborate(model, 4, progress=False)
