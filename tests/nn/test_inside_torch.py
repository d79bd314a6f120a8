"""`hk.nn.GatedMultiheadAttention` in the layers of `torch.nn`, compiled, exported, in mixed precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.nn_layers import (
    CAUSAL,
    PADDED,
    B,
    E,
    Gates,
    H,
    S,
    T,
    assert_as_accurate_as,
    formula,
    layer_of,
)


# ---------------------------------------------------------------------- layers of torch.nn
def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    made = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True, **options)
    nn.init.normal_(made.self_attn.in_proj_weight, std=0.4)
    return made


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("built", ["before", "after"])
def test_inside_a_transformer_encoder(training: bool, grad: bool, built: str) -> None:
    """PyTorch's fused path, which would not call the module, is not taken, whenever the module came in."""
    layer = encoder_layer()
    theirs = nn.TransformerEncoder(layer, 2)
    if built == "after":
        ours = nn.TransformerEncoder(copy.deepcopy(layer), 2)
        for part in ours.layers:
            part.self_attn = hk.nn.GatedMultiheadAttention.from_torch(part.self_attn)
    else:
        layer.self_attn = hk.nn.GatedMultiheadAttention.from_torch(layer.self_attn)
        ours = nn.TransformerEncoder(layer, 2)
    theirs.train(training)
    ours.train(training)
    x = torch.randn(B, S, E)
    with torch.set_grad_enabled(grad):
        expected = theirs(x, src_key_padding_mask=PADDED)
        out = ours(x, src_key_padding_mask=PADDED)
    assert_alike(out[~PADDED], expected[~PADDED], dtype=torch.float32)
    calls = []
    ours.layers[1].self_attn.register_forward_hook(lambda *call: calls.append(call))
    with torch.set_grad_enabled(grad):
        ours(x, src_key_padding_mask=PADDED)
        ours(x, mask=torch.zeros(S, S).masked_fill(CAUSAL, -torch.inf))
    assert len(calls) == 2


@pytest.mark.parametrize("norm_first", [False, True])
def test_inside_a_transformer_decoder_layer(norm_first: bool) -> None:
    theirs = nn.TransformerDecoderLayer(
        E, H, 32, dropout=0.0, batch_first=True, norm_first=norm_first
    ).eval()
    ours = copy.deepcopy(theirs)
    ours.self_attn = hk.nn.GatedMultiheadAttention.from_torch(ours.self_attn)
    ours.multihead_attn = hk.nn.GatedMultiheadAttention.from_torch(ours.multihead_attn)
    x, memory = torch.randn(B, T, E), torch.randn(B, S, E)
    masks = {
        "tgt_mask": CAUSAL[:T, :T],
        "tgt_is_causal": True,
        "memory_key_padding_mask": PADDED,
    }
    assert_alike(ours(x, memory, **masks), theirs(x, memory, **masks), dtype=torch.float32)


# ---------------------------------------------------------------------- compiled and traced
def test_nothing_is_copied_around_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are views of the projections, and the output projection reads the heads in place."""
    layer, x = layer_of(num_key_heads=2), torch.randn(B, S, E).double()
    seen: dict[str, Tensor] = {}
    for name in ("q", "k", "v"):
        part = getattr(layer, f"{name}_proj")
        part.register_forward_hook(lambda _, args, out, name=name: seen.update({name: out}))
    operator: Callable[..., Tensor] = type(layer).operator

    def watched(**arguments: Any) -> Tensor:
        for name in ("query", "key", "value"):
            assert arguments[name].data_ptr() == seen[name[0]].data_ptr()
        seen["heads"] = operator(**arguments)
        return seen["heads"]

    monkeypatch.setattr(type(layer), "operator", staticmethod(watched))
    layer.out_proj.register_forward_pre_hook(lambda _, args: seen.update({"read": args[0]}))
    layer(x)
    assert seen["read"].data_ptr() == seen["heads"].data_ptr()


@pytest.mark.parametrize("output_gate", [None, "head"])
def test_compile(output_gate: str | None) -> None:
    layer = layer_of(output_gate=output_gate, dtype=torch.float32)
    layer.head_gate = hk.nn.FixedGate(torch.tensor([1.0, 0.0, 0.5, 1.0]))
    x = torch.randn(B, S, E)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for options in ({"is_causal": True}, {"key_padding_mask": PADDED, "need_statistics": True}):
        out, rows = compiled(x, **options)
        expected, expected_rows = layer(x, **options)
        assert_alike(out, expected)
        assert_alike(rows, expected_rows)
        grads = [
            torch.autograd.grad(o.square().sum(), layer.k_proj.weight)[0] for o in (out, expected)
        ]
        assert_alike(*grads)


def test_compiled_transformer_encoder() -> None:
    layer = encoder_layer()
    layer.self_attn = hk.nn.GatedMultiheadAttention.from_torch(layer.self_attn)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(B, S, E)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        out = compiled(x, src_key_padding_mask=PADDED)
        assert_alike(out, model(x, src_key_padding_mask=PADDED))


def test_export() -> None:
    layer, x = layer_of(dtype=torch.float32), torch.randn(B, S, E)
    with torch.no_grad():
        program = torch.export.export(layer, (x,), {"key_padding_mask": PADDED, "is_causal": True})
        out = program.module()(x, key_padding_mask=PADDED, is_causal=True)[0]
        expected = layer(x, key_padding_mask=PADDED, is_causal=True)[0]
    assert_alike(out, expected)


def test_autocast() -> None:
    layer, x = layer_of(dtype=torch.float32, output_gate="head"), torch.randn(B, S, E)
    layer.head_gate = Gates([0.5, 1.0, 0.0, 2.0])

    def plain(x: Tensor) -> Tensor:
        logits = layer.gate_proj(x).transpose(1, 2)[..., None]  # [B, H, T, 1]
        return formula(layer, x, x, gates=layer.head_gate.gates[:, None, None] * logits.sigmoid())

    with torch.autocast("cpu", torch.bfloat16):
        out, in_bfloat16 = layer(x)[0], plain(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert layer.head_gate.gates.grad is not None
    assert layer.head_gate.gates.grad.dtype == torch.float32
    layer.double()
    assert_as_accurate_as(out, in_bfloat16, plain(x.double()))


def test_gradcheck() -> None:
    layer = layer_of(embed_dim=4, num_heads=2, output_gate="element")
    gate = layer.head_gate = Gates([0.5, 2.0])
    gate.double()
    x, y = (torch.randn(1, n, 4).double().requires_grad_() for n in (2, 3))
    hidden = torch.tensor([[True, False, False]])

    def run(x: Tensor, y: Tensor, *parameters: Tensor) -> Tensor:
        named = dict(zip(dict(layer.named_parameters()), parameters, strict=True))
        options = {"key_padding_mask": hidden}
        out: Tensor = torch.func.functional_call(layer, named, (x, y), options)[0]
        return out

    assert torch.autograd.gradcheck(run, (x, y, *layer.parameters()), fast_mode=True)


def test_a_layer_on_the_meta_device() -> None:
    layer = hk.nn.GatedMultiheadAttention(E, H, output_gate="head", device="meta")
    assert all(parameter.is_meta for parameter in layer.parameters())
    assert layer.to_empty(device="cpu").q_proj.weight.shape == (E, E)
