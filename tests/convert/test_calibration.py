"""Calibration against sums made row by row: padding on both sides, causal, cross-attention, a layer that runs twice."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.convert import calibrate, collaborate, curves, error_curve, read_heads
from heads_kernels.heads import attention_layers
from tests.convert.model_state import assert_moments, by_hand, calls, state
from tests.support.alike import assert_alike
from tests.support.nn_layers import PADDED, B, E, H, S, T, spread

FAMILIES = ("bert", "albert", "distilbert", "vit", "gpt2", "t5", "bart")


def tiny(name: str, **changes: Any) -> Any:
    pytest.importorskip("transformers", reason="a model of transformers")
    from tests.support.tiny_models import build

    return build(name, **changes)


def batch(model: Any) -> dict[str, Tensor]:
    from tests.support.tiny_models import batch

    return batch(model)


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True)
    model = spread(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False))
    return hk.nn.replace_attention_(model)


# ---------------------------------------------------------------------- against brute force
@pytest.mark.parametrize("name", FAMILIES)
def test_moments_of_transformers_models(name: str) -> None:
    """A batch with a whole row, one padded on the right and one on the left."""
    model = tiny(name)
    arguments = batch(model)
    found = calibrate(model, [arguments])
    expected = calls(tiny(name), arguments)
    assert found.keys() == expected.keys()
    for layer, runs in expected.items():
        assert_moments(found[layer], by_hand(runs))
    if name == "albert":
        assert [len(runs) for runs in expected.values()] == [2]


def test_rows_of_cross_attention_alone() -> None:
    """Padded rows of the decoder do not count, though its self-attention is not asked for."""
    model = tiny("bart")
    arguments = batch(model)
    names = [layer.name for layer in attention_layers(model) if layer.kind == "cross"]
    found = calibrate(model, [arguments], names)
    assert list(found) == names
    assert int(found[names[0]].count) == int(arguments["decoder_attention_mask"].sum())


def test_moments_of_torch_encoder() -> None:
    model = encoder(1)
    x = torch.randn(B, S, E)
    found = calibrate(model, [{"src": x, "src_key_padding_mask": PADDED}])
    (moments,) = found.values()
    assert_moments(moments, by_hand([(x, x, ~PADDED, ~PADDED, False)]))


def test_moments_of_causal_torch_encoder() -> None:
    model = encoder(1)
    x = torch.randn(B, S, E)
    mask = nn.Transformer.generate_square_subsequent_mask(S)
    (moments,) = calibrate(model, [{"src": x, "mask": mask, "is_causal": True}]).values()
    real = torch.ones(B, S, dtype=torch.bool)
    assert_moments(moments, by_hand([(x, x, real, real, True)]))


class Cross(nn.Module):
    """One cross-attention, of keys with another width than the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = spread(hk.nn.GatedMultiheadAttention(E, H, kdim=10, vdim=10))

    def forward(self, x: Tensor, y: Tensor, **masks: Tensor) -> Tensor:
        return self.attention(x, y, y, **masks)[0]


def test_moments_of_cross_attention() -> None:
    x, y = torch.randn(B, T, E), torch.randn(B, S, 10)
    rows = torch.tensor([[False] * T, [True] * 2 + [False] * (T - 2)])
    arguments = {"x": x, "y": y, "query_padding_mask": rows, "key_padding_mask": PADDED}
    (moments,) = calibrate(Cross(), [arguments]).values()
    assert_moments(moments, by_hand([(x, y, ~rows, ~PADDED, False)]))


def test_batches_add_up() -> None:
    model = tiny("bert")
    arguments = batch(model)
    whole = calibrate(model, [arguments])
    rows = [{name: each[n : n + 1] for name, each in arguments.items()} for n in range(3)]
    for name, moments in calibrate(model, iter(rows)).items():
        assert_moments(moments, whole[name])


def test_forms_of_batches() -> None:
    model, x = encoder(), torch.randn(B, S, E)
    found = [calibrate(model, [form]) for form in (x, (x,), [x], {"src": x})]
    for other in found[1:]:
        for name, moments in found[0].items():
            assert_moments(other[name], moments)


def test_one_batch_at_a_time() -> None:
    """When the third batch is made, nothing of the first is left."""
    model = encoder()
    alive: list[weakref.ref[Tensor]] = []

    def batches() -> Iterator[Tensor]:
        for _ in range(4):
            assert not any(each() is not None for each in alive[:-1])
            made = torch.randn(B, S, E)
            alive.append(weakref.ref(made))
            yield made

    calibrate(model, batches())


def test_dropout_is_off() -> None:
    model = encoder().train()
    x = torch.randn(B, S, E)
    one, other = calibrate(model, [x]), calibrate(model, [x])
    for name, moments in one.items():
        assert_moments(other[name], moments)


# ---------------------------------------------------------------------- what it is for
def test_curves_are_those_of_the_moments() -> None:
    model = tiny("bert")
    moments = calibrate(model, [batch(model)])
    before = state(model)
    found = curves(model, moments)
    assert state(model) == before
    for place, layer in enumerate(attention_layers(model)):
        heads = read_heads(layer)
        assert found.layers[place] == layer.name
        assert_alike(found.errors[place], error_curve(heads, moments[layer.name]))
    direct = curves(model, [batch(model)])
    assert_alike(direct.errors, found.errors)
    assert direct.squares == pytest.approx(found.squares)


def test_moments_serve_several_conversions() -> None:
    moments = calibrate(tiny("bert"), [batch(tiny("bert"))])
    one = collaborate(tiny("bert"), 16, calibration=moments, layers=[1])
    other = collaborate(tiny("bert"), 16, calibration=[batch(tiny("bert"))], layers=[1])
    assert one.layers == other.layers == (list(moments)[1],)
    assert one.errors == pytest.approx(other.errors, rel=1e-6)


# ---------------------------------------------------------------------- nothing stays
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["albert", "bert", "bart", "torch"])
def test_the_model_is_what_it_was(name: str, training: bool) -> None:
    model = encoder() if name == "torch" else tiny(name)
    model.train(training)
    next(model.children()).eval()
    before = state(model)
    data = [torch.randn(B, S, E)] if name == "torch" else [batch(model)]
    calibrate(model, data)
    assert state(model) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_model_is_what_it_was_after_an_error(error: type[BaseException]) -> None:
    model = tiny("bert").train()
    before = state(model)

    def batches() -> Iterator[dict[str, Tensor]]:
        yield batch(model)
        raise error

    with pytest.raises(error):
        calibrate(model, batches())
    assert state(model) == before


# ---------------------------------------------------------------------- what is refused
def padded(model: Any) -> dict[str, Tensor]:
    arguments = batch(model)
    return arguments | {"attention_mask": torch.zeros_like(arguments["attention_mask"])}


def test_no_tokens() -> None:
    model = tiny("bert")
    with pytest.raises(ValueError, match=r"calibration brings no token to layer 0 \('encoder"):
        calibrate(model, [padded(model)])
    with pytest.raises(ValueError, match="calibration has no batches"):
        calibrate(model, [])


def test_a_layer_that_does_not_run() -> None:
    model = nn.ModuleList([encoder(1), encoder(1)])
    model.forward = lambda x: model[0](x)
    with pytest.raises(ValueError, match=r"brings no token to layer 1 \('1\.layers\.0\.self_attn'"):
        calibrate(model, [torch.randn(B, S, E)])


@pytest.mark.parametrize("data", ["text", torch.zeros(2, 3), {"src": 1}, 3, None])
def test_no_batches(data: Any) -> None:
    with pytest.raises(TypeError, match="calibration is a"):
        calibrate(encoder(), data)


def test_nan() -> None:
    model, x = encoder(), torch.randn(B, S, E)
    broken = x.clone()
    broken[1, 2, 3] = torch.nan
    message = r"gives layer 'layers\.0\.self_attn' NaN or infinity in batch 1"
    with pytest.raises(ValueError, match=message):
        calibrate(model, [x, broken])
    broken[1, 2] = 0.0  # padding may hold what it likes
    broken[1, 5] = torch.nan
    one = encoder(1)
    calibrate(one, [{"src": broken, "src_key_padding_mask": PADDED}])


def test_keys_of_a_cache() -> None:
    model = tiny("gpt2")
    ids = torch.randint(3, 40, (2, 6))
    cache = model(ids[:, :4]).past_key_values
    with pytest.raises(ValueError, match="without a cache"):
        calibrate(model, [{"input_ids": ids[:, 4:], "past_key_values": cache}])


def test_moments_of_another_model() -> None:
    x = torch.randn(B, S, 12)
    layer = nn.TransformerEncoderLayer(12, H, 16, batch_first=True)
    other = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    moments = calibrate(hk.nn.replace_attention_(other), [x])
    with pytest.raises(ValueError, match=r"widths \(12, 12\) for layer 0 .*\(24, 24\)"):
        collaborate(encoder(), 8, calibration=moments)
    moments = calibrate(encoder(2), [torch.randn(B, S, E)])
    message = r"has moments of 'layers\.0\.self_attn', .*also has 'layers\.2\.self_attn': calibrate"
    with pytest.raises(ValueError, match=message):
        collaborate(encoder(3), 8, calibration=moments)
