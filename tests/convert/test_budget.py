"""Counts against the published tables and PyTorch's own counter, energy against SVDs, budgets against every choice."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heads_kernels.convert import Heads
from heads_kernels.convert.budget import Sizes, allot
from heads_kernels.convert.conversion import captured_energy
from tests.convert.random_heads import random_heads
from tests.ops.calls import counted
from tests.support.alike import assert_alike
from tests.support.nn_layers import random

H, D, D_in, D_in_k = 3, 4, 14, 10


def layer_of(strength: float = 1.0, scale: float = 0.5) -> Heads:
    heads = random_heads(H, D, D_in, D_in_k)
    return replace(heads, query=strength * heads.query, scale=scale)


NOTHING = Heads(torch.zeros(H, D, D_in), torch.zeros(H, D, D_in_k), 1.0)

# ---------------------------------------------------------------------- parameters
#: Of Cordonnier et al. 2020, tables 2 and 1, and the sizes between them: millions of parameters of the model, layers,
#: D_in, which is D_k before, and H; D_k and Ds after, and the millions then.
BERT_BASE, DISTILBERT, TRANSLATION_BASE = (108.3, 12, 768, 12), (66.4, 6, 768, 12), (60.9, 18, 512, 8)
PUBLISHED: list[tuple[tuple[float, int, int, int], int, int | None, float]] = [
    (BERT_BASE, 768, 768, 108.50), (BERT_BASE, 768, 512, 103.75), (BERT_BASE, 768, 384, 101.37),
    (BERT_BASE, 768, 256, 98.99), (BERT_BASE, 768, 128, 96.61), (DISTILBERT, 768, 384, 62.93),
    (TRANSLATION_BASE, 512, None, 60.9), (TRANSLATION_BASE, 256, None, 56.17),
    (TRANSLATION_BASE, 128, None, 53.81), (TRANSLATION_BASE, 64, None, 52.63),
]  # fmt: skip


@pytest.mark.parametrize(("model", "D_k", "Ds", "expected"), PUBLISHED)
def test_published_tables(model: tuple[float, int, int, int], D_k: int, Ds: int | None, expected: float) -> None:
    millions, layers, D_in, H = model
    before, after = Sizes(D_in, D_in, D_in, H), Sizes(D_in, D_in, D_k, H)
    change = layers * (after.parameters(Ds) - before.parameters())
    assert round(millions + change / 1e6, 2) == expected


def test_parameters_are_those_of_the_tensors() -> None:
    heads, sizes = layer_of(), Sizes(D_in, D_in_k, H * D, H)
    assert heads.sizes == sizes
    weights = heads.query.numel() + heads.key.numel()
    assert sizes.parameters() == weights + 2 * H * D
    assert replace(sizes, bias=False).parameters() == weights
    factors = heads.fit(9)
    tensors = factors.query, factors.key, factors.mixing, factors.content
    assert sizes.parameters(9) == sum(x.numel() for x in tensors)


# ---------------------------------------------------------------------- FLOPs
BERT = Sizes(768, 768, 768, 12)


@pytest.mark.parametrize(("Ds", "length"), [(512, 73), (384, 154), (256, 341), (96, 2688)])
def test_break_even_is_where_the_counts_cross(Ds: int, length: int) -> None:
    """Mixing and content left out, as the formula does."""
    D_in, H = BERT.D_in, BERT.H

    def cheaper(T: int) -> bool:
        mixing, content = T * H * Ds, 2 * T * D_in * H + H * T * T
        return BERT.flops(T, Ds) - mixing - content < BERT.flops(T)

    assert BERT.break_even(Ds) == length
    assert cheaper(length - 1)
    assert not cheaper(length + 1)


def test_break_even_without_either_side() -> None:
    sizes = Sizes(64, 64, 64, 4)
    assert sizes.break_even(64) == 0  # dense mixing of as many features: nothing is saved
    assert sizes.break_even(80) == 0
    # the same layer: never dearer
    assert sizes.break_even(64, 64) == math.inf
    assert sizes.break_even(80, 60) == 0
    assert sizes.break_even(32, 96) == round(2 * 64 * 32 / 32)


@pytest.mark.parametrize("Hk", [None, 2])
@pytest.mark.parametrize("Ds", [None, 20])
def test_matrix_products_are_those_that_pytorch_counts(Ds: int | None, Hk: int | None) -> None:
    """Converted, a layer has one key in the place of Hk; its values stay grouped."""
    T, D_in, D_in_k, H, D = 7, 12, 10, 4, 6
    x, y, heads = torch.randn(T, D_in), torch.randn(T, D_in_k), torch.randn(H, T, D)
    grouped = (Hk or H) * D
    found = [
        counted(lambda: x @ torch.randn(D_in, Ds or H * D)),
        counted(lambda: y @ torch.randn(D_in_k, Ds or grouped)),
        counted(lambda: torch.randn(H, T, Ds or D) @ torch.randn(H, Ds or D, T)),
        counted(lambda: torch.randn(H, T, T) @ heads),
        counted(lambda: y @ torch.randn(D_in_k, grouped)),
        counted(lambda: torch.randn(T, H * D) @ torch.randn(H * D, D_in)),
    ]
    if Ds is not None:
        found.append(T * H * Ds)  # one product for each element of each head's query
        found.append(counted(lambda: y @ torch.randn(D_in_k, H)) + H * T * T)
    assert Sizes(D_in, D_in_k, H * D, H, Hk).flops(T, Ds) == sum(found)


def test_ragged_heads_take_their_share() -> None:
    T, Ds = 64, 256
    saved = BERT.flops(T, Ds) - BERT.flops(T, Ds, executed_features=Ds)
    assert saved == (2 * T * T + T) * (BERT.H - 1) * Ds


# ---------------------------------------------------------------------- captured energy
def share(matrix: Tensor, rank: int) -> Any:
    squares = np.linalg.svd(matrix.numpy(), compute_uv=False)[:rank] ** 2
    return np.cumsum(squares) / squares.sum()


def test_captured_energy() -> None:
    heads = layer_of()
    found = captured_energy(heads)
    for h in range(H):
        query, key = heads.query[h], heads.key[h]
        np.testing.assert_allclose(found.query[h], share(query, D))
        np.testing.assert_allclose(found.key[h], share(key, D))
        np.testing.assert_allclose(found.product[h], share(query.T @ key, D))
    query, key = heads.query.flatten(0, 1), heads.key.flatten(0, 1)
    np.testing.assert_allclose(found.stacked_query, share(query, 12))
    np.testing.assert_allclose(found.stacked_key, share(key, 10))
    np.testing.assert_allclose(found.stacked_product, share(query.T @ key, 10))


def test_energy_of_rotated_heads() -> None:
    """The product does not see a rotation; that of rotated copies is of one head's rank, their projections are not."""
    heads, rotation = layer_of(), torch.linalg.qr(random(H, D, D)).Q
    rotated = captured_energy(Heads(rotation @ heads.query, rotation @ heads.key, heads.scale))
    expected = captured_energy(heads)
    assert_alike(rotated.product, expected.product)
    assert_alike(rotated.stacked_product, expected.stacked_product)
    copies = Heads(rotation @ heads.query[0], rotation @ heads.key[0], heads.scale)
    assert captured_energy(copies).stacked_product[D - 1] == pytest.approx(1)
    assert (captured_energy(NOTHING).product == 1).all()


# ---------------------------------------------------------------------- budgets
def solved(layers: list[Heads], params: int | None = None, error: float | None = None) -> list[int]:
    spectra = [heads.spectrum() for heads in layers]
    return allot([heads.sizes for heads in layers], spectra, params, error)


def cuts_of(layers: list[Heads]) -> list[Tensor]:
    """Of each layer the squared error at every dim, in squares of scores."""
    spectra = [heads.spectrum() for heads in layers]
    return [spectrum.score_square * spectrum.errors().square() for spectrum in spectra]


def total(cuts: list[Tensor], dims: Iterable[int]) -> float:
    return sum(float(cut[dim]) for cut, dim in zip(cuts, dims, strict=True))


def parameters(layers: list[Heads], dims: Iterable[int]) -> int:
    return sum(heads.sizes.parameters(dim) for heads, dim in zip(layers, dims, strict=True))


def test_budgets_of_parameters() -> None:
    """Layers that differ in strength and scale, against every other way to spend as much."""
    layers = [layer_of(), layer_of(strength=3), layer_of(scale=0.1)]
    cuts = cuts_of(layers)
    choices = list(itertools.product(range(1, H * D + 1), repeat=3))
    everything = parameters(layers, (H * D,) * 3)
    for params in (everything // 3, everything // 2, everything - 1, everything, 10**9):
        dims = solved(layers, params=params)
        assert parameters(layers, dims) <= params
        best = min(total(cuts, each) for each in choices if parameters(layers, each) <= params)
        assert total(cuts, dims) == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert dims == [H * D] * 3


@pytest.mark.parametrize("error", [0.0, 0.05, 0.3, 2.0])
def test_budgets_of_error(error: float) -> None:
    layers = [layer_of(), layer_of(strength=3)]
    cuts = cuts_of(layers)
    whole = total(cuts, (0, 0))
    choices = itertools.product(range(1, H * D + 1), repeat=2)
    fewest = min(sum(each) for each in choices if (total(cuts, each) / whole) ** 0.5 <= error + 1e-9)
    dims = solved(layers, error=error)
    assert (total(cuts, dims) / whole) ** 0.5 <= error + 1e-6
    assert sum(dims) == fewest


def test_a_feature_that_costs_more_has_to_bring_more() -> None:
    """Wide inputs of keys against narrow ones, the same singular values in both."""
    # Of some draws the last narrow feature brings less than the first wide one.
    torch.manual_seed(0)
    narrow = layer_of()
    wide = Heads(narrow.query, torch.nn.functional.pad(narrow.key, (0, 500)), narrow.scale)
    dims = solved([narrow, wide], params=Sizes(D_in, 510, 12, H).parameters(8) + 400)
    assert dims[0] == H * D > dims[1]


def test_a_layer_without_weights_keeps_one_feature() -> None:
    assert solved([NOTHING, layer_of()], error=0.0) == [1, H * D]
