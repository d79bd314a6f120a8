"""Pruned models compute what they computed with those heads closed, in every family of the table."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.heads.layers import AttentionLayer
from tests.attention_models import MODELS, inputs_of, make, output_of

#: Their position bias is for all heads; transformers' own functions don't take out those that are left.
BIASED = {"T5Attention", "MT5Attention"}
#: The gate of Laguna is rounded to float32 whatever the dtype of the model is.
FLOAT64 = {"LagunaAttention": 1e-6}
PATTERNS = ("some", "none left")


def function_of(attention: str) -> str:
    """The attention function that serves the family after pruning."""
    if attention in BIASED:
        assert hk.integrations.transformers  # registers it
        return "heads_kernels"
    return "eager"


def chosen(pattern: str, layer: AttentionLayer) -> list[int]:
    H = layer.num_heads
    return {
        "some": [0] if layer.index % 2 else [head for head in range(H) if head != 1],
        "none left": list(range(H)),
        "uneven groups": [1, 2, H - 1] if H == 8 else [2],
    }[pattern]


def scaled(model: Any, gates: dict[int, Tensor]) -> Any:
    """A copy of the model whose heads are gated by hand: columns of W_O times the gates of their heads."""
    model = copy.deepcopy(model)
    layers = hk.heads.attention_layers(model)
    for index, gate in gates.items():
        weight = layers[index].output.linear.weight
        columns = gate.repeat_interleave(layers[index].value_dim).to(weight.dtype)
        transposed = type(layers[index].output.linear).__name__ == "Conv1D"
        weight.data *= columns[:, None] if transposed else columns
    return model


def closed_by_hand(model: Any, heads: dict[int, list[int]]) -> Any:
    layers = hk.heads.attention_layers(model)
    gates = {index: torch.ones(layers[index].num_heads) for index in heads}
    for index, closed in heads.items():
        gates[index][closed] = 0.0
    return scaled(model, gates)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-3)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# ---------------------------------------------------------------------- outputs and gradients
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("attention", MODELS)
def test_pruned_is_closed(attention: str, pattern: str) -> None:
    accuracies = [(torch.float64, FLOAT64.get(attention, 1e-12))]
    for dtype, tolerance in accuracies + [(torch.float32, 1e-6)] * (pattern == "some"):
        model = make(attention, function_of(attention)).to(dtype)
        heads = {layer.index: chosen(pattern, layer) for layer in hk.heads.attention_layers(model)}
        expected = output_of(closed_by_hand(model, heads))
        assert (expected - output_of(model)).abs().max() > 1e-4  # closing shows at all
        before = [layer.num_heads for layer in hk.heads.attention_layers(model)]
        hk.heads.prune(model, heads)
        for layer, count in zip(hk.heads.attention_layers(model), before, strict=True):
            assert layer.num_heads == count - len(heads[layer.index])
        assert_near(output_of(model), expected, tolerance)


@pytest.mark.parametrize("attention", MODELS)
def test_gradients_are_those_with_the_heads_closed(attention: str) -> None:
    model = make(attention, function_of(attention)).double()
    heads = {
        layer.index: chosen("uneven groups", layer) for layer in hk.heads.attention_layers(model)
    }
    reference = closed_by_hand(model, heads)
    hk.heads.prune(model, heads)
    for each in (reference, model):
        output_of(each).square().mean().backward()
    layers = hk.heads.attention_layers(reference)
    grads = dict(reference.named_parameters())
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    norms_in_float32 = {"q_norm", "qk_norm"} & set(dict(layers[0].module.named_children()))
    tolerance = 1e-6 if norms_in_float32 or attention in FLOAT64 else 1e-10
    compared = 0
    for name, parameter in model.named_parameters():
        if shapes[name] == grads[name].shape and grads[name].grad is not None:
            assert_near(parameter.grad, grads[name].grad, tolerance)
            compared += 1
    assert compared >= 4
    for old, new in zip(layers, hk.heads.attention_layers(model), strict=True):
        left = [head for head in range(old.num_heads) if head not in heads[old.index]]
        _assert_rows_equal(old.query.features(left), old.query, new.query, tolerance)
        group = old.num_heads // old.num_key_heads
        size = new.num_heads // new.num_key_heads
        for role in ("key", "value"):
            old_rows, new_rows = _gradient(getattr(old, role)), _gradient(getattr(new, role))
            summed = torch.zeros_like(old_rows)  # copies of a key head share its gradient
            for number in range(new.num_key_heads):
                summed[left[number * size] // group] += new_rows[number]
            assert_near(summed, old_rows, tolerance)


def _gradient(projection: Any) -> Tensor:
    """Gradient of the weight of each head, `[heads, width, D_in]`."""
    grad = projection.linear.weight.grad
    grad = grad.T if type(projection.linear).__name__ == "Conv1D" else grad
    rows = grad[projection.features(range(projection.heads))]
    return rows.view(projection.heads, projection.width, -1)


def _assert_rows_equal(features: Tensor, old: Any, new: Any, tolerance: float) -> None:
    transposed = type(old.linear).__name__ == "Conv1D"
    expected = (old.linear.weight.grad.T if transposed else old.linear.weight.grad)[features]
    assert_near(_gradient(new).flatten(0, 1), expected, tolerance)


@pytest.mark.parametrize("attention", [name for name in MODELS if name not in BIASED])
def test_stock_sdpa_runs_pruned_models(attention: str) -> None:
    model = make(attention, "sdpa").double()
    heads = {layer.index: chosen("some", layer) for layer in hk.heads.attention_layers(model)}
    heads[0] = chosen("none left", hk.heads.attention_layers(model)[0])
    expected = output_of(closed_by_hand(model, heads))
    hk.heads.prune(model, heads)
    tolerance = FLOAT64.get(attention, 1e-10)
    assert_near(output_of(model), expected, tolerance)


@pytest.mark.parametrize("attention", MODELS)
def test_prune_takes_closed_heads_and_folds_gates_that_run(attention: str) -> None:
    """The gates that the attention function applies, learned and folded: the same output without them."""
    model = make(attention).double()
    hk.integrations.transformers.use(model)
    torch.manual_seed(3)
    hk.heads.gate(model, lambda H: hk.nn.FixedGate(torch.rand(H).double() * (torch.arange(H) != 1)))
    expected = output_of(model)
    pruned = hk.heads.prune(model, hk.heads.closed(model))
    assert all(heads == [1] for heads in pruned.values())
    assert all(
        layer.module.head_gate is None and layer.num_heads in (3, 7)
        for layer in hk.heads.attention_layers(model)
    )
    tolerance = 1e-5 if attention in FLOAT64 else 1e-6
    assert_near(output_of(model), expected, tolerance)


@pytest.mark.parametrize(
    ("attention", "changes"), [("BertAttention", {"is_decoder": True}), ("GPT2Attention", {})]
)
@pytest.mark.parametrize("gone", [[1], [0, 1, 2, 3]])
def test_cross_attention_beside_a_cache(
    attention: str, changes: dict[str, bool], gone: list[int]
) -> None:
    model = make(attention, "eager", add_cross_attention=True, **changes).double()
    memory = torch.randn(2, 3, 32, dtype=torch.float64)
    heads = {layer.index: gone for layer in hk.heads.attention_layers(model)}
    reference = closed_by_hand(model, heads)
    hk.heads.prune(model, heads)
    inputs = {**inputs_of(model), "encoder_hidden_states": memory}
    outputs = [each(**inputs).logits for each in (reference, model)]
    assert_near(outputs[1], outputs[0], 1e-12)


# ---------------------------------------------------------------------- sizes
def test_parameter_counts_of_bert() -> None:
    model = make("BertAttention")
    before = parameters(model)
    assert hk.heads.prune(model, {0: [1, 3]}) == {"bert.encoder.layer.0.attention.self": [1, 3]}
    width, D = 32, 8
    assert before - parameters(model) == 2 * (3 * (width * D + D) + width * D)
    before = parameters(model)
    hk.heads.prune(model, {"bert.encoder.layer.0.attention.self": [0, 1]})
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
    model = make("LlamaAttention").double()
    old = hk.heads.attention_layers(model)[0]
    rows = old.key.linear.weight.detach().clone()
    reference = closed_by_hand(model, {0: gone})
    expected = output_of(reference)
    hk.heads.prune(model, {0: gone})
    layer = hk.heads.attention_layers(model)[0]
    assert layer.num_key_heads == len(key_heads)
    assert layer.module.num_key_value_groups == (8 - len(gone)) // len(key_heads)
    assert torch.equal(layer.key.linear.weight, rows[old.key.features(key_heads)])
    assert_near(output_of(model), expected, 1e-12)


def test_new_parameters_keep_dtype_and_requires_grad() -> None:
    model = make("GPT2Attention").to(torch.bfloat16)
    attention = model.transformer.h[0].attn
    attention.c_attn.weight.requires_grad_(False)
    hk.heads.prune(model, {0: [2]})
    assert attention.c_attn.weight.dtype == torch.bfloat16
    assert [p.requires_grad for p in attention.c_attn.parameters()] == [False, True]
    assert (attention.c_attn.nf, attention.c_proj.nx, attention.num_heads) == (72, 24, 3)


def test_pruning_twice_adds_up_and_numbers_heads_anew() -> None:
    once, twice = make("BertAttention").double(), make("BertAttention").double()
    hk.heads.prune(once, {1: [0, 2]})
    hk.heads.prune(twice, {1: [0]})
    hk.heads.prune(twice, {1: [1]})
    assert torch.equal(output_of(once), output_of(twice))
    attention = twice.bert.encoder.layer[1].attention.self
    assert attention.kept_heads.tolist() == [1, 3]
    with pytest.raises(ValueError, match="has head 2; it has heads 0 to 1, 2 in all"):
        hk.heads.prune(twice, {1: [2]})
    hk.heads.prune(twice, {1: [0, 1]})
    with pytest.raises(ValueError, match="it has no head left"):
        hk.heads.prune(twice, {1: [0]})


def test_keep_at_least_spares_the_strongest() -> None:
    model = make("BertAttention")
    hk.integrations.transformers.use(model)
    gates = torch.tensor([0.1, 0.5, 0.4, 0.2])
    hk.heads.gate(model, lambda H: hk.nn.FixedGate(gates), layers=[0])
    pruned = hk.heads.prune(model, {0: [0, 1, 2, 3], 1: [3, 2, 1, 0]}, keep_at_least=2)
    assert list(pruned.values()) == [[0, 3], [2, 3]]  # equal gates: the first stay
    assert list(hk.heads.prune(model, {0: [0], 1: [1]}, keep_at_least=2).values()) == [[], []]


# ---------------------------------------------------------------------- layers without heads
@pytest.mark.parametrize("attention", ["BertAttention", "GPT2Attention", "LlamaAttention"])
def test_a_layer_without_heads_is_the_bias_of_its_output(attention: str) -> None:
    model = make(attention)
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
        output_of(model).square().mean().backward()
        optimizer.step()
    assert (seen[0] == before).all()
    assert (seen[1] != before).any()  # the bias learns


@pytest.mark.parametrize("attention", ["GPT2Attention", "LlamaAttention", "BartAttention", "T5Attention"])  # fmt: skip
@pytest.mark.parametrize("pattern", ["uneven groups", "none left"])
def test_generate_with_a_cache(attention: str, pattern: str) -> None:
    model = make(attention, function_of(attention))
    heads = {0: chosen(pattern, hk.heads.attention_layers(model)[0])}
    layers = hk.heads.attention_layers(model)
    heads |= {layer.index: chosen(pattern, layer) for layer in layers if layer.kind != "encoder"}
    reference = closed_by_hand(model, heads)
    hk.heads.prune(model, heads)
    inputs = inputs_of(model)
    inputs.pop("decoder_input_ids", None)
    inputs = {name: tensor[:1, :5] for name, tensor in inputs.items()}
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "use_cache": True}
    tokens = [each.generate(**inputs, **options) for each in (reference, model)]
    assert torch.equal(*tokens)
    assert torch.equal(tokens[0], model.generate(**inputs, **{**options, "use_cache": False}))


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
    expected = scaled(layer, {0: gates * ~torch.isin(torch.arange(4), torch.tensor(gone))})(x)[0]
    hk.heads.gate(layer, lambda H: hk.nn.FixedGate(gates))
    assert hk.heads.prune(layer, {0: gone}) == {"": gone}
    assert (layer.num_heads, layer.head_gate) == (4 - len(gone), None)
    torch.testing.assert_close(layer(x, is_causal=False)[0], expected, rtol=1e-9, atol=1e-9)
    cache = hk.nn.KeyValueCache()
    with torch.no_grad():
        steps = [layer(step, is_causal=True, cache=cache)[0] for step in x.split(2, dim=1)]
    torch.testing.assert_close(torch.cat(steps, 1), layer(x, is_causal=True)[0])
    layer(x)[0].sum().backward()


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
    model = make("BertAttention")
    before = parameters(model)
    name = "bert.encoder.layer.0.attention.self"
    for heads, match in (
        ({0: [1], 5: [0]}, "names layer 5; this model has layers 0 to 1: 'bert.encoder"),
        ({0: [1], "attention": [0]}, "names layer 'attention'"),
        ({0: [1], 1: [4]}, r"layer 1 \('bert.* has head 4; it has heads 0 to 3, 4 in all"),
        ({name: [-1]}, "has head -1"),
        ({True: [1]}, "names layer True"),
    ):
        with pytest.raises(ValueError, match=match):
            hk.heads.prune(model, heads)
    for heads in ({0: 1}, {0: [True]}, {0: [0.5]}, {0: "01"}, [0]):
        with pytest.raises(TypeError):
            hk.heads.prune(model, heads)
    for keep in (-1, True, 0.5):
        with pytest.raises(ValueError, match="keep_at_least"):
            hk.heads.prune(model, {0: [1]}, keep_at_least=keep)
    assert parameters(model) == before


def test_wrapped_projections_are_refused() -> None:
    class Quantized(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.weight, self.bias = linear.weight, linear.bias

    model = make("BertAttention")
    attention = model.bert.encoder.layer[1].attention.self
    attention.value = Quantized(attention.value)
    with pytest.raises(ValueError, match=r"layer 1 .*is projected by a Quantized"):
        hk.heads.prune(model, {0: [0], 1: [0]})
    assert len(model.bert.encoder.layer[0].attention.self.query.weight) == 32
