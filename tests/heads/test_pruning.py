"""Pruned models compute what they computed with those heads closed, in every family of the table."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.heads.layers import AttentionLayer, Projection
from heads_kernels.heads.layouts import LAYOUTS
from tests.support.alike import assert_alike
from tests.support.tiny_models import (
    TINY,
    WITH_HEADS,
    as_linear,
    batch,
    build,
    outputs,
    with_gradients,
)

#: Their position bias is for all heads; transformers' own functions don't take out those that are left.
BIASED = ("beit", "mt5", "switch_transformers", "t5")
#: The gate of Laguna, and what the sinks of Granite leave, are rounded to float32 whatever the dtype of the model is.
LEAST = dict.fromkeys(("granite_swa", "granitemoe_swa", "laguna"), torch.float32)
#: The others share their entry of the table, and every line of the forward of their attention, with one of these.
DISTINCT = (
    "afmoe", "albert", "bart", "beam", "bert", "distilbert", "gemma3_text", "gpt2", "hrm_text",
    "laguna", "lfm3", "llama", "mistral", "modernbert", "muse_glimmer_text", "qwen2", "qwen3",
    "qwen3_next", "smollm3", "starcoder2", "step3p7_text", "t5", "vit",
)  # fmt: skip

ROLES = ("query", "key", "value")


def function_of(name: str) -> str:
    """The attention function that serves the family after pruning."""
    return "heads_kernels" if name in BIASED else "eager"


def chosen(pattern: str, layer: AttentionLayer) -> list[int]:
    H = layer.num_heads
    return {
        "some": [0] if layer.index % 2 else [head for head in range(H) if head != 1],
        "none left": list(range(H)),
        "uneven groups": [1, 2, H - 1] if H == 8 else [2],
    }[pattern]


@contextmanager
def gated_by_hand(model: Any, gates: dict[int, Tensor]) -> Iterator[None]:
    """For a while the columns of W_O are times the gates of their heads."""
    layers = hk.heads.attention_layers(model)
    weights = [layers[index].output.linear.weight.data for index in gates]
    before = [weight.clone() for weight in weights]
    for index, gate in gates.items():
        linear = layers[index].output.linear
        columns = gate.repeat_interleave(layers[index].value_dim).to(linear.weight.dtype)
        as_linear(linear, linear.weight.data).mul_(columns)
    yield
    for weight, kept in zip(weights, before, strict=True):
        weight.copy_(kept)


def closed_by_hand(model: Any, heads: dict[int, list[int]]) -> AbstractContextManager[None]:
    layers = hk.heads.attention_layers(model)
    gates = {index: torch.ones(layers[index].num_heads) for index in heads}
    for index, closed in heads.items():
        gates[index][closed] = 0.0
    return gated_by_hand(model, gates)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# ---------------------------------------------------------------------- outputs and gradients
def test_every_entry_of_the_table_is_among_the_distinct() -> None:
    families = [
        {LAYOUTS.get(TINY[name].attention) for name in names} for names in (DISTINCT, WITH_HEADS)
    ]
    assert families[0] == families[1]


@pytest.mark.parametrize("pattern", ["some", "none left"])
@pytest.mark.parametrize("name", WITH_HEADS)
def test_pruned_is_closed(name: str, pattern: str) -> None:
    both = pattern == "some" and name in DISTINCT
    for dtype in (torch.float64, torch.float32) if both else (torch.float64,):
        model = build(name, function_of(name)).to(dtype)
        layers = hk.heads.attention_layers(model)
        heads = {layer.index: chosen(pattern, layer) for layer in layers}
        with closed_by_hand(model, heads):
            expected = outputs(model)
        assert (expected - outputs(model)).abs().max() > 1e-4  # closing shows at all
        hk.heads.prune(model, heads)
        for old, new in zip(layers, hk.heads.attention_layers(model), strict=True):
            assert new.num_heads == old.num_heads - len(heads[old.index])
        assert_alike(outputs(model), expected, dtype=LEAST.get(name))


@pytest.mark.parametrize("name", DISTINCT)
def test_gradients_are_those_with_the_heads_closed(name: str) -> None:
    model = build(name, function_of(name)).double()
    layers = hk.heads.attention_layers(model)
    heads = {layer.index: chosen("uneven groups", layer) for layer in layers}
    with closed_by_hand(model, heads):
        expected = with_gradients(model)
    by_head = [{role: gradient(getattr(layer, role)) for role in ROLES} for layer in layers]
    hk.heads.prune(model, heads)
    found = with_gradients(model)
    norms_in_float32 = {"q_norm", "qk_norm"} & set(dict(layers[0].module.named_children()))
    least = torch.float32 if norms_in_float32 else LEAST.get(name)
    assert found.keys() == expected.keys()
    whole = {path for path in expected if found[path].shape == expected[path].shape}
    assert len(whole) > 4
    for path in whole:
        assert_alike(found[path], expected[path], dtype=least, name=path)
    for old, before, new in zip(layers, by_head, hk.heads.attention_layers(model), strict=True):
        left = [head for head in range(old.num_heads) if head not in heads[old.index]]
        assert_alike(gradient(new.query), before["query"][left], dtype=least)
        group = old.num_heads // old.num_key_heads
        size = new.num_heads // new.num_key_heads
        for role in ("key", "value"):
            summed = torch.zeros_like(before[role])  # copies of a key head share its gradient
            for number, row in enumerate(gradient(getattr(new, role))):
                summed[left[number * size] // group] += row
            assert_alike(summed, before[role], dtype=least)


def gradient(projection: Projection) -> Tensor:
    """Gradient of the weight of each head, `[heads, width, D_in]`."""
    grad = as_linear(projection.linear, projection.linear.weight.grad)
    rows = grad[projection.features(range(projection.heads))]
    return rows.view(projection.heads, projection.width, -1)


@pytest.mark.skipif(
    torch.__version__.startswith("2.11."), reason="SDPA of PyTorch 2.11 divides by the 0 heads"
)
@pytest.mark.parametrize("name", [name for name in WITH_HEADS if name not in BIASED])
def test_stock_sdpa_runs_pruned_models(name: str) -> None:
    model = build(name, "sdpa").double()
    first, *others = hk.heads.attention_layers(model)
    heads = {0: chosen("none left", first)}
    heads |= {layer.index: chosen("some", layer) for layer in others}
    with closed_by_hand(model, heads):
        expected = outputs(model)
    hk.heads.prune(model, heads)
    assert_alike(outputs(model), expected, dtype=LEAST.get(name))


@pytest.mark.parametrize("name", WITH_HEADS)
def test_prune_takes_closed_heads_and_folds_gates_that_run(name: str) -> None:
    """The gates that the attention function applies, learned and folded: the same output without them."""
    model = hk.integrations.transformers.use(build(name).double())
    torch.manual_seed(3)
    hk.heads.gate(model, lambda H: hk.nn.FixedGate(torch.rand(H).double() * (torch.arange(H) != 1)))
    expected = outputs(model)
    pruned = hk.heads.prune(model, hk.heads.closed(model))
    assert all(heads == [1] for heads in pruned.values())
    for layer in hk.heads.attention_layers(model):
        assert layer.module.head_gate is None
        assert layer.num_heads in (3, 7)
    assert_alike(outputs(model), expected, dtype=torch.float32)


@pytest.mark.parametrize(("name", "changes"), [("bert", {"is_decoder": True}), ("gpt2", {})])
@pytest.mark.parametrize("gone", [[1], [0, 1, 2, 3]])
def test_cross_attention_beside_a_cache(
    name: str, changes: dict[str, bool], gone: list[int]
) -> None:
    model = build(name, add_cross_attention=True, **changes).double()
    memory = torch.randn(3, 4, 32, dtype=torch.float64)
    heads = {layer.index: gone for layer in hk.heads.attention_layers(model)}
    with closed_by_hand(model, heads):
        expected = outputs(model, encoder_hidden_states=memory)
    hk.heads.prune(model, heads)
    assert_alike(outputs(model, encoder_hidden_states=memory), expected)


# ---------------------------------------------------------------------- sizes
def test_parameter_counts_of_bert() -> None:
    model = build("bert")
    before = parameters(model)
    assert hk.heads.prune(model, {0: [1, 3]}) == {"encoder.layer.0.attention.self": [1, 3]}
    width, D = 32, 8
    assert before - parameters(model) == 2 * (3 * (width * D + D) + width * D)
    before = parameters(model)
    hk.heads.prune(model, {"encoder.layer.0.attention.self": [0, 1]})
    assert before - parameters(model) == 2 * (3 * (width * D + D) + width * D)
    layer = hk.heads.attention_layers(model)[0]
    assert layer.output.linear.weight.shape == (width, 0)
    assert layer.output.linear.bias.shape == (width,)  # b_O stays


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
    model = build("llama").double()
    old = hk.heads.attention_layers(model)[0]
    rows = old.key.linear.weight.detach().clone()
    with closed_by_hand(model, {0: gone}):
        expected = outputs(model)
    hk.heads.prune(model, {0: gone})
    layer = hk.heads.attention_layers(model)[0]
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
    with pytest.raises(ValueError, match="has head 2; it has heads 0 to 1, 2 in all"):
        hk.heads.prune(twice, {1: [2]})
    hk.heads.prune(twice, {1: [0, 1]})
    with pytest.raises(ValueError, match="it has no head left"):
        hk.heads.prune(twice, {1: [0]})


def test_keep_at_least_spares_the_strongest() -> None:
    model = hk.integrations.transformers.use(build("bert"))
    gates = torch.tensor([0.1, 0.5, 0.4, 0.2])
    hk.heads.gate(model, lambda H: hk.nn.FixedGate(gates), layers=[0])
    pruned = hk.heads.prune(model, {0: [0, 1, 2, 3], 1: [3, 2, 1, 0]}, keep_at_least=2)
    assert list(pruned.values()) == [[0, 3], [2, 3]]  # equal gates: the first stay
    assert list(hk.heads.prune(model, {0: [0], 1: [1]}, keep_at_least=2).values()) == [[], []]


def test_closed_heads_that_are_spared_are_the_most_wanted_and_open() -> None:
    model = hk.integrations.transformers.use(build("bert"))
    hk.heads.gate(model, hk.nn.HardConcrete, layers=[0])
    layer = hk.heads.attention_layers(model)[0]
    columns = layer.output.linear.weight.detach()[:, layer.output.features([2])]
    layer.gate.log_alpha.data.copy_(torch.tensor([-9.0, -8.0, -3.0, -7.0]))
    assert list(hk.heads.prune(model, hk.heads.closed(model), keep_at_least=1).values()) == [
        [0, 1, 3]
    ]
    assert torch.equal(layer.output.linear.weight, columns)


def test_heads_before_is_what_the_layer_once_had() -> None:
    model = build("bert")
    hk.heads.prune(model, {0: [1]})
    hk.heads.prune(model, {0: [1]})
    first, second = (layer.module for layer in hk.heads.attention_layers(copy.deepcopy(model)))
    assert (first.heads_before, first.kept_heads.tolist()) == (4, [0, 3])
    assert not hasattr(second, "heads_before")


# ---------------------------------------------------------------------- layers without heads
@pytest.mark.parametrize("name", WITH_HEADS)
def test_every_parameter_of_an_empty_layer_has_a_gradient(name: str) -> None:
    """`DistributedDataParallel` waits for all of them."""
    model = hk.integrations.transformers.use(build(name))
    layer = hk.heads.attention_layers(model)[-1]
    before = with_gradients(model)
    hk.heads.prune(model, {layer.index: range(layer.num_heads)})
    assert with_gradients(model).keys() == before.keys()


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_a_layer_without_heads_is_the_bias_of_its_output(name: str) -> None:
    model = build(name)
    layer = hk.heads.attention_layers(model)[0]
    hk.heads.prune(model, {0: range(layer.num_heads)})
    layer = hk.heads.attention_layers(model)[0]
    assert layer.num_heads == 0
    seen = []
    layer.output.linear.register_forward_hook(lambda _, inputs, output: seen.append(output))
    before = layer.output.linear.bias.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        outputs(model).square().mean().backward()
        optimizer.step()
    assert (seen[0] == before).all()
    assert (seen[1] != before).any()  # the bias learns


@pytest.mark.parametrize(
    ("name", "generator"),
    [
        ("bart", "BartForConditionalGeneration"),
        ("gpt2", "GPT2LMHeadModel"),
        ("llama", "LlamaForCausalLM"),
        ("t5", "T5ForConditionalGeneration"),
    ],
)
@pytest.mark.parametrize("pattern", ["uneven groups", "none left"])
def test_generate_with_a_cache(name: str, generator: str, pattern: str) -> None:
    model = build(name, function_of(name), model=generator)
    layers = hk.heads.attention_layers(model)
    heads = {
        layer.index: chosen(pattern, layer)
        for layer in layers
        if layer.index == 0 or layer.kind != "encoder"
    }
    inputs = {n: batch(model)[n][:1, :5] for n in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, **inputs}
    with closed_by_hand(model, heads):
        tokens = model.generate(**options)
    hk.heads.prune(model, heads)
    assert torch.equal(model.generate(**options), tokens)
    assert torch.equal(model.generate(**options, use_cache=False), tokens)


# ---------------------------------------------------------------------- the package's own modules
def own_layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    layers = {
        "plain": hk.nn.GatedMultiheadAttention(24, 4),
        "grouped": hk.nn.GatedMultiheadAttention(24, 4, num_key_heads=2, value_dim=5),
        "head gate": hk.nn.GatedMultiheadAttention(24, 4, output_gate="head"),
        "element gate": hk.nn.GatedMultiheadAttention(24, 4, output_gate="element"),
        "collaborative": hk.nn.CollaborativeMultiheadAttention(24, 4, 10, mixing_init="normal"),
        "collaborative gate": hk.nn.CollaborativeMultiheadAttention(
            24, 4, 10, mixing_init="normal", content_bias=False, output_gate="element"
        ),
    }
    for layer in layers.values():
        for parameter in layer.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return layers


@pytest.mark.parametrize("kind", own_layers())
@pytest.mark.parametrize("gone", [[1], [0, 3], [1, 2, 3], [0, 1, 2, 3]])
def test_own_modules(kind: str, gone: list[int]) -> None:
    layer = own_layers()[kind].double()
    x = torch.randn(2, 6, 24, dtype=torch.float64)
    gates = torch.tensor([0.3, 0.9, 1.0, 0.5])
    with gated_by_hand(layer, {0: gates * ~torch.isin(torch.arange(4), torch.tensor(gone))}):
        expected = layer(x)[0]
    hk.heads.gate(layer, lambda H: hk.nn.FixedGate(gates))
    assert hk.heads.prune(layer, {0: gone}) == {"": gone}
    assert (layer.num_heads, layer.head_gate) == (4 - len(gone), None)
    assert_alike(layer(x, is_causal=False)[0], expected)
    cache = hk.nn.KeyValueCache()
    with torch.no_grad():
        steps = [layer(step, is_causal=True, cache=cache)[0] for step in x.split(2, dim=1)]
    assert_alike(torch.cat(steps, 1), layer(x, is_causal=True)[0])
    layer(x)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_rows_of_collaborative_attention() -> None:
    layer = own_layers()["collaborative"]
    mixing, content = layer.mixing.detach().clone(), layer.content_proj.weight.detach().clone()
    hk.heads.prune(layer, {0: [0, 2]})
    assert torch.equal(layer.mixing, mixing[[1, 3]])
    assert torch.equal(layer.content_proj.weight, content[[1, 3]])
    assert layer.q_proj.weight.shape == layer.k_proj.weight.shape == (10, 24)
    assert layer.v_proj.weight.shape == (12, 24)


# ---------------------------------------------------------------------- bad input
def test_bad_input_changes_nothing() -> None:
    model = build("bert")
    before = parameters(model)
    name = "encoder.layer.0.attention.self"
    for heads, match in (
        ({0: [1], 5: [0]}, "names layer 5; this model has layers 0 to 1: 'encoder"),
        ({0: [1], "attention": [0]}, "names layer 'attention'"),
        ({0: [1], 1: [4]}, r"layer 1 \('encoder.* has head 4; it has heads 0 to 3, 4 in all"),
        ({name: [-1]}, "has head -1"),
        ({True: [1]}, "names layer True"),
    ):
        with pytest.raises(ValueError, match=match):
            hk.heads.prune(model, heads)
    for heads in ({0: 1}, {0: [True]}, {0: [0.5]}, {0: "01"}, [0]):
        with pytest.raises(TypeError):
            hk.heads.prune(model, heads)
    for keep, error in ((-1, ValueError), (True, TypeError), (0.5, TypeError)):
        with pytest.raises(error, match="keep_at_least"):
            hk.heads.prune(model, {0: [1]}, keep_at_least=keep)
    assert parameters(model) == before


def shared_key(model: Any) -> None:
    """Query and key of a layer are one module."""
    attention = model.encoder.layer[1].attention.self
    attention.key = attention.query


def shared_layers(model: Any) -> None:
    """Two layers have one module."""
    first, second = (layer.attention.output for layer in model.encoder.layer)
    second.dense = first.dense


def shared_parameter(model: Any) -> None:
    """Two modules have one parameter."""
    first, second = (layer.attention.self.value for layer in model.encoder.layer)
    second.weight = first.weight


@pytest.mark.parametrize("tie", [shared_key, shared_layers, shared_parameter])
def test_tied_projections_are_refused(tie: Callable[[Any], None]) -> None:
    model = build("bert")
    tie(model)
    layers = hk.heads.attention_layers(model)
    assert [(layer.num_heads, layer.num_key_heads) for layer in layers] == [(4, 4)] * 2
    before = parameters(model)
    with pytest.raises(
        ValueError, match=r"layer 1 .*shares projections with other roles or layers"
    ):
        hk.heads.prune(model, {1: [0]})
    assert parameters(model) == before
