"""`hk.nn.mixing_init_` and `hk.nn.ds_init_`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import heads_kernels as hk


# ---------------------------------------------------------------------- mixing
@given(H=st.integers(1, 20), extra=st.integers(0, 40))
def test_concatenated_heads_part_the_features_evenly(H: int, extra: int) -> None:
    mixing = torch.full((H, H + extra), torch.nan)
    assert hk.nn.mixing_init_(mixing) is mixing
    assert ((mixing == 0) | (mixing == 1)).all()
    assert mixing.sum(0).eq(1).all()  # every feature is of one head
    sizes = mixing.sum(1)
    assert sizes.min() >= 1
    assert sizes.max() - sizes.min() <= 1
    assert mixing.argmax(0).diff().ge(0).all()  # and heads are in order


def test_concatenation_of_equal_heads_is_the_block_indicator() -> None:
    mixing = hk.nn.mixing_init_(torch.empty(3, 12), "concatenate")
    assert mixing.equal(torch.block_diag(*torch.ones(3, 1, 4)))


def test_other_mixing() -> None:
    assert hk.nn.mixing_init_(torch.empty(3, 2), "ones").eq(1).all()
    normal = hk.nn.mixing_init_(torch.empty(100, 200), "normal")
    assert normal.std().item() == pytest.approx(0.2, rel=0.05)
    assert abs(normal.mean().item()) < 0.01
    xavier = hk.nn.mixing_init_(torch.empty(100, 200), "xavier")
    bound = math.sqrt(6 / 300)
    assert 0.99 * bound < xavier.abs().max().item() <= bound


def test_a_parameter_is_filled_in_place() -> None:
    mixing = nn.Parameter(torch.zeros(2, 4))
    hk.nn.mixing_init_(mixing, "ones")
    assert mixing.requires_grad
    assert mixing.eq(1).all()


@pytest.mark.parametrize(
    ("tensor", "kind", "error", "match"),
    [
        (torch.zeros(4, 3), "concatenate", ValueError, "4 heads share 3 features; use Ds of 4"),
        (torch.zeros(4, 8), "uniform", ValueError, "kind is 'uniform'; use one of 'concatenate'"),
        (torch.zeros(4), "ones", ValueError, r"tensor has shape \[4\]; pass \[H, Ds\]"),
        (torch.zeros(4, 8, dtype=torch.int64), "ones", TypeError, "tensor has dtype torch.int64"),
        ([[1.0]], "ones", TypeError, r"tensor is \[\[1\.0\]\]"),
    ],
)
def test_bad_mixing(tensor: Any, kind: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        hk.nn.mixing_init_(tensor, kind)


# ---------------------------------------------------------------------- depth
def matrices(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Matrices of a Transformer layer by name, those of packed projections apart."""
    made = {name: p.detach() for name, p in layer.named_parameters() if p.dim() == 2}
    for name in [name for name in made if name.endswith("in_proj_weight")]:
        made |= {f"{name}.{i}": part for i, part in enumerate(made.pop(name).chunk(3))}
    return made


@pytest.mark.parametrize("kdim", [None, 96])
def test_variance_falls_with_depth(kdim: int | None) -> None:
    """`alpha**2 / l` times that of Xavier, `2 / (d_i + d_o)`, and all within the bound."""
    layer = nn.TransformerDecoderLayer(128, 4, 512)
    if kdim:
        layer.multihead_attn = nn.MultiheadAttention(128, 4, kdim=kdim, vdim=kdim)
    alpha, variances = 0.8, {}
    for depth in (1, 4, 9):
        assert hk.nn.ds_init_(layer, depth, alpha) is layer
        named = matrices(layer)
        assert len(named) == 10
        for name, matrix in named.items():
            xavier = 2.0 / sum(matrix.shape)
            variances[name, depth] = matrix.var().item()
            assert variances[name, depth] == pytest.approx(alpha**2 / depth * xavier, rel=0.05)
            assert matrix.abs().max() <= math.sqrt(3 * xavier / depth) * alpha * (1 + 1e-6)
    for name in named:
        assert variances[name, 1] / variances[name, 4] == pytest.approx(4, rel=0.07)
        assert variances[name, 1] / variances[name, 9] == pytest.approx(9, rel=0.07)


def test_biases_are_zero_and_the_rest_stays() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    layer.self_attn = hk.nn.CollaborativeMultiheadAttention(16, 4, 8)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 7.0)
    hk.nn.ds_init_(layer, 2)
    biases = [m.bias for m in layer.modules() if isinstance(m, nn.Linear) and m.bias is not None]
    assert len(biases) == 4
    assert all(bias.eq(0).all() for bias in biases)
    assert layer.self_attn.mixing.eq(7).all()
    assert layer.norm1.weight.eq(7).all()
    assert not layer.self_attn.q_proj.weight.eq(7).any()


@pytest.mark.parametrize(
    ("module", "layer", "alpha", "error", "match"),
    [
        (nn.Linear(2, 2), 0, 1.0, ValueError, "layer is 0; pass an int of at least 1"),
        (nn.Linear(2, 2), 1.0, 1.0, TypeError, "layer is a float"),
        (nn.Linear(2, 2), 1, 0.0, ValueError, "alpha is 0.0"),
        (nn.Linear(2, 2), 1, math.nan, ValueError, "alpha is nan"),
        (nn.LayerNorm(2), 1, 1.0, ValueError, r"module is a LayerNorm without nn\.Linear"),
        (torch.zeros(2, 2), 1, 1.0, TypeError, "module is a Tensor"),
    ],
)
def test_bad_depth(
    module: Any, layer: Any, alpha: float, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        hk.nn.ds_init_(module, layer, alpha)
