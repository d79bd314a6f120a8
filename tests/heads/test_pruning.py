"""Pruned models compute what they computed with those heads closed; what has no heads to prune, or more, is refused.

tests/transformers/test_families.py has every family, tests/nn/test_modules.py the package's own modules.
"""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.convert import collaborate
from heads_kernels.heads import projected_layers
from tests.support.alike import assert_alike
from tests.support.refusals import assert_refused
from tests.support.tiny_models import build, outputs


def outputs_with_closed_heads(model: Any, heads: dict[int, list[int]], **changes: Tensor) -> Tensor:
    """Of a copy in use, which test_families.py compares with stock."""
    copied = hk.integrations.transformers.use(copy.deepcopy(model))
    hk.heads.close(copied, heads)
    return outputs(copied, **changes)


@pytest.mark.parametrize(("name", "changes"), [("bert", {"is_decoder": True}), ("gpt2", {})])
def test_cross_attention_beside_a_cache(name: str, changes: dict[str, bool]) -> None:
    for gone in ([1], [0, 1, 2, 3]):
        model = build(name, add_cross_attention=True, **changes).double()
        memory = torch.randn(3, 4, 32, dtype=torch.float64)
        heads = {layer.index: gone for layer in hk.heads.attention_layers(model)}
        expected = outputs_with_closed_heads(model, heads, encoder_hidden_states=memory)
        hk.heads.prune(model, heads)
        assert_alike(outputs(model, encoder_hidden_states=memory), expected)


@pytest.mark.parametrize(
    ("gone", "key_heads"),
    [
        ([0, 1, 2, 3], [1]),  # a whole group drops its key head
        ([0, 1, 6, 7], [0, 1]),  # equal groups of 2 keep theirs
        ([0], [0, 0, 0, 1, 1, 1, 1]),  # 3 and 4 heads: none in common
        ([0, 5, 6, 7], [0, 0, 0, 1]),
        ([2, 3], [0, 1, 1]),  # 2 and 4: groups of 2
        ([0, 1, 2, 4, 5, 6, 7], [0]),
    ],
)
def test_key_heads_of_grouped_queries(gone: list[int], key_heads: list[int]) -> None:
    model = build("llama")
    old = hk.heads.projected_layers(model)[0]
    rows = old.key.linear.weight.detach().clone()
    expected = outputs_with_closed_heads(model, {0: gone})
    hk.heads.prune(model, {0: gone})
    layer = hk.heads.projected_layers(model)[0]
    assert layer.num_key_heads == len(key_heads)
    assert layer.module.num_key_value_groups == (8 - len(gone)) // len(key_heads)
    assert torch.equal(layer.key.linear.weight, rows[old.key.features(key_heads)])
    assert_alike(outputs(model), expected)


def test_new_parameters_keep_dtype_and_requires_grad() -> None:
    model = build("gpt2").to(torch.bfloat16)
    attention = model.transformer.h[0].attn
    attention.c_attn.weight.requires_grad_(False)
    hk.heads.prune(model, {0: [2]})
    assert attention.c_attn.weight.dtype == torch.bfloat16
    assert [p.requires_grad for p in attention.c_attn.parameters()] == [False, True]
    assert (attention.c_attn.nf, attention.c_proj.nx, attention.num_heads) == (72, 24, 3)


def test_pruning_twice_adds_up_and_numbers_heads_anew() -> None:
    once, twice = build("bert").double(), build("bert").double()
    hk.heads.prune(once, {1: [0, 2]})
    hk.heads.prune(twice, {1: [0]})
    hk.heads.prune(twice, {1: [1]})
    assert_alike(outputs(once), outputs(twice))
    attention = twice.encoder.layer[1].attention.self
    assert attention.kept_heads.tolist() == [1, 3]
    assert_refused((partial(hk.heads.prune, twice, {1: [2]}), "has head 2; it has heads 0 to 1, 2 in all"))
    hk.heads.prune(twice, {1: [0, 1]})
    assert_refused((partial(hk.heads.prune, twice, {1: [0]}), "it has no head left"))


def test_bad_input() -> None:
    model, name = build("bert"), "encoder.layer.0.attention.self"
    masks = [True, False, False, True], [0.0], [[0, 1]], 1
    a_mask = r"heads of layer 0 \(.*pass (integers|a list of heads); it has heads 0"
    assert_refused(
        (({0: [1], 5: [0]},), "heads names layer 5; this model has layers 0 to 1: 'encoder"),
        (({0: [1], "attention": [0]},), "heads names layer 'attention'"),
        (({0: [1], 1: [4]},), r"heads of layer 1 \('encoder.* has head 4; it has heads 0 to 3, 4 in all"),
        (({name: [-1]},), "heads .* has head -1"),
        (({True: [1]},), "heads names layer True"),
        (({torch.tensor(True): [1]},), r"heads names layer tensor\(True\)"),
        *(
            (({0: each},), TypeError, "heads of layer 0 .*; pass (integers|a list of heads)")
            for each in (1, [True], [0.5], "01")
        ),
        (([0],), TypeError, r"heads is a list; pass \{layer: heads\}"),
        # As a list of numbers these would be heads 0 and 1.
        *((({0: torch.tensor(heads)},), TypeError, a_mask) for heads in masks),
        of=partial(hk.heads.prune, model),
        unchanged=[model],
    )


@pytest.mark.parametrize("tied", ["query and key", "modules", "parameters"])
def test_tied_projections_are_refused(tied: str) -> None:
    """Query and key of a layer are one module, or two layers have one, or one parameter."""
    model = build("bert")
    first, second = (layer.attention for layer in model.encoder.layer)
    if tied == "query and key":
        second.self.key = second.self.query
    elif tied == "modules":
        second.output.dense = first.output.dense
    else:
        second.self.value.weight = first.self.value.weight
    layers = hk.heads.projected_layers(model)
    assert [(layer.num_heads, layer.num_key_heads) for layer in layers] == [(4, 4)] * 2
    words = r"layer 1 .*shares projections with other roles or layers"
    assert_refused((partial(hk.heads.prune, model, {1: [0]}), words), unchanged=[model])


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


class Slow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


#: 4 bits, two to a byte, in a column, as bitsandbytes has them.
PACKED = nn.Parameter(torch.zeros(512, 1, dtype=torch.uint8), requires_grad=False)
#: What is done to a projection, and what is said of it then.
REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "4 bits": (
        lambda own: setattr(own, "weight", PACKED),
        "has a Parameter of dtype torch.uint8 as its weight; {} the model",
    ),
    "a subclass": (
        lambda own: setattr(own, "__class__", Slow),
        r"is a .*Slow; {} a model of nn\.Linear or Conv1D, before",
    ),
    "hooks": (lambda own: own.register_forward_hook(print), "has forward hooks; remove them first"),
    "a forward": (lambda own: setattr(own, "forward", print), "has a replaced forward; restore its forward"),
    # As accelerate does: a hook with the weights, and a forward that asks it for them.
    "offloaded": (
        lambda own: vars(own).update(_hf_hook=SimpleNamespace(offload=True), forward=print),
        "is offloaded; load",
    ),
    "masked": (
        lambda own: own.register_buffer("weight_mask", torch.ones(32, 32)),
        "has weight_mask beside its weight; fold",
    ),
    "parametrised": (nn.utils.parametrizations.spectral_norm, r"is parametrised; .*remove_parametrizations"),
    "an adapter": (Lora, r"has an adapter, .*Lora; merge .*merge_and_unload"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_surgery_serves(name: str) -> None:
    change, refusal = REFUSED[name]
    words = r"layer 0 .*: its key projection " + refusal
    model = hk.integrations.transformers.use(build("bert"))
    for layer in model.encoder.layer:
        changed = change(layer.attention.self.key)
        if isinstance(changed, Lora):
            layer.attention.self.key = changed
    assert_refused(
        (lambda: hk.heads.prune(model, {1: [0], 0: [1]}), words.format("prune")),
        (lambda: collaborate(model, 8), words.format("convert")),
        unchanged=[model],
    )


def test_quantised_models() -> None:
    model = hk.integrations.transformers.use(build("bert"))
    hk.heads.close(model, {0: [1]})
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})
    closed_before = outputs(quantised)
    hk.heads.reopen(quantised)
    hk.heads.close(quantised, {0: [1]})  # or afterwards
    assert_alike(outputs(quantised), closed_before)
    hk.heads.reopen(quantised)
    words = r"projection 'query' passes no gradient .*quantised: Linear\); train gates before"
    assert_refused(
        (lambda: hk.heads.gate(quantised, hk.nn.HardConcrete), words),
        (lambda: hk.heads.prune(quantised, {0: [1]}), r"query projection is a .*quantized"),
        unchanged=[quantised],
    )


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
    assert_refused((lambda: collaborate(model, 4), r"layer 0 .*has forward hooks, which would be lost"))
    handle.remove()
    collaborate(model, 4, progress=False)
