"""`hk.nn.replace_attention_`: models of stock attention compute what they did, and their heads are found."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.convert import collaborate
from tests.support.nn_layers import CAUSAL, PADDED, B, E, H, S, T, spread

LAYER: dict[str, Any] = {"d_model": E, "nhead": H, "dim_feedforward": 16, "dropout": 0.0}
DECODER_PADDED = PADDED[:, :T] & False
DECODER_PADDED[1, -2:] = True


class Residual(nn.Module):
    """Attention of the rows to another sequence, of other widths and with no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, H, bias=False, kdim=10, vdim=12, batch_first=True)

    def forward(self, x: Tensor, key: Tensor, value: Tensor, **masks: Tensor) -> Tensor:
        return x + self.attention(x, key, value, need_weights=False, **masks)[0]


def models() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """Models of every kind and what they are called with; half of them have the batch second."""
    x, y = torch.randn(B, S, E), torch.randn(B, T, E)
    wide = {"key": torch.randn(B, S, 10), "value": torch.randn(B, S, 12)}
    encoder = nn.TransformerEncoderLayer(**LAYER, batch_first=True)
    decoder = nn.TransformerDecoderLayer(**LAYER, norm_first=True)
    whole = nn.Transformer(
        E, H, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=16, dropout=0.0
    )
    return {
        "encoder": (
            nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False),
            {"src": x, "src_key_padding_mask": PADDED},
        ),
        "causal encoder": (
            nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False),
            {
                "src": x,
                "mask": torch.zeros(S, S).masked_fill(CAUSAL, -torch.inf),
                "is_causal": True,
            },
        ),
        "decoder": (
            nn.TransformerDecoder(decoder, 2),
            {
                "tgt": y.transpose(0, 1),
                "memory": x.transpose(0, 1),
                "tgt_mask": CAUSAL[:T, :T],
                "tgt_is_causal": True,
                "memory_key_padding_mask": PADDED,
            },
        ),
        # No memory mask: the decoder reads what the encoder made of padded rows.
        "transformer": (
            whole,
            {
                "src": x.transpose(0, 1),
                "tgt": y.transpose(0, 1),
                "tgt_mask": CAUSAL[:T, :T],
                "src_key_padding_mask": PADDED,
                "tgt_key_padding_mask": DECODER_PADDED,
            },
        ),
        "attention": (Residual(), {"x": y, **wide, "key_padding_mask": PADDED}),
    }


NAMES = list(models())


def results(model: nn.Module, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Outputs and gradients, those of packed projections part by part under the names of separate ones."""
    model.zero_grad(set_to_none=True)
    out = model(**arguments)
    weights = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weights).sum().backward()
    found = {"output": out.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        head, packed, kind = name.rpartition("in_proj_")
        if packed:
            for letter, part in zip("qkv", parameter.grad.tensor_split(3), strict=True):
                found[f"{head}{letter}_proj.{kind}"] = part
        else:
            found[name.replace("_proj_weight", "_proj.weight")] = parameter.grad
    return found


def in_float64(model: nn.Module, arguments: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    wide = {
        name: each.double() if isinstance(each, Tensor) and each.is_floating_point() else each
        for name, each in arguments.items()
    }
    return copy.deepcopy(model).double(), wide


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients_stay(name: str, training: bool) -> None:
    """By the accuracy rule: float32 against the stock model in float64, an error of at most twice stock float32's.

    What is 0 in truth, such as gradients of key biases, has the rounding of sums of E numbers of the pass as its floor.
    """
    model, arguments = models()[name]
    spread(model).train(training)
    exact = results(*in_float64(model, arguments))
    plain = results(model, arguments)
    assert hk.nn.replace_attention_(model) is model
    assert model.training == training
    assert not any(isinstance(part, nn.MultiheadAttention) for part in model.modules())
    found = results(model, arguments)
    assert found.keys() == exact.keys()
    largest = max(each.abs().max().item() for each in exact.values())
    floor = torch.finfo(torch.float32).eps * E**0.5 * largest
    for each, truth in exact.items():
        error, bound = ((x[each].double() - truth).abs().max().item() for x in (found, plain))
        assert error <= 2 * bound + floor, each


@pytest.mark.parametrize("name", NAMES)
def test_stock_state_dicts_load(name: str) -> None:
    model, arguments = models()[name]
    spread(model)
    ours = hk.nn.replace_attention_(copy.deepcopy(model))
    expected = model(**arguments)
    spread(ours)
    ours.load_state_dict(model.state_dict())
    torch.testing.assert_close(ours(**arguments), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_heads_and_conversion_take_it_then(name: str) -> None:
    model, arguments = models()[name]
    spread(model)
    for call in (
        lambda: hk.heads.attention_layers(model),
        lambda: hk.heads.gate(model, hk.nn.HardConcrete),
        lambda: hk.heads.prune(model, {0: [1]}),
        lambda: collaborate(model, 8),
    ):
        with pytest.raises(ValueError, match=r"call hk\.nn\.replace_attention_\(model\) first"):
            call()
    before = model(**arguments)
    hk.nn.replace_attention_(model)
    hk.heads.gate(model, hk.nn.HardConcrete)
    model.train()(**arguments).sum().backward()
    layers = hk.heads.attention_layers(model)
    assert all(layer.gate.log_alpha.grad is not None for layer in layers)
    hk.heads.ungate(model)
    model.eval()
    collaborate(model, E, progress=False)
    torch.testing.assert_close(model(**arguments), before, rtol=1e-4, atol=1e-4)
    hk.heads.close(model, {0: [1, 2]})
    closed = model(**arguments)
    hk.heads.prune(model, hk.heads.closed(model))
    torch.testing.assert_close(model(**arguments), closed, rtol=1e-4, atol=1e-4)


def test_what_the_modules_were() -> None:
    model, _ = models()["attention"]
    model.double().attention.q_proj_weight.requires_grad_(False)
    shared = nn.ModuleDict({"one": model, "other": model})
    hk.nn.replace_attention_(shared)
    attention = shared["one"].attention
    assert attention is shared["other"].attention
    assert attention.q_proj.weight.dtype == torch.float64
    asked = {name: each.requires_grad for name, each in attention.named_parameters()}
    assert asked == {f"{name}_proj.weight": name != "q" for name in ("q", "k", "v", "out")}


class Own(nn.MultiheadAttention):
    def forward(self, *arguments: Any, **options: Any) -> Any:
        return super().forward(*arguments, **options)


def tied() -> nn.Module:
    model = nn.ModuleList(nn.MultiheadAttention(E, H) for _ in range(3))
    model[2].out_proj.weight = model[1].out_proj.weight
    return model


def with_hook() -> nn.Module:
    model = nn.ModuleList(nn.MultiheadAttention(E, H) for _ in range(3))
    model[1].register_forward_hook(lambda *call: None)
    return model


def parametrised() -> nn.Module:
    model = nn.ModuleList(nn.MultiheadAttention(E, H) for _ in range(3))
    nn.utils.parametrizations.weight_norm(model[1], "in_proj_weight")
    return model


def second(**options: Any) -> nn.Module:
    return nn.ModuleList([nn.MultiheadAttention(E, H), nn.MultiheadAttention(E, H, **options)])


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (second(add_bias_kv=True), "module '1' has add_bias_kv"),
        (second(add_zero_attn=True), "module '1' has add_zero_attn"),
        (nn.Sequential(Own(E, H)), "module '0' is a Own with an overridden forward"),
        (tied(), "module '1' shares its out_proj.weight with another module"),
        (with_hook(), r"module '1' has forward hooks, .*handle\.remove"),
        (parametrised(), "module '1' has parametrised weights"),
        (nn.ModuleDict({"base_layer": nn.MultiheadAttention(E, H)}), "has an adapter; merge it"),
        (nn.MultiheadAttention(E, H), r"from_torch\(model\)"),
        (nn.Linear(2, 2), r"without torch\.nn\.MultiheadAttention"),
        ([], "model is a list"),
    ],
)
def test_what_can_not_be_replaced(model: Any, match: str) -> None:
    before = list(model.modules()) if isinstance(model, nn.Module) else []
    with pytest.raises((TypeError, ValueError), match=match):
        hk.nn.replace_attention_(model)
    if before:
        assert list(model.modules()) == before


def test_ctrl_c_leaves_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(**LAYER, batch_first=True), 2)
    before = list(model.modules())
    setattr_, calls = nn.Module.__setattr__, []

    def interrupted(self: nn.Module, name: str, value: Any) -> None:
        if name == "self_attn" and isinstance(value, hk.nn.GatedMultiheadAttention):
            if calls:
                raise KeyboardInterrupt
            calls.append(name)
        setattr_(self, name, value)

    monkeypatch.setattr(nn.Module, "__setattr__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hk.nn.replace_attention_(model)
    assert calls
    assert list(model.modules()) == before
    assert model.use_nested_tensor
