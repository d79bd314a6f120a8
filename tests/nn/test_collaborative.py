"""`hk.nn.CollaborativeMultiheadAttention` against eq. 7 of its paper in float64, and against ordinary attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.nn_layers import PADDED, B, E, H, S, T, gradients, spread, torch_attention

Ds = 10
FORMS: dict[str, dict[str, Any]] = {
    "content": {},
    "biases": {"qk_bias": True, "content_bias": False},
    "both": {"qk_bias": True},
    "none": {"bias": False, "content_bias": False},
}


def layer_of(**options: Any) -> hk.nn.CollaborativeMultiheadAttention:
    sizes = {"embed_dim": E, "num_heads": H, "shared_dim": Ds, "dtype": torch.float64}
    return spread(hk.nn.CollaborativeMultiheadAttention(**{**sizes, **options}))


def formula(
    layer: hk.nn.CollaborativeMultiheadAttention, x: Tensor, y: Tensor, visible: Tensor
) -> Tensor:
    """Eq. 7 by the weights, head by head; `visible` is `[B, H, T, S]`."""
    output = layer.out_proj(torch.zeros(*x.shape[:2], layer.out_proj.in_features, dtype=x.dtype))
    query, key = layer.q_proj(x), layer.k_proj(y)
    for h in range(layer.num_heads):
        scores = query @ torch.diag(layer.mixing[h]) @ key.mT
        if layer.content_proj is not None:
            scores = scores + (y @ layer.content_proj.weight[h])[:, None, :]
        scores = (layer.scale * scores).masked_fill(~visible[:, h], -1e30)
        features = slice(h * layer.value_dim, (h + 1) * layer.value_dim)
        head = scores.softmax(-1) @ layer.v_proj(y)[..., features]
        head = head * visible[:, h].any(-1, keepdim=True)
        output = output + head @ layer.out_proj.weight[:, features].mT
    return output


# ---------------------------------------------------------------------- the formula
@given(
    options=st.sampled_from(list(FORMS.values())),
    sizes=st.tuples(*(st.integers(1, 4) for _ in range(7))),
    causal=st.booleans(),
)
def test_any_shape_is_the_formula(
    options: dict[str, Any], sizes: tuple[int, ...], causal: bool
) -> None:
    """Outputs and all gradients, with padded keys."""
    b, t, s, heads, shared, Dv, width = sizes
    layer = layer_of(
        embed_dim=6, num_heads=heads, shared_dim=shared, value_dim=Dv, kdim=width, vdim=width,
        mixing_init="normal", scale=1.3, **options,
    )  # fmt: skip
    x, y = torch.randn(b, t, 6).double(), torch.randn(b, s, width).double()
    hidden = torch.rand(b, s) > 0.7
    visible = ~hidden[:, None, None] & torch.ones(b, heads, t, s, dtype=torch.bool)
    out = layer(x, y, key_padding_mask=hidden, is_causal=causal)[0]
    expected = formula(layer, x, y, visible.tril() if causal else visible)
    assert_alike(out, expected)
    leaves = list(layer.parameters())
    assert_alike(gradients(out, *leaves), gradients(expected, *leaves))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_zeros_of_mixing_train_unless_ragged(ragged: bool, gated: bool) -> None:
    """Whatever a head gate says of its own zeros."""
    layer = hk.nn.CollaborativeMultiheadAttention(E, H, Ds, ragged=ragged)
    if gated:
        layer.head_gate = hk.nn.HardConcrete(H)
    layer(torch.randn(B, T, E))[0].square().sum().backward()
    zeros = layer.mixing == 0
    assert layer.mixing.grad is not None
    assert layer.mixing.grad[~zeros].any()
    assert layer.mixing.grad[zeros].any() != ragged


# ---------------------------------------------------------------------- ordinary attention is a special case
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("both", {}),
        ("none", {"bias": False}),
        ("content", {"bias": False}),
        ("content", {"kdim": 10, "vdim": 12}),
        ("biases", {"kdim": 10, "vdim": 12}),
    ],
)
def test_state_dict_of_torch_loads_exactly(form: str, options: dict[str, Any]) -> None:
    theirs = torch_attention(**options)
    layer = hk.nn.CollaborativeMultiheadAttention(
        E, H, E, **(FORMS[form] | options), mixing_init="normal"
    )
    query = torch.randn(B, T, E)
    key, value = (torch.randn(B, S, width) for width in (theirs.kdim, theirs.vdim))
    expected = theirs(query, key, value, key_padding_mask=PADDED, need_weights=False)[0]
    gated = hk.nn.GatedMultiheadAttention.from_torch(theirs)
    for state in (theirs.state_dict(), gated.state_dict()):
        layer.reset_parameters()
        layer.load_state_dict(state)
        out = layer(query, key, value, key_padding_mask=PADDED)[0]
        assert_alike(out, expected)
    assert layer.mixing.equal(torch.block_diag(*torch.ones(H, 1, E // H)))


def test_wide_heads_load_with_their_scale() -> None:
    gated = hk.nn.GatedMultiheadAttention(E, H, head_dim=5, value_dim=3, output_gate="head")
    nn.init.normal_(gated.double().q_proj.bias)
    layer = layer_of(shared_dim=20, value_dim=3, scale=gated.scale, output_gate="head")
    layer.load_state_dict(gated.state_dict())
    x = torch.randn(B, T, E).double()
    assert_alike(layer(x)[0], gated(x)[0])


def test_state_dict_that_does_not_fit() -> None:
    state = nn.ModuleDict({"a": torch_attention()}).state_dict()
    for shared_dim, options, match in (
        (12, {}, r"a\.q_proj\.weight has 24 rows, but shared_dim is 12 .*shared_dim=24 fits"),
        (24, {"content_bias": False}, r"a\.q_proj\.bias is in the state dict.*content_bias=True"),
    ):
        layer = hk.nn.CollaborativeMultiheadAttention(E, H, shared_dim, **options)
        with pytest.raises(ValueError, match=match):
            nn.ModuleDict({"a": layer}).load_state_dict(state)
    grouped = hk.nn.GatedMultiheadAttention(E, H, num_key_heads=2).state_dict()
    with pytest.raises(ValueError, match=r"k_proj\.weight has 12 rows.*repeat grouped keys"):
        layer_of(shared_dim=E).load_state_dict(grouped)
    with pytest.raises(RuntimeError, match=r"size mismatch for v_proj\.weight"):
        layer_of(shared_dim=E, value_dim=2).load_state_dict(torch_attention().state_dict())


# ---------------------------------------------------------------------- parameters
def query_key_parameters(layer: nn.Module) -> int:
    """Weights that make the scores."""
    names = ("q_proj", "k_proj", "mixing", "content_proj")
    return sum(p.numel() for name, p in layer.named_parameters() if name.startswith(names))


@pytest.mark.parametrize("shared_dim", [768, 128])
def test_parameters_and_scale_of_a_layer_of_bert(shared_dim: int) -> None:
    """tests/convert/test_counts.py has these numbers in whole models, as published."""
    ordinary = hk.nn.GatedMultiheadAttention(768, 12, device="meta")
    layer = hk.nn.CollaborativeMultiheadAttention(768, 12, shared_dim, device="meta")
    assert layer.scale == ordinary.scale  # whatever heads share
    assert query_key_parameters(ordinary) == 2 * 768 * 768 + 2 * 768
    assert query_key_parameters(layer) == (2 * 768 + 12) * shared_dim + 12 * 768
