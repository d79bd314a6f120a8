"""Shared features against dense least squares in NumPy, and against tensorly's."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from heads_kernels.convert import (
    Factors,
    Heads,
    cp,
    error_curve,
    ragged,
    score_error,
    weight_error,
)
from tests.convert.random_heads import (
    METHODS,
    D,
    D_in,
    D_in_k,
    H,
    dense,
    dense_after,
    normal,
    random_heads,
    random_moments,
    relative,
    whitened,
)
from tests.support.alike import assert_alike, rounding


def dense_als(tensor: Any, rank: int, iterations: int, seed: int) -> float:
    """The relative error of plain alternating least squares from a random start, on the whole tensor."""
    random = np.random.default_rng(seed)
    factors = [random.standard_normal((size, rank)) for size in tensor.shape]
    products = ("qhk,hr,kr->qr", "qhk,qr,kr->hr", "qhk,qr,hr->kr")
    for _, mode in itertools.product(range(iterations), range(3)):
        one, other = (factors[n] for n in range(3) if n != mode)
        rows = np.einsum(products[mode], tensor, one, other, optimize=True)
        factors[mode] = np.linalg.lstsq((one.T @ one) * (other.T @ other), rows.T, rcond=None)[0].T
    return relative(tensor, np.einsum("qr,hr,kr->qhk", *factors))


@pytest.mark.check
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("dim", [3, 8, 14])
def test_cp_is_as_good_as_dense_least_squares(dim: int, calibrated: bool) -> None:
    """The best of three long runs from random starts, on the tensor that is never built otherwise."""
    heads = random_heads()
    _, _, moments = random_moments()
    factors = cp(heads, dim, moments if calibrated else None, iterations=500, tolerance=1e-6)
    before, after = dense(heads), dense_after(factors)
    if calibrated:
        before, after = whitened(moments, before), whitened(moments, after)
    best = min(dense_als(before, dim, 300, seed) for seed in range(3))
    assert relative(before, after) < 1.05 * best


@pytest.mark.parametrize("calibrated", [False, True])
def test_cp_is_better_than_ragged_and_says_its_error(calibrated: bool) -> None:
    heads = random_heads()
    _, _, moments = random_moments()
    used = moments if calibrated else None
    errors: list[float] = []
    factors = cp(heads, 8, used, callback=lambda _, error: errors.append(error))
    before, after = dense(heads), dense_after(factors)
    if calibrated:
        before, after = whitened(moments, before), whitened(moments, after)
        assert score_error(heads, factors, moments) < score_error(
            heads, ragged(heads, 8, moments), moments
        )
    assert relative(before, after) == pytest.approx(errors[-1], rel=1e-4)
    assert weight_error(heads, factors) == pytest.approx(
        relative(dense(heads), dense_after(factors))
    )
    assert errors[-1] < float(error_curve(heads)[8]) or calibrated


def test_the_error_never_grows() -> None:
    heads = random_heads(H=6, D=8, D_in=30, D_in_k=30)
    seen: list[tuple[int, float]] = []
    cp(heads, 20, iterations=80, tolerance=0, callback=lambda *step: seen.append(step))
    assert [number for number, _ in seen] == list(range(1, 81))
    errors = [error for _, error in seen]
    assert all(later <= earlier for earlier, later in itertools.pairwise(errors))
    assert errors[-1] < errors[0]


@pytest.mark.parametrize("dim", [1, 5, 17])
def test_cp_is_never_worse_than_ragged(dim: int) -> None:
    heads = random_heads()
    assert (
        weight_error(heads, cp(heads, dim, iterations=1)) <= float(error_curve(heads)[dim]) + 1e-12
    )


@pytest.mark.parametrize("dim", [6, 8])
def test_planted_features_are_found(dim: int) -> None:
    """Heads that share 6 features, each behind a basis of its own."""
    bases = torch.linalg.qr(normal(H, 8, 6)).Q  # [H, D, 6]
    query = torch.einsum("hdr,hr,re->hde", bases, normal(H, 6), normal(6, D_in))
    heads = Heads(query, torch.einsum("hdr,re->hde", bases, normal(6, D_in_k)), 1.0)
    factors = cp(heads, dim, iterations=1000, tolerance=1e-6)
    assert weight_error(heads, factors) < 1e-6
    assert weight_error(heads, ragged(heads, dim)) > 0.1


def test_copies_of_one_head_share_all_features() -> None:
    """Rotated alike in queries and keys, their projections look unlike and their scores are the same."""
    rotations = torch.linalg.qr(normal(H, D, D)).Q
    heads = Heads(rotations @ normal(D, D_in), rotations @ normal(D, D_in_k), 1.0)
    factors = cp(heads, D, iterations=200)
    assert weight_error(heads, factors) < 1e-6
    assert_alike(factors.mixing, torch.ones(H, D, dtype=torch.float64))
    assert weight_error(heads, ragged(heads, D)) > 0.5


@pytest.mark.parametrize("method", METHODS)
def test_rotated_heads_are_the_same_heads(method: str) -> None:
    heads = random_heads(bias=False)
    rotation = torch.linalg.qr(normal(H, D, D)).Q
    rotated = Heads(rotation @ heads.query, rotation @ heads.key, heads.scale)
    factors = METHODS[method](heads, 10)
    assert weight_error(rotated, factors) == pytest.approx(weight_error(heads, factors))
    whole = METHODS[method](rotated, H * D)
    assert weight_error(heads, whole) < rounding(torch.float64)


def test_the_same_call_gives_the_same_numbers() -> None:
    heads = random_heads()
    state = torch.get_rng_state()
    one, other = (cp(heads, 9) for _ in range(2))
    for field in dataclasses.fields(Factors)[:4]:
        assert_alike(getattr(one, field.name), getattr(other, field.name))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.check
def test_tensorly_agrees() -> None:
    decomposition = pytest.importorskip(
        "tensorly.decomposition", reason="tensorly, the reference's library, is not installed"
    )
    heads = random_heads()
    tensor = dense(heads)
    dim = 10
    _, factors = decomposition.parafac(
        tensor, dim, init="svd", tol=1e-9, n_iter_max=1000, random_state=0
    )  # fmt: skip
    theirs = relative(tensor, np.einsum("qr,hr,kr->qhk", *factors))
    ours = weight_error(heads, cp(heads, dim, iterations=1000, tolerance=1e-6))
    assert ours < 1.05 * theirs
