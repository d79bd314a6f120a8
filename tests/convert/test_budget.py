"""Captured energy against dense SVDs, and budgets against trying everything."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heads_kernels.convert import Heads
from heads_kernels.convert.counts import Sizes
from heads_kernels.convert.curves import captured_energy
from heads_kernels.convert.dims import allot
from tests.convert.random_heads import normal
from tests.support.alike import assert_alike

H, D, D_in, D_in_k = 3, 4, 14, 10


def random_heads(H: int = H, D: int = D, strength: float = 1.0, scale: float = 0.5) -> Heads:
    fall = strength * torch.logspace(0, -1, D, dtype=torch.float64)[:, None]
    return Heads(normal(H, D, D_in) * fall, normal(H, D, D_in_k), scale, normal(H, D))


def share(matrix: Tensor, rank: int) -> Any:
    squares = np.linalg.svd(matrix.numpy(), compute_uv=False)[:rank] ** 2
    return np.cumsum(squares) / squares.sum()


def test_captured_energy() -> None:
    heads = random_heads()
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
    heads = random_heads()
    rotation = torch.linalg.qr(normal(H, D, D)).Q
    rotated = captured_energy(Heads(rotation @ heads.query, rotation @ heads.key, heads.scale))
    expected = captured_energy(heads)
    assert_alike(rotated.product, expected.product)
    assert_alike(rotated.stacked_product, expected.stacked_product)

    copies = Heads(rotation @ heads.query[0], rotation @ heads.key[0], heads.scale)
    assert captured_energy(copies).stacked_product[D - 1] == pytest.approx(1)
    nothing = Heads(torch.zeros(H, D, D_in), torch.zeros(H, D, D_in_k), 1.0)
    assert (captured_energy(nothing).product == 1).all()


def solved(layers: list[Heads], params: int | None = None, error: float | None = None) -> list[int]:
    return allot(layers, [heads.spectrum() for heads in layers], params, error)


def cuts_of(layers: list[Heads]) -> list[Tensor]:
    """Of each layer the squared error at every dim, in squares of scores."""
    spectra = [heads.spectrum() for heads in layers]
    return [
        heads.scale**2 * spectrum.square * spectrum.errors().square()
        for heads, spectrum in zip(layers, spectra, strict=True)
    ]


def total(cuts: list[Tensor], dims: Iterable[int]) -> float:
    return sum(float(cut[dim]) for cut, dim in zip(cuts, dims, strict=True))


def parameters(layers: list[Heads], dims: Iterable[int]) -> int:
    return sum(heads.sizes.parameters(dim) for heads, dim in zip(layers, dims, strict=True))


def test_budgets_of_parameters() -> None:
    """Layers that differ in strength and scale, against every other way to spend as much."""
    layers = [random_heads(), random_heads(strength=3), random_heads(scale=0.1)]
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
    layers = [random_heads(), random_heads(strength=3)]
    cuts = cuts_of(layers)
    whole = total(cuts, (0, 0))
    choices = itertools.product(range(1, H * D + 1), repeat=2)
    fewest = min(
        sum(each) for each in choices if (total(cuts, each) / whole) ** 0.5 <= error + 1e-9
    )
    dims = solved(layers, error=error)
    assert (total(cuts, dims) / whole) ** 0.5 <= error + 1e-6
    assert sum(dims) == fewest


def test_a_feature_that_costs_more_has_to_bring_more() -> None:
    """Wide inputs of keys against narrow ones, the same singular values in both."""
    # Of some draws the last narrow feature brings less than the first wide one.
    torch.manual_seed(0)
    narrow = random_heads()
    wide = Heads(narrow.query, torch.nn.functional.pad(narrow.key, (0, 500)), narrow.scale)
    dims = solved([narrow, wide], params=Sizes(D_in, 510, 12, H).parameters(8) + 400)
    assert dims[0] == H * D > dims[1]


def test_a_layer_without_weights_keeps_one_feature() -> None:
    nothing = Heads(torch.zeros(H, D, D_in), torch.zeros(H, D, D_in_k), 1.0)
    assert solved([nothing, random_heads()], error=0.0) == [1, H * D]
