"""Factors put into transformers models: what those compute then, in use and back from disk, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import heads_kernels as hk
from heads_kernels.analysis import AttentionCall
from heads_kernels.convert import count_parameters, install, ragged, read_heads
from heads_kernels.heads import attention_layers
from heads_kernels.nn.shared import SharedProjection
from tests.convert.converted_models import (
    CONVERTIBLE,
    ROTARY,
    convert,
    gradients,
    in_use,
    mixed,
    random_factors,
    row_gradients,
    write,
)
from tests.support.alike import assert_alike
from tests.support.nn_layers import Gates
from tests.support.tiny_models import (
    batch,
    build,
    outputs,
    transformers,
    with_gradients,
)

#: Stock eager attention has a softmax in float32; stock SDPA makes NaN of rows that see nothing.
STOCK = {torch.float32: "eager", torch.float64: "sdpa"}


# ---------------------------------------------------------------------- what is computed
@pytest.mark.parametrize("dtype", STOCK)
@pytest.mark.parametrize("name", CONVERTIBLE)
def test_with_all_features_nothing_changes(name: str, dtype: torch.dtype) -> None:
    expected = gradients(build(name, STOCK[dtype]).to(dtype))
    found = gradients(convert(in_use(name).to(dtype)))
    assert_alike(found, expected)


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_any_factors(name: str) -> None:
    """Against a stock model whose heads have other weights and the same scores: outputs and all gradients."""
    stock, model = build(name, "sdpa").double(), in_use(name).double()
    layers = attention_layers(stock)
    for layer, own in zip(layers, attention_layers(model), strict=True):
        factors = random_factors(layer, layer.head_dim - 1)
        if layer.query.linear.bias is None:  # T5
            layer.query.linear.bias = nn.Parameter(torch.zeros(layer.query.linear.out_features))
            layer.query.linear.double()
        write(layer, factors)
        install(model, own, factors, ragged=False)
    expected, found = gradients(stock), gradients(model)
    assert_alike(found, {n: g for n, g in expected.items() if n in found})
    for layer, own in zip(layers, attention_layers(model), strict=True):
        Ds, mixing = own.head_dim, own.module.mixing
        query, key, content = own.query.linear, own.key.linear, own.key.linear.content
        heads = [row_gradients(layer, head) for head in range(layer.num_heads)]
        wanted = {
            "query": sum(mixing[h, :, None] * q[:Ds] for h, (q, _) in enumerate(heads)),
            "key": sum(k[:Ds] for _, k in heads),
            "mixing": torch.stack([(q[:Ds] * query.weight).sum(1) for q, _ in heads]),
            "content": torch.stack([k[Ds] for _, k in heads]),
        }
        is_found = {
            "query": query.weight.grad,
            "key": key.weight.grad,
            "mixing": mixing.grad,
            "content": content.weight.grad,
        }
        assert_alike(is_found, wanted)


def test_gpt2_with_scales_by_layer() -> None:
    changes = {"scale_attn_by_inverse_layer_idx": True}
    expected = gradients(build("gpt2", "sdpa", **changes).double())
    found = gradients(convert(in_use("gpt2", **changes).double()))
    assert_alike(found, expected)


def encoder_decoder() -> Any:
    """BERT, and a GPT-2 whose cross-attention has a query of its own and a fused key and value."""
    parts = build("bert"), build("gpt2", add_cross_attention=True)
    model = transformers.EncoderDecoderModel(encoder=parts[0], decoder=parts[1])
    return model.double().eval()


@pytest.mark.parametrize("all_features", [True, False])
def test_cross_attention_of_gpt2(all_features: bool) -> None:
    stock, model = encoder_decoder(), hk.integrations.transformers.use(encoder_decoder())
    if all_features:
        convert(model)
    else:
        for layer, own in zip(attention_layers(stock), attention_layers(model), strict=True):
            factors = random_factors(layer, 7)
            write(layer, factors)
            install(model, own, factors, ragged=False)
    kinds = [layer.kind for layer in attention_layers(model)]
    assert kinds == ["encoder"] * 2 + ["decoder", "cross"] * 2
    arguments = batch(stock)
    arguments |= {"decoder_input_ids": arguments["input_ids"][:, :5]}
    found, expected = (each(**arguments).logits for each in (model, stock))
    assert_alike(found, expected)


#: One of every way in which layers keep their projections and call attention.
WAYS = ["albert", "bert", "gpt2", "t5", "bart", "vit"]


# ---------------------------------------------------------------------- what a layer consists of
@pytest.mark.parametrize("name", [*CONVERTIBLE, *ROTARY])
def test_weights_are_not_drawn_anew(name: str) -> None:
    """`init_weights` draws those that the model was not made with: fused values and content biases are such too."""
    model = in_use(name)
    first, *layers = attention_layers(model)
    for layer in layers or [first]:
        heads = read_heads(layer)
        if isinstance(heads, hk.convert.RotaryHeads):
            install(model, layer, hk.convert.rotary_ragged(heads, heads.D_k), ragged=False)
        else:
            install(model, layer, ragged(heads, heads.D_k), ragged=False)
    if layers:
        hk.heads.prune(model, {0: range(first.num_heads)})
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.init_weights()
    assert not [n for n, weight in model.state_dict().items() if not torch.equal(weight, before[n])]


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_parameters_are_those_that_are_counted(name: str) -> None:
    model = convert(in_use(name), 12)
    for layer in attention_layers(model):
        assert layer.layout.shared
        assert (layer.num_heads, layer.head_dim, layer.value_dim) == (4, 12, 8)
        own = [layer.module.mixing]
        for projection in (layer.query, layer.key):
            assert isinstance(projection.linear, SharedProjection)
            own += projection.linear.parameters()
        counted = count_parameters(layer.query.inputs, 32, 4, 12, D_in_k=layer.key.inputs)
        assert sum(parameter.numel() for parameter in own) == counted


def test_state_dicts_read_well() -> None:
    model = convert(in_use("bert"), 12)
    prefix = "encoder.layer.0.attention.self."
    shapes = {
        name.removeprefix(prefix): list(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name.startswith(prefix) and "value" not in name
    }
    assert shapes == {
        "mixing": [4, 12],
        "query.weight": [12, 32],
        "key.weight": [12, 32],
        "key.content.weight": [4, 32],
    }


def test_dtype_and_gradients_asked_for_are_those_of_the_old_weights() -> None:
    model = in_use("bert").bfloat16()
    layer = attention_layers(model)[0]
    layer.key.linear.requires_grad_(False)
    value = layer.value.linear
    install(model, layer, random_factors(layer, 12), ragged=False)
    new = attention_layers(model)[0]
    assert new.value.linear is value
    asked = {n: p.requires_grad for n, p in new.module.named_parameters()}
    assert asked == {
        "mixing": True,
        "query.weight": True,
        "key.weight": False,
        "key.content.weight": False,
        "value.weight": True,
        "value.bias": True,
    }
    assert {parameter.dtype for parameter in new.module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", WAYS)
def test_bfloat16(name: str) -> None:
    """No further from float32 than a stock model in bfloat16 is from its own float32, by the order."""
    model, stock = mixed(name, ragged=True), build(name)
    with torch.no_grad():
        errors = []
        for each in (model, stock):
            exact = outputs(each)
            errors.append((outputs(each.bfloat16()).float() - exact).square().mean())
    assert errors[0] < 4 * errors[1]


# ---------------------------------------------------------------------- caches
@pytest.mark.parametrize("dim", [5, 12, 32])
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("gpt2", ""),
        ("bert", "BertLMHeadModel"),
        ("bart", "BartForConditionalGeneration"),
        ("t5", "T5ForConditionalGeneration"),
    ],
)
def test_generation_with_a_cache(name: str, model: str, dim: int) -> None:
    changes = {"is_decoder": True} if name == "bert" else {}
    made = mixed(name, dim, model=model, **changes).double()
    ids = torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(3))
    real = torch.ones_like(ids)
    real[1, :2] = 0
    arguments = {
        "attention_mask": real, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False,
        "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    cached, whole = (
        made.generate(ids, use_cache=use_cache, **arguments) for use_cache in (True, False)
    )
    assert torch.equal(cached.sequences, whole.sequences)
    assert_alike(cached.logits, whole.logits)


def test_a_cache_keeps_one_key_for_all_heads() -> None:
    model = mixed("gpt2", 12)
    with torch.no_grad():
        cache = model(batch(model)["input_ids"], use_cache=True).past_key_values
    for layer in cache.layers:
        assert layer.keys.shape == (3, 1, 9, 16)  # 12 features, 4 content biases
        assert layer.values.shape == (3, 4, 9, 8)


class Concatenated(TorchDispatchMode):
    """The sizes of what is concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if op is torch.ops.aten.cat.default:
            self.numbers.append(out.numel())
        return out


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_step_copies_no_weights(name: str) -> None:
    model = mixed(name, 12)
    with torch.no_grad(), Concatenated() as seen:
        model(input_ids=torch.tensor([[7]]))
    assert (
        max(seen.numbers) <= 3 * 32
    )  # outputs for one token; the least of the weights has 12 * 32


def test_left_padding_changes_nothing() -> None:
    model = mixed("gpt2").double()
    ids = torch.randint(3, 40, (1, 6))
    padded = torch.nn.functional.pad(ids, (3, 0))
    places = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4, 5]])
    with torch.no_grad():
        expected = model(ids)[0]
        found = model(padded, attention_mask=(padded > 0).long(), position_ids=places)[0]
    assert_alike(found[:, 3:], expected)


# ---------------------------------------------------------------------- gates, heads
@pytest.mark.parametrize("name", WAYS)
def test_a_pruned_head_is_a_closed_one(name: str) -> None:
    closed, pruned = (mixed(name, ragged=True).double() for _ in range(2))
    heads = {layer.name: [layer.index % 4, 3] for layer in attention_layers(closed)}
    hk.heads.close(closed, heads)
    taken = hk.heads.prune(pruned, heads)
    assert {name: len(each) for name, each in taken.items()} == {
        name: len(set(each)) for name, each in heads.items()
    }
    assert_alike(outputs(pruned), outputs(closed))
    assert [layer.num_heads for layer in attention_layers(pruned)] == [
        4 - len(set(each)) for each in heads.values()
    ]
    hk.heads.reopen(closed)
    assert_alike(outputs(closed), outputs(mixed(name).double()))


@pytest.mark.parametrize("name", WAYS)
def test_without_heads(name: str) -> None:
    closed, pruned = (mixed(name).double() for _ in range(2))
    heads = {1 if name != "albert" else 0: range(4)}
    hk.heads.close(closed, heads)
    hk.heads.prune(pruned, heads)
    assert_alike(outputs(pruned), outputs(closed))


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_pruned_models_generate(name: str) -> None:
    model = mixed(name, model="" if name == "gpt2" else "T5ForConditionalGeneration").double()
    hk.heads.prune(model, {0: [1], 1: range(4)})
    ids = torch.randint(3, 40, (2, 6))
    found = [
        model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, use_cache=use)
        for use in (True, False)
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("name", WAYS)
def test_gates_and_head_masks(name: str) -> None:
    """A gate and a head mask multiply, and learn what they learn in a model with other weights of the same scores."""
    stock, model = in_use(name).double(), convert(in_use(name).double())
    gates, mask = [0.5, 1.0, 0.0, 2.0], torch.tensor([1.0, 0.5, 1.0, 0.0]).double()
    results = []
    for each in (stock, model):
        hk.heads.gate(each, lambda _: Gates(gates).double())
        row = mask.clone().requires_grad_()
        found = with_gradients(each, head_mask=row)
        same = {n: g for n, g in found.items() if n == "outputs" or ".head_gate." in n}
        results.append({**same, "head_mask": row.grad})
    assert_alike(results[1]["outputs"], results[0]["outputs"])
    is_open = torch.tensor(gates) * mask != 0  # ragged layers leave out the gradients of others
    for part in results[0].keys() - {"outputs"}:
        assert_alike(results[1][part][is_open], results[0][part][is_open], name=part)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_observers_see_the_scores(name: str) -> None:
    """Maps of attention before and after, to all features."""

    def maps(model: Any) -> list[Tensor]:
        seen: list[Tensor] = []

        def look(_: Any, call: AttentionCall) -> None:
            seen.append(call.probabilities(slice(0, call.T)))

        with torch.no_grad(), hk.analysis.observe(model, look):
            outputs(model)
        return seen

    model = in_use(name).double()
    expected = maps(model)
    found = maps(convert(model))
    assert len(found) == len(expected) > 1
    for before, after in zip(expected, found, strict=True):
        assert_alike(after, before)


def test_statistics_in_the_place_of_maps() -> None:
    model = in_use("bert").double()
    arguments = batch(model)
    with torch.no_grad():
        expected = model(**arguments, output_attentions=True).attentions
        found = convert(model)(**arguments, output_attentions=True).attentions
    real = arguments["attention_mask"].bool()[:, None].expand(-1, 4, -1)
    for before, after in zip(expected, found, strict=True):
        assert isinstance(after, hk.AttentionStatistics)
        assert_alike(after.entropy[real], before.entropy[real])
        assert_alike(after.max_prob[real], before.max_prob[real])


def test_a_float_mask_is_added() -> None:
    mask = torch.randn(3, 1, 9, 9, dtype=torch.float64)
    expected = outputs(in_use("bert").double(), attention_mask=mask)
    found = outputs(convert(in_use("bert").double()), attention_mask=mask)
    assert_alike(found, expected)


def test_dropout() -> None:
    model = mixed("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5)
    whole = outputs(model)
    assert not torch.equal(outputs(model.train()), whole)


# ---------------------------------------------------------------------- training
@pytest.mark.parametrize("name", WAYS)
def test_training(name: str) -> None:
    model = convert(in_use(name), 20)
    model.train()
    parts = [
        part
        for layer in attention_layers(model)
        for part in (
            layer.module.mixing,
            *layer.query.linear.parameters(),
            *layer.key.linear.parameters(),
            layer.value.linear.weight,
        )
    ]
    before = [part.detach().clone() for part in parts]
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(2):
        optimiser.zero_grad()
        outputs(model).square().mean().backward()
        assert all(bool(part.grad.isfinite().all()) for part in parts)
        optimiser.step()
    for layer in attention_layers(model):
        mixing = layer.module.mixing
        assert mixing.count_nonzero() == 20  # ragged: zeros stay zeros
    assert all(not torch.equal(old, new) for old, new in zip(before, parts, strict=True))


def test_mixing_that_is_not_ragged_fills() -> None:
    model = in_use("bert")
    for layer in attention_layers(model):
        install(model, layer, ragged(read_heads(layer), 20), ragged=False)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    outputs(model).square().mean().backward()
    optimiser.step()
    assert attention_layers(model)[0].module.mixing.all()


# ---------------------------------------------------------------------- compilation
@pytest.mark.check
def test_compile() -> None:
    """The whole model is one graph, with its gradients; the fused projections of GPT-2 too."""
    model = mixed("gpt2", ragged=True, n_layer=1)
    expected = with_gradients(model, use_cache=False)
    found = with_gradients(
        torch.compile(model, fullgraph=True, backend="aot_eager"), use_cache=False
    )
    assert_alike(found, {f"_orig_mod.{n}" if n != "outputs" else n: g for n, g in expected.items()})


@pytest.mark.check
def test_export() -> None:
    model = mixed("bert", num_hidden_layers=1)
    arguments = {name: tensor.contiguous() for name, tensor in batch(model).items()}
    sizes = {0: torch.export.Dim("B", max=64), 1: torch.export.Dim("T", max=60)}
    program = torch.export.export(
        model, (), arguments, dynamic_shapes=dict.fromkeys(arguments, sizes)
    )
    ids = torch.randint(3, 40, (5, 13))
    arguments = {"input_ids": ids, "attention_mask": (ids > 10).long()}
    with torch.no_grad():
        assert_alike(program.module()(**arguments)[0], model(**arguments)[0])


# ---------------------------------------------------------------------- copies, and what would be nonsense
def test_copies() -> None:
    model = mixed("bert")
    copied = copy.deepcopy(model)
    assert_alike(outputs(copied), outputs(model))
    assert copied.encoder.layer[0].attention.self.mixing is not (
        model.encoder.layer[0].attention.self.mixing
    )


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_other_attention_is_refused(implementation: str) -> None:
    model = mixed("bert", 28)  # padded to 4 and to 4 heads of 8: stock attention would not notice
    model.set_attn_implementation(implementation)
    with pytest.raises(
        ValueError, match=f"attn_implementation is '{implementation}' in a BertSelf"
    ):
        outputs(model)
    with pytest.raises(ValueError, match=f"'{implementation}'"):
        outputs(copy.deepcopy(model))
    model.set_attn_implementation("heads_kernels")
    outputs(model)


def test_release_is_refused() -> None:
    model = mixed("bert")
    with pytest.raises(ValueError, match="share queries and keys in 'encoder"):
        hk.integrations.transformers.release(model)
