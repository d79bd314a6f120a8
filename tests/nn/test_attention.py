"""Attention modules against their formulas in float64, and a module made of `torch.nn.MultiheadAttention`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.nn_layers import (
    PADDED,
    B,
    E,
    Gates,
    H,
    S,
    T,
    by_head,
    formula,
    gradients,
    layer_of,
    shared_layer_of,
    torch_attention,
)


# ---------------------------------------------------------------------- torch.nn.MultiheadAttention
def test_from_torch_keeps_what_the_module_was() -> None:
    theirs = torch_attention(dropout=0.1).double().train()
    theirs.in_proj_weight.requires_grad_(False)
    with torch.no_grad():
        ours = hk.nn.GatedMultiheadAttention.from_torch(theirs)
    assert ours.training
    assert ours.dropout == 0.1
    assert ours.q_proj.weight.dtype == torch.float64
    asked = {name for name, each in ours.named_parameters() if not each.requires_grad}
    assert asked == {"q_proj.weight", "k_proj.weight", "v_proj.weight"}
    ours.out_proj.weight.data.zero_()
    assert theirs.out_proj.weight.any()
    assert not hk.nn.GatedMultiheadAttention.from_torch(nn.MultiheadAttention(E, H)).batch_first
    ours.load_state_dict(theirs.state_dict(), assign=True)
    storages = {parameter.untyped_storage().data_ptr() for parameter in ours.parameters()}
    assert len(storages) == 8  # the parts of a packed projection are apart


@pytest.mark.parametrize(
    ("attention", "match"),
    [
        (nn.Linear(2, 2), "attention is a Linear; pass a torch.nn.MultiheadAttention"),
        (nn.MultiheadAttention(E, H, add_zero_attn=True), "attention has add_zero_attn"),
        (nn.MultiheadAttention(E, H, add_bias_kv=True), "bias_k is in the state"),
    ],
)
def test_from_torch_refuses(attention: Any, match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        hk.nn.GatedMultiheadAttention.from_torch(attention)


# ---------------------------------------------------------------------- masks
def test_the_hint_is_taken_and_the_tensor_is_not_read() -> None:
    layer, x = layer_of(dtype=torch.float32), torch.randn(B, S, E)
    nonsense = torch.full((3, 1), torch.nan)
    out = layer(x, attn_mask=nonsense, is_causal=True)[0]
    assert_alike(out, layer(x, mask=hk.Mask(causal=True))[0])


def test_native_masks_and_those_of_the_module_hide_the_same() -> None:
    layer, x, y = layer_of(), torch.randn(B, T, E).double(), torch.randn(B, S, E).double()
    rows = torch.tensor([[False] * T, [True] * 2 + [False] * 3])
    native = layer(x, y, mask=hk.Mask(key_mask=~PADDED, query_mask=~rows))[0]
    visible = (~PADDED[:, None, None, :] & ~rows[:, None, :, None]).expand(B, H, T, S)
    assert_alike(native, formula(layer, x, y, visible))
    both = layer(x, y, key_padding_mask=PADDED, mask=hk.Mask(query_mask=~rows))[0]
    assert_alike(both, native)


# ---------------------------------------------------------------------- the formulas
FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ordinary": (layer_of, {}),
    "entmax": (layer_of, {"entmax": True}),
    "content bias": (shared_layer_of, {}),
    "shared biases": (shared_layer_of, {"qk_bias": True, "content_bias": False}),
    "both": (shared_layer_of, {"qk_bias": True}),
    "no bias": (shared_layer_of, {"bias": False, "content_bias": False}),
}


@given(
    form=st.sampled_from(list(FORMS)),
    sizes=st.tuples(*(st.integers(1, 4) for _ in range(8))),
    causal=st.booleans(),
    alone=st.booleans(),
)
def test_any_shape_is_the_formula(form: str, sizes: tuple[int, ...], causal: bool, alone: bool) -> None:
    """Outputs and all gradients, with padded keys, of self-attention and of cross-attention of other widths."""
    b, t, s, key_heads, group, D, Dv, width = sizes
    make, options = FORMS[form]
    options = options | {"embed_dim": 6, "num_heads": key_heads * group, "value_dim": Dv}
    options |= {"scale": 1.3} | ({} if alone else {"kdim": width, "vdim": width})
    if make is layer_of:
        options |= {"num_key_heads": key_heads, "head_dim": D}
    else:
        options |= {"num_value_heads": key_heads, "shared_dim": D, "mixing_init": "normal"}
    layer = make(**options)
    x, y = torch.randn(b, t, 6).double(), torch.randn(b, s, width).double()
    y = x if alone else y
    hidden = torch.rand(b, y.shape[1]) > 0.7
    visible = ~hidden[:, None, None] & torch.ones(b, 1, t, y.shape[1], dtype=torch.bool)
    visible = visible & ~hidden[:, None, :, None] if alone else visible
    out = layer(x, y, key_padding_mask=hidden, is_causal=causal)[0]
    expected = formula(layer, x, y, visible.tril() if causal else visible)
    assert_alike(out, expected)
    leaves = list(layer.parameters())
    assert_alike(gradients(out, *leaves), gradients(expected, *leaves))


def test_the_scale_is_that_of_ordinary_heads() -> None:
    """Whatever heads share, and however wide they are."""
    assert hk.nn.CollaborativeMultiheadAttention(E, H, 10).scale == (E / H) ** -0.5
    assert hk.nn.GatedMultiheadAttention(E, H, head_dim=9).scale == 9**-0.5


# ---------------------------------------------------------------------- gates
@pytest.mark.parametrize("output_gate", ["head", "element"])
def test_gates(output_gate: str) -> None:
    """An output gate beside a head gate; test_modules.py has head gates alone."""
    layer = layer_of(output_gate=output_gate, num_key_heads=2)
    layer.head_gate = Gates([0.0, 1.0, 0.25, -2.0])
    x = torch.randn(B, S, E).double()
    logits = by_head(layer.gate_proj(x), 1 if output_gate == "head" else layer.value_dim)
    assert logits.shape[1] == H
    gates = layer.head_gate.gates[:, None, None] / (1 + torch.exp(-logits))
    out, wanted = layer(x)[0], formula(layer, x, x, gates=gates)
    assert_alike(out, wanted)
    leaves = list(layer.parameters())
    assert_alike(gradients(out, *leaves), gradients(wanted, *leaves))


def test_head_gate_says_whether_closed_heads_have_a_gradient() -> None:
    layer, x = layer_of(), torch.randn(B, S, E).double()
    gate = layer.head_gate = Gates([0.0, 1.0, 1.0, 1.0])
    for gate.closed_grad in (True, False):
        gate.gates.grad = None
        layer(x)[0].square().sum().backward()
        assert bool(gate.gates.grad[0]) == gate.closed_grad


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_zeros_of_mixing_train_unless_ragged(ragged: bool, gated: bool) -> None:
    """Whatever a head gate says of its own zeros."""
    layer = hk.nn.CollaborativeMultiheadAttention(E, H, 10, ragged=ragged)
    if gated:
        layer.head_gate = hk.nn.HardConcrete(H)
    layer(torch.randn(B, T, E))[0].square().sum().backward()
    zeros = layer.mixing == 0
    assert layer.mixing.grad is not None
    assert layer.mixing.grad[~zeros].any()
    assert layer.mixing.grad[zeros].any() != ragged
