"""Distances between heads: what a matrix of them says, and refusals. test_statistics.py has matrices of models."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from tests.support import tiny_models
from tests.support.alike import assert_alike
from tests.support.nn_layers import Layers

use = hk.integrations.transformers.use


def distances(points: Tensor) -> hk.analysis.HeadDistance:
    """Of a layer of three heads and one of four, whose squared distances are those of `points` `[7, D]`."""
    heads = [(0, head) for head in range(3)] + [(1, head) for head in range(4)]
    matrix = (points[:, None] - points).square().sum(-1)
    return hk.analysis.HeadDistance("encoder", ("a", "b"), tuple(heads), matrix, rows=5)


def test_means_and_odd_heads_of_each_layer() -> None:
    found = distances(torch.tensor([0.0, 3.0, 1.0, 0.0, 0.0, 0.0, 2.0]).double()[:, None])
    assert found.block(0).tolist() == [[0, 9, 1], [9, 0, 4], [1, 4, 0]]
    assert_alike(found.within(), torch.tensor([28 / 6, 24 / 12], dtype=torch.float64))
    assert found.odd() == [1, 3]


def test_one_head_has_no_other() -> None:
    found = hk.analysis.HeadDistance("encoder", ("a",), ((0, 0),), torch.zeros(1, 1), rows=5)
    assert found.odd() == [None]
    assert found.within().isnan().all()


def test_the_embedding_has_the_distances_of_all_dimensions() -> None:
    found = distances(torch.randn(7, 3, dtype=torch.float64))
    points = found.embedding(3)
    assert_alike(torch.cdist(points, points).square(), found.matrix)
    assert_alike(found.embedding(), points[:, :2])
    spread = points.square().sum(0)
    assert (spread[:-1] >= spread[1:]).all()
    assert (points.gather(0, points.abs().argmax(0, keepdim=True)) > 0).all()


def test_heads_that_look_at_different_tokens_are_ln_2_apart() -> None:
    """Heads 0 and 1 look at the first two tokens, 2 and 3 at the others: 0 within, ln 2 between."""
    layer = hk.nn.GatedMultiheadAttention(16, 4, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.q_proj.bias.fill_(1.0)
        layer.k_proj.weight.view(4, 4, 16)[:2, :, 0] = 500.0
        layer.k_proj.weight.view(4, 4, 16)[2:, :, 0] = -500.0
    x = torch.zeros(1, 6, 16, dtype=torch.float64)
    x[:, :2, 0] = 1.0
    found = hk.analysis.distance(layer, [(x, x, x)])
    apart = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]).double()
    assert_alike(found.matrix, apart * math.log(2))


class Branches(Layers):
    """Two layers, which may not run, or see other tokens."""

    def forward(self, x: Tensor, first: bool, second: bool) -> None:
        if first:
            self.layers[0](x)
        if second:
            self.layers[1](x[:, :3])


def test_bad_input() -> None:
    model = Branches(*(hk.nn.GatedMultiheadAttention(16, 4) for _ in range(2)))
    for calls, words in (
        ([(False, False)], r"data reaches no layer of kind 'encoder'"),
        ([(True, False), (True, True)], r"data makes other layers run in one batch"),
        ([(True, True)], r"model has T 3 and S 3 in layer 1"),
    ):
        with pytest.raises(ValueError, match=words):
            hk.analysis.distance(model, [(torch.randn(1, 5, 16), *call) for call in calls])
    translator = use(tiny_models.build("bart"))
    for kind, words in (
        (None, "None; pass one of 'encoder', 'decoder', 'cross'"),
        ("both", "'both'"),
    ):
        with pytest.raises(ValueError, match=f"kind is {words}"):
            hk.analysis.distance(translator, [tiny_models.batch(translator)], kind=kind)
