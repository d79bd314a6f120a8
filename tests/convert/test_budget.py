"""Captured energy against dense SVDs, and budgets against trying everything."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heads_kernels.convert import Heads, Moments
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


# ---------------------------------------------------------------------- captured energy
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


# ---------------------------------------------------------------------- budgets
def solved(
    layers: list[Heads],
    moments: list[Moments] | None = None,
    params: int | None = None,
    error: float | None = None,
) -> list[int]:
    used = moments or [None] * len(layers)
    spectra = [heads.spectrum(each) for heads, each in zip(layers, used, strict=True)]
    return allot(layers, spectra, params, error)


def energies(layers: list[Heads], moments: list[Moments] | None) -> tuple[list[Tensor], float]:
    """Of each layer the squared error at every dim, in squares of scores, and the squares of all scores."""
    cuts, whole = [], 0.0
    for n, heads in enumerate(layers):
        used = moments[n] if moments else None
        curve = heads.spectrum(used).errors()
        query, key = heads.query, heads.key
        total = float(torch.einsum("hdq,hdk->hqk", query, key).square().sum())
        if used is not None:
            total = score_energy(heads, used)
        cuts.append(heads.scale**2 * total * curve.square())
        whole += heads.scale**2 * total
    return cuts, whole


def score_energy(heads: Heads, moments: Moments) -> float:
    """Mean square of the scores under the moments, each row less its mean, summed over heads."""
    mean = moments.query_sum / moments.count
    cov_q = moments.query_outer / moments.count - mean[:, None] * mean
    cov_k = moments.key_outer / moments.count
    assert heads.query_bias is not None
    total = 0.0
    for query, key, bias in zip(heads.query, heads.key, heads.query_bias, strict=True):
        product, content = query.T @ key, key.T @ (bias + query @ mean)
        total += float(torch.trace(product.T @ cov_q @ product @ cov_k) + content @ cov_k @ content)
    return total


def calibrated() -> Moments:
    x = normal(4, 30, D_in) @ normal(D_in, D_in) + 1
    return Moments.of(x, normal(4, 30, D_in_k))


def parameters(layers: list[Heads], dims: tuple[int, ...]) -> int:
    return sum(heads.sizes.parameters(dim) for heads, dim in zip(layers, dims, strict=True))


@pytest.mark.parametrize("with_moments", [False, True])
def test_budgets_of_parameters(with_moments: bool) -> None:
    """Layers that differ in strength and scale, against every other way to spend as much."""
    layers = [random_heads(), random_heads(strength=3), random_heads(scale=0.1)]
    moments = [calibrated() for _ in layers] if with_moments else None
    cuts, _ = energies(layers, moments)
    everything = parameters(layers, (H * D,) * 3)
    for params in (everything // 3, everything // 2, everything - 1, everything, 10**9):
        dims = solved(layers, moments, params=params)
        assert parameters(layers, tuple(dims)) <= params
        best = min(
            sum(float(cut[dim]) for cut, dim in zip(cuts, choice, strict=True))
            for choice in itertools.product(range(1, H * D + 1), repeat=3)
            if parameters(layers, choice) <= params
        )
        found = sum(float(cut[dim]) for cut, dim in zip(cuts, dims, strict=True))
        assert found == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert dims == [H * D] * 3


@pytest.mark.parametrize(
    ("error", "with_moments"), [(0.0, False), (0.05, True), (0.3, False), (2.0, True)]
)
def test_budgets_of_error(error: float, with_moments: bool) -> None:
    layers = [random_heads(), random_heads(strength=3)]
    moments = [calibrated() for _ in layers] if with_moments else None
    cuts, whole = energies(layers, moments)
    dims = solved(layers, moments, error=error)

    def error_of(dims: tuple[int, ...]) -> float:
        left = sum(float(cut[dim]) for cut, dim in zip(cuts, dims, strict=True))
        return float((left / whole) ** 0.5)

    assert error_of(tuple(dims)) <= error + 1e-6
    fewest = min(
        sum(choice)
        for choice in itertools.product(range(1, H * D + 1), repeat=2)
        if error_of(choice) <= error + 1e-9
    )
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
