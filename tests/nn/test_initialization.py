"""`hk.nn.mixing_init_` and `hk.nn.ds_init_`."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import heads_kernels as hk
from tests.support.refusals import assert_refused


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


def test_other_mixing() -> None:
    parameter = nn.Parameter(torch.zeros(2, 4))
    assert hk.nn.mixing_init_(parameter, "ones").requires_grad
    assert parameter.eq(1).all()
    normal = hk.nn.mixing_init_(torch.empty(100, 200), "normal")
    assert normal.std().item() == pytest.approx(0.2, rel=0.05)
    assert abs(normal.mean().item()) < 0.01
    xavier = hk.nn.mixing_init_(torch.empty(100, 200), "xavier")
    bound = math.sqrt(6 / 300)
    assert 0.99 * bound < xavier.abs().max().item() <= bound


@pytest.mark.parametrize("kdim", [None, 96])
def test_variance_falls_with_depth(kdim: int | None) -> None:
    """`alpha**2 / l` times that of Xavier, `2 / (d_i + d_o)`, of packed projections one by one; biases are 0."""
    layer = nn.TransformerDecoderLayer(128, 4, 512)
    layer.multihead_attn = nn.MultiheadAttention(128, 4, kdim=kdim, vdim=kdim)
    layer.self_attn = hk.nn.CollaborativeMultiheadAttention(128, 4, 32)
    for depth in (1, 4, 9):
        for parameter in layer.parameters():
            nn.init.constant_(parameter, 7.0)
        assert hk.nn.ds_init_(layer, depth, 0.8) is layer
        for name, parameter in layer.named_parameters():
            if name.startswith("norm") or name.endswith("mixing"):
                assert parameter.eq(7).all()
            elif parameter.dim() == 1:
                assert parameter.eq(0).all()
            else:
                for matrix in parameter.chunk(3 if "in_proj" in name else 1):
                    xavier = 2.0 / sum(matrix.shape)
                    variance = 0.64 / depth * xavier
                    assert matrix.var().item() == pytest.approx(variance, rel=0.1)
                    assert matrix.abs().max() <= math.sqrt(3 * variance) * (1 + 1e-6)


def test_bad_arguments() -> None:
    assert_refused(
        ((torch.zeros(4, 3),), "kind is 'concatenate', but 4 heads share 3 features; use Ds of 4"),
        ((torch.zeros(4, 8), "uniform"), "kind is 'uniform'"),
        ((torch.zeros(4), "ones"), r"tensor has shape \[4\]"),
        ((torch.zeros(4, 8).long(),), TypeError, "tensor has dtype torch.int64"),
        (([[1.0]],), TypeError, "tensor is a list"),
        of=hk.nn.mixing_init_,
    )
    linear = nn.Linear(2, 2)
    assert_refused(
        ((linear, 0), "layer is 0; pass an int of at least 1"),
        ((linear, 1.0), TypeError, "layer is a float"),
        *(((linear, 1, alpha), f"alpha is {alpha!r}") for alpha in (math.nan, -1.0, "1")),
        ((nn.LayerNorm(2), 1), r"module is a LayerNorm without nn\.Linear"),
        ((torch.zeros(2), 1), TypeError, "module is a Tensor"),
        of=hk.nn.ds_init_,
    )
