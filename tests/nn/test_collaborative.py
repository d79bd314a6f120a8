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
from tests.support.nn_layers import B, E, H, T, gradients, spread

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
