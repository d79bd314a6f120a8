"""Distances between heads: of modules, of heads that are the same, the embedding. test_statistics.py has families."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from tests.support import tiny_models
from tests.support.alike import assert_alike, rounding
from tests.support.nn_layers import Layers, spread

use = hk.integrations.transformers.use


def layers(count: int = 2) -> Layers:
    torch.manual_seed(0)
    make = hk.nn.GatedMultiheadAttention
    return Layers(*(spread(make(16, 4, dtype=torch.float64)) for _ in range(count)))


def test_heads_of_rotated_queries_and_keys_are_the_same() -> None:
    """`W_Q R` and `W_K R` give the same scores, though their columns may be orthogonal to those of the other head."""
    model = layers(1)
    layer = model.layers[0]
    rotation = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj):
            for parameter in (projection.weight, projection.bias):
                by_head = parameter.view(4, 4, -1)
                by_head[2] = rotation @ by_head[0]
    found = hk.analysis.distance(model, [torch.randn(3, 8, 16, dtype=torch.float64)])
    assert found.matrix[0, 2] < rounding(torch.float64)
    others = found.matrix[0, [1, 3]]
    assert (others > 1e-3).all()


def test_heads_that_look_at_different_tokens_are_ln_2_apart() -> None:
    """Heads 0 and 1 look at the first two tokens, 2 and 3 at the others: 0 within, ln 2 between; no odd head."""
    model = layers(1)
    layer = model.layers[0]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.q_proj.bias.fill_(1.0)
        layer.k_proj.weight.view(4, 4, 16)[:2, :, 0] = 500.0
        layer.k_proj.weight.view(4, 4, 16)[2:, :, 0] = -500.0
    x = torch.zeros(1, 6, 16, dtype=torch.float64)
    x[:, :2, 0] = 1.0
    found = hk.analysis.distance(model, [x])
    apart = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]).double()
    assert_alike(found.matrix, apart * math.log(2))
    assert_alike(found.within(), torch.tensor([math.log(2) * 2 / 3], dtype=torch.float64))
    points = found.embedding(1)
    assert_alike(points.abs(), torch.full((4, 1), math.log(2) ** 0.5 / 2, dtype=torch.float64))
    assert points[:, 0].sign().tolist() in ([1, 1, -1, -1], [-1, -1, 1, 1])


def test_the_odd_head_of_each_layer() -> None:
    model = layers(2)
    for odd, layer in zip((2, 0), model.layers, strict=True):
        with torch.no_grad():
            for projection in (layer.q_proj, layer.k_proj):
                for parameter in (projection.weight, projection.bias):
                    by_head = parameter.view(4, 4, -1)
                    by_head[[h for h in range(4) if h != odd]] = by_head[1].clone()
    found = hk.analysis.distance(model, [torch.randn(2, 8, 16, dtype=torch.float64)])
    assert found.odd() == [2, 0]
    assert (found.matrix >= 0).all()
    block = found.block(0)
    assert_alike(found.within()[0], block.sum() / 12)
    assert torch.equal(found.block(1), found.matrix[4:, 4:])


def test_the_embedding_has_the_distances_of_all_dimensions() -> None:
    """The root of the divergence is a distance between points, so that all dimensions give it exactly."""
    found = hk.analysis.distance(layers(2), [torch.randn(2, 9, 16, dtype=torch.float64)])
    points = found.embedding(8)
    assert_alike(torch.cdist(points, points).square(), found.matrix)
    assert_alike(found.embedding(), points[:, :2])
    spread_of = points.square().sum(0)
    assert (spread_of[:-1] >= spread_of[1:]).all()


class Branches(Layers):
    """Two layers, which may not run, or see other tokens."""

    def forward(self, x: Tensor, first: bool, second: bool) -> None:
        if first:
            self.layers[0](x)
        if second:
            self.layers[1](x[:, :3])


def test_bad_input() -> None:
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    for calls, words in (
        ([(False, False)], r"data reaches no layer of kind 'encoder'"),
        ([(True, False), (True, True)], r"data makes other layers run in one batch"),
        ([(True, True)], r"model has T 3 and S 3 in layer 1"),
    ):
        with pytest.raises(ValueError, match=words):
            hk.analysis.distance(Branches(*layers(2).layers), [(x, *call) for call in calls])
    model = use(tiny_models.build("bart"))
    data = [tiny_models.batch(model)]
    for kind, words in (
        (None, "None; pass one of 'encoder', 'decoder', 'cross'"),
        ("both", "'both'"),
    ):
        with pytest.raises(ValueError, match=f"kind is {words}"):
            hk.analysis.distance(model, data, kind=kind)
