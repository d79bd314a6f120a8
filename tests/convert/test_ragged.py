"""Ragged heads: the best choice of features of their own, and how they fill chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from heads_kernels.convert import (
    cp,
    error_curve,
    ragged,
    score_error,
    weight_error,
)
from heads_kernels.convert.ragged import chunked
from heads_kernels.problem import MIXING_CHUNK, Problem
from tests.convert.random_heads import (
    D,
    H,
    dense,
    dense_after,
    random_heads,
    random_moments,
    relative,
    whitened,
)
from tests.support.alike import assert_alike, rounding


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("dim", [1, 7, 16, 23])
def test_ragged_is_the_best_choice_of_singular_values(dim: int, calibrated: bool) -> None:
    heads = random_heads()
    _, _, moments = random_moments()
    factors = ragged(heads, dim, moments if calibrated else None)
    before, after = dense(heads), dense_after(factors)
    if calibrated:
        before, after = whitened(moments, before), whitened(moments, after)
    values = np.stack([np.linalg.svd(before[:, h], compute_uv=False)[:D] for h in range(H)])
    left_out = np.sort(values.ravel())[: H * D - dim]
    assert relative(before, after) == pytest.approx(
        np.linalg.norm(left_out) / np.linalg.norm(values), rel=1e-4
    )
    assert sum(factors.features) == factors.dim == dim
    assert ((factors.mixing == 0) | (factors.mixing == 1)).all()
    assert (factors.mixing.count_nonzero(0) == 1).all()


def test_error_curve_is_the_error_at_every_dim() -> None:
    heads = random_heads()
    _, _, moments = random_moments()
    weights, scores = error_curve(heads), error_curve(heads, moments)
    assert len(weights) == len(scores) == H * D + 1
    assert weights[0] == 1
    assert weights[-1] == scores[-1] == 0
    for dim in range(1, H * D):
        assert weight_error(heads, ragged(heads, dim)) == pytest.approx(float(weights[dim]))
        factors = ragged(heads, dim, moments)
        assert score_error(heads, factors, moments) == pytest.approx(float(scores[dim]))


def test_features_are_balanced() -> None:
    heads = random_heads()
    for factors in (ragged(heads, 9), cp(heads, 9)):
        assert_alike(factors.query.norm(dim=1), factors.key.norm(dim=1))
        assert_alike(factors.mixing.amax(0), torch.ones(9, dtype=torch.float64))
        assert factors.mixing.abs().max() <= 1


@pytest.mark.parametrize(("dim", "multiple"), [(32, 16), (48, 16), (40, 16), (24, 8), (20, 4)])
def test_groups_of_features(dim: int, multiple: int) -> None:
    heads = random_heads(D=32, D_in=40, D_in_k=40)
    factors = ragged(heads, dim, multiple=multiple)
    assert factors.dim == dim - dim % multiple
    assert all(count % multiple == 0 for count in factors.features)
    if multiple == MIXING_CHUNK:
        assert factors.executed_features == factors.dim  # no head runs over another's features
    assert weight_error(heads, factors) >= weight_error(heads, ragged(heads, factors.dim))


def test_the_last_group_of_a_head_is_what_is_left() -> None:
    heads = random_heads(D=6)
    factors = ragged(heads, H * 6, multiple=4)
    assert factors.features == [6] * H
    assert weight_error(heads, factors) < rounding(torch.float64)


@pytest.mark.parametrize(
    "counts", [[16, 16], [15, 1, 14, 2], [23, 27, 30, 18, 31], [7, 7, 7], [0, 5, 0], [33]]
)
def test_heads_touch_few_chunks(counts: list[int]) -> None:
    order = chunked(counts)
    assert [order.count(head) for head in range(len(counts))] == counts
    chunks = {(head, place // MIXING_CHUNK) for place, head in enumerate(order)}
    fewest = sum(-(-count // MIXING_CHUNK) for count in counts)
    splits = -(-sum(count % MIXING_CHUNK for count in counts) // MIXING_CHUNK)
    assert fewest <= len(chunks) < fewest + max(splits, 1)


def test_rests_that_fit_share_a_chunk() -> None:
    """15 + 1 and 14 + 2: nobody is split."""
    order = chunked([31, 14, 1, 2])
    chunks = {(head, place // MIXING_CHUNK) for place, head in enumerate(order)}
    assert len(chunks) == 2 + 1 + 1 + 1


def test_executed_features_are_those_that_the_operator_counts() -> None:
    factors = ragged(random_heads(D=12, D_in=50, D_in_k=50), 37)
    T = 3
    problem = Problem.collaborative(
        torch.zeros(1, T, 37), torch.zeros(1, T, 37), torch.zeros(1, H, T, 2), factors.mixing.float()
    )  # fmt: skip
    assert factors.executed_features == int(problem.score_widths().sum())
