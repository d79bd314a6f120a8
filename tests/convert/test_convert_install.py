"""Heads read from models and factors put into them: what transformers models compute then, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.convert import install, ragged, read_heads
from heads_kernels.heads import attention_layers
from tests.convert_models import CONVERTIBLE, TURNED, convert, in_use, random_factors, write
from tests.tiny_models import as_linear, assert_alike, batch, build, transformers, with_gradients

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
#: Stock eager attention has a softmax in float32; stock SDPA makes NaN of rows that see nothing.
STOCK = {torch.float32: "eager", torch.float64: "sdpa"}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Outputs and gradients that a layer has whatever its queries and keys are."""
    found = with_gradients(model)
    layers = attention_layers(model)
    own = {
        id(parameter)
        for layer in layers
        for projection in (layer.query, layer.key)
        for parameter in projection.linear.parameters()
    }
    names = {name for name, parameter in model.named_parameters() if id(parameter) in own}
    same = {n: g for n, g in found.items() if n not in names and "mixing" not in n}
    for layer in layers:
        linear, H = layer.value.linear, layer.value.heads
        parts = [n for n in same if n.startswith(f"{layer.name}.c_attn.")]  # fused, and its value
        for name in parts:
            del same[name]
        rows = layer.value.features(range(H))
        same[f"{layer.name}: value"] = as_linear(linear, linear.weight.grad)[rows]
    return same


def row_gradients(layer: Any, head: int) -> tuple[Tensor, Tensor]:
    """Of the weights of one head's query and key, `[D, D_in]` each."""
    query, key = (
        as_linear(projection.linear, projection.linear.weight.grad)[projection.features([head])]
        for projection in (layer.query, layer.key)
    )
    return query, key


# ---------------------------------------------------------------------- what is computed
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CONVERTIBLE)
def test_with_all_features_nothing_changes(name: str, dtype: torch.dtype) -> None:
    expected = gradients(build(name, STOCK[dtype]).to(dtype))
    found = gradients(convert(in_use(name).to(dtype)))
    assert_alike(found, expected, TOLERANCE[dtype])


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
    assert_alike(found, {n: g for n, g in expected.items() if n in found}, 1e-10)
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
        assert_alike(is_found, wanted, 1e-10)


def test_gpt2_with_scales_by_layer() -> None:
    changes = {"scale_attn_by_inverse_layer_idx": True}
    expected = gradients(build("gpt2", "sdpa", **changes).double())
    found = gradients(convert(in_use("gpt2", **changes).double()))
    assert_alike(found, expected, 1e-10)


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
    assert_alike(found, expected, 1e-10)


# ---------------------------------------------------------------------- what can not be read
@pytest.mark.parametrize("name", TURNED)
def test_rotary_positions_are_refused(name: str) -> None:
    """And nothing is listed in the table that has none: these modules take cosines and sines."""
    model = in_use(name)
    layer = attention_layers(model)[0]
    with pytest.raises(ValueError, match=r"layer 0 \(.*\) has rotary positions"):
        read_heads(layer)
    assert any(
        hasattr(module, "rotary_emb") or "Rotary" in type(module).__name__
        for module in model.modules()
    )


def test_layers_without_heads_are_refused() -> None:
    model = build("bert")
    hk.heads.prune(model, {0: range(4)})
    with pytest.raises(ValueError, match="has no heads left"):
        read_heads(attention_layers(model)[0])


def test_weights_that_are_no_numbers_are_refused() -> None:
    model = build("gpt2")
    layer = attention_layers(model)[1]
    with torch.no_grad():
        layer.key.linear.weight[3, 40] = torch.nan
    read_heads(attention_layers(model)[0])
    with pytest.raises(ValueError, match=r"layer 1 \('transformer.h.1.attn'\): key holds NaN"):
        read_heads(layer)


def test_packed_weights_are_refused() -> None:
    model = build("bert")
    layer = attention_layers(model)[0]
    layer.query.linear.weight = nn.Parameter(torch.zeros(512, dtype=torch.uint8), False)
    with pytest.raises(
        ValueError, match=r"is projected by a Linear; convert a model of nn\.Linear"
    ):
        read_heads(attention_layers(model)[0])


def test_models_that_run_another_attention_are_refused() -> None:
    model = build("bert", "sdpa")
    layer = attention_layers(model)[0]
    factors = ragged(read_heads(layer), 12)
    with pytest.raises(ValueError, match=r"attn_implementation is 'sdpa' .*: call .*use\(model\)"):
        install(model, layer, factors, ragged=True)
    assert not attention_layers(model)[0].layout.shared


class _Attention(nn.Module):
    """Attention of someone else: fused, split in equal parts."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.head_dim = self.width = 4
        if config is not None:
            self.config = config


@pytest.mark.parametrize("in_transformers", [False, True])
def test_modules_of_others_are_read_and_not_converted(
    in_transformers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = hk.heads.HeadLayout("other", "qkv", "qkv", "qkv", "out", scale="width")
    monkeypatch.setitem(hk.heads.layouts.LAYOUTS, "_Attention", layout)
    model = nn.Sequential(_Attention(in_use("bert").config if in_transformers else None))
    [layer] = attention_layers(model)
    heads = read_heads(layer)
    assert torch.equal(heads.key.flatten(0, 1), model[0].qkv.weight[12:24].double())
    assert heads.scale == 4
    said = "one projection for several roles" if in_transformers else "is a _Attention; layers of"
    with pytest.raises((TypeError, ValueError), match=said):
        install(model, layer, ragged(heads, 8), ragged=True)
    del model[0].width
    with pytest.raises(ValueError, match="is a _Attention without 'width'"):
        read_heads(attention_layers(model)[0])
