"""`hk.nn.GatedMultiheadAttention` against `torch.nn.MultiheadAttention` and against the formula in float64."""

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
    CAUSAL,
    PADDED,
    B,
    E,
    Gates,
    H,
    S,
    T,
    formula,
    gradients,
    layer_of,
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


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal hint": {"attn_mask": CAUSAL, "is_causal": True},
    "causal tensor": {"attn_mask": CAUSAL},
    "padding and causal": {"key_padding_mask": PADDED, "attn_mask": CAUSAL, "is_causal": True},
    "per head": {"attn_mask": (torch.arange(B * H * S * S).view(B * H, S, S) % 5 == 1)},
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_self_attention_is_that_of_torch(masks: dict[str, Any]) -> None:
    theirs = torch_attention()
    ours = hk.nn.GatedMultiheadAttention.from_torch(theirs)
    x = torch.randn(B, S, E)
    expected = theirs(x, x, x, need_weights=False, **masks)[0]
    out = ours(x, x, x, **masks)[0]
    real = ~PADDED if "key_padding_mask" in masks else torch.ones(B, S, dtype=torch.bool)
    assert_alike(out[real], expected[real])
    assert_alike(out[~real], ours.out_proj.bias.expand_as(out[~real]))
    assert_alike(ours(x, **masks)[0], out)


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


# ---------------------------------------------------------------------- the formula
@given(
    sizes=st.tuples(*(st.integers(1, 4) for _ in range(7))),
    kind=st.sampled_from(["self", "cross"]),
    causal=st.booleans(),
)
def test_any_shape_is_the_formula(sizes: tuple[int, ...], kind: str, causal: bool) -> None:
    b, t, s, key_heads, group, D, Dv = sizes
    layer = layer_of(
        embed_dim=6, num_heads=key_heads * group, num_key_heads=key_heads, head_dim=D, value_dim=Dv
    )
    x = torch.randn(b, t, 6).double()
    y = x if kind == "self" else torch.randn(b, s, 6).double()
    visible = torch.ones(b, layer.num_heads, t, y.shape[1], dtype=torch.bool)
    expected = formula(layer, x, y, visible.tril() if causal else visible)
    assert_alike(layer(x, y, is_causal=causal)[0], expected)


@pytest.mark.parametrize("output_gate", ["head", "element"])
def test_gates(output_gate: str) -> None:
    """An output gate beside a head gate; test_modules.py has head gates alone."""
    layer = layer_of(output_gate=output_gate, num_key_heads=2)
    layer.head_gate = Gates([0.0, 1.0, 0.25, -2.0])
    x = torch.randn(B, S, E).double()
    logits = layer.gate_proj(x).unflatten(2, (H, -1)).transpose(1, 2)
    assert logits.shape[3] == (1 if output_gate == "head" else layer.value_dim)
    gates = layer.head_gate.gates[:, None, None] / (1 + torch.exp(-logits))
    out, wanted = layer(x)[0], formula(layer, x, x, gates=gates)
    assert_alike(out, wanted)
    leaves = list(layer.parameters())
    assert_alike(gradients(out, *leaves), gradients(wanted, *leaves))


def test_head_gate_says_whether_closed_heads_have_a_gradient() -> None:
    layer, x = layer_of(), torch.randn(B, S, E).double()
    gate = layer.head_gate = Gates([0.0, 1.0, 1.0, 1.0])
    layer(x)[0].square().sum().backward()
    assert gate.gates.grad is not None
    assert gate.gates.grad[0] != 0
    gate.closed_grad, gate.gates.grad = False, None
    layer(x)[0].square().sum().backward()
    assert gate.gates.grad[0] == 0
