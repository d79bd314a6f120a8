"""Factors of both methods against dense algebra: exact at full rank, the best at any, right on average."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from heads_kernels.call import MIXING_CHUNK
from heads_kernels.convert import Factors, Heads, cp, error_curve, ragged, score_error, weight_error
from heads_kernels.convert.ragged import chunked
from heads_kernels.parse import parse
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
    scores_after,
    scores_before,
    whitened,
)
from tests.support.alike import assert_alike, rounding

CALIBRATED = pytest.mark.parametrize("calibrated", [False, True])


def turned() -> Heads:
    """Rotated alike in queries and keys: one head's scores, however unlike the projections look."""
    rotations = torch.linalg.qr(normal(H, D, D)).Q
    return Heads(rotations @ normal(D, D_in), rotations @ normal(D, D_in_k), 1.0)


# ---------------------------------------------------------------------- exact at full rank
@CALIBRATED
@pytest.mark.parametrize("method", METHODS)
def test_exact_at_full_rank(method: str, calibrated: bool) -> None:
    for bias, dim in itertools.product((False, True), (H * D, H * D + 5)):
        heads = random_heads(bias=bias)
        x, y, moments = random_moments()
        factors = METHODS[method](heads, dim, moments if calibrated else None)
        assert (factors.dim, factors.scale) == (H * D, heads.scale)
        assert_alike(scores_after(factors, x[0], y[0]), scores_before(heads, x[0], y[0]))
        assert weight_error(heads, factors) < rounding(torch.float64)
        assert score_error(heads, factors, moments) < rounding(torch.float64)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_exact_at_the_rank_of_the_heads(method: Any) -> None:
    """Heads of rank 2 and one of rank 0, heads wider than their inputs, heads of zeros: no more features are made."""
    mixes = normal(H, D, 2)
    mixes[1] = 0
    low = Heads(mixes @ normal(H, 2, D_in), normal(H, D, D_in_k), 1.0)
    assert method(low, H * D).features == [2, 0, 2, 2]
    wide = Heads(normal(4, 9, 5), normal(4, 9, 7), 1.0)
    assert method(wide, 4 * 9).dim == 4 * 5
    assert 0 < weight_error(wide, method(wide, 6)) < 1
    zeros = Heads(torch.zeros(H, D, D_in), torch.zeros(H, D, D_in_k), 1.0)
    assert method(zeros, 5).dim == 1
    assert not scores_after(method(zeros, 5), normal(3, D_in), normal(3, D_in_k)).any()
    assert error_curve(zeros).isfinite().all()
    for heads in (low, wide, zeros):
        assert weight_error(heads, method(heads, 100)) < rounding(torch.float64)


# ---------------------------------------------------------------------- the best at any rank
@pytest.mark.parametrize(("dim", "calibrated"), [(1, True), (7, False), (16, True), (23, False)])
def test_ragged_is_the_best_choice_of_singular_values(dim: int, calibrated: bool) -> None:
    heads = random_heads()
    _, _, moments = random_moments()
    factors = ragged(heads, dim, moments if calibrated else None)
    before, after = dense(heads), dense_after(factors)
    if calibrated:
        before, after = whitened(moments, before), whitened(moments, after)
    values = np.stack([np.linalg.svd(before[:, h], compute_uv=False)[:D] for h in range(H)])
    left_out = np.sort(values.ravel())[: H * D - dim]
    best = np.linalg.norm(left_out) / np.linalg.norm(values)
    assert relative(before, after) == pytest.approx(best, rel=1e-4)
    assert sum(factors.features) == factors.dim == dim
    assert ((factors.mixing == 0) | (factors.mixing == 1)).all()
    assert (factors.mixing.count_nonzero(0) == 1).all()


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
@pytest.mark.parametrize(("dim", "calibrated"), [(3, False), (8, True), (14, False)])
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


@CALIBRATED
def test_cp_is_better_than_ragged_and_says_its_error(calibrated: bool) -> None:
    heads = random_heads()
    _, _, moments = random_moments()
    errors: list[float] = []
    used = moments if calibrated else None
    factors = cp(heads, 8, used, callback=lambda _, error: errors.append(error))
    before, after = dense(heads), dense_after(factors)
    assert weight_error(heads, factors) == pytest.approx(relative(before, after))
    if calibrated:
        before, after = whitened(moments, before), whitened(moments, after)
        other = ragged(heads, 8, moments)
        assert score_error(heads, factors, moments) < score_error(heads, other, moments)
    assert relative(before, after) == pytest.approx(errors[-1], rel=1e-4)
    for dim in (1, 5, 17):
        one = cp(heads, dim, iterations=1)
        assert weight_error(heads, one) <= float(error_curve(heads)[dim]) + 1e-12


def test_the_error_never_grows() -> None:
    """Momentum overshoots in some sweeps of some draws, which are undone."""
    for _ in range(10):
        heads = random_heads(H=6, D=8, D_in=30, D_in_k=30)
        steps: list[tuple[int, float]] = []
        cp(heads, 20, iterations=80, tolerance=0, callback=lambda *step: steps.append(step))  # noqa: B023
        assert [number for number, _ in steps] == list(range(1, 81))
        errors = [error for _, error in steps]
        assert all(later <= earlier for earlier, later in itertools.pairwise(errors))
        assert errors[-1] < errors[0]


def test_planted_features_are_found() -> None:
    """Heads that share 6 features, each behind a basis of its own; copies of one head, which share all."""
    bases = torch.linalg.qr(normal(H, 8, 6)).Q  # [H, D, 6]
    query = torch.einsum("hdr,hr,re->hde", bases, normal(H, 6), normal(6, D_in))
    heads = Heads(query, torch.einsum("hdr,re->hde", bases, normal(6, D_in_k)), 1.0)
    factors = cp(heads, 6, iterations=1000, tolerance=1e-6)
    assert weight_error(heads, factors) < 1e-6
    assert weight_error(heads, ragged(heads, 6)) > 0.1
    copies = turned()
    factors = cp(copies, D, iterations=200)
    assert weight_error(copies, factors) < 1e-6
    assert_alike(factors.mixing, torch.ones(H, D, dtype=torch.float64))
    assert weight_error(copies, ragged(copies, D)) > 0.5


@pytest.mark.parametrize("method", METHODS)
def test_rotated_heads_are_the_same_heads(method: str) -> None:
    heads = random_heads(bias=False)
    rotation = torch.linalg.qr(normal(H, D, D)).Q
    rotated = Heads(rotation @ heads.query, rotation @ heads.key, heads.scale)
    factors = METHODS[method](heads, 10)
    assert weight_error(rotated, factors) == pytest.approx(weight_error(heads, factors))


def test_the_same_call_gives_the_same_numbers() -> None:
    heads = random_heads()
    state = torch.get_rng_state()
    one, other = (cp(heads, 9) for _ in range(2))
    for field in dataclasses.fields(Factors)[:4]:
        assert_alike(getattr(one, field.name), getattr(other, field.name))
    assert torch.equal(state, torch.get_rng_state())


# ---------------------------------------------------------------------- errors and what moments are for
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


@CALIBRATED
def test_score_error_is_that_of_the_scores(calibrated: bool) -> None:
    """Of every query with the keys of every sentence, each row less its mean."""
    heads = random_heads()
    x, y, moments = random_moments()
    factors = cp(heads, 7, moments if calibrated else None, iterations=5)
    queries = x.flatten(0, 1)
    before = torch.stack([scores_before(heads, queries, keys) for keys in y])
    after = torch.stack([scores_after(factors, queries, keys) for keys in y])
    before, after = (scores - scores.mean(-1, keepdim=True) for scores in (before, after))
    expected = float((before - after).norm() / before.norm())
    assert score_error(heads, factors, moments) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_moments_make_scores_right_on_average(method: Any) -> None:
    """Over the calibration queries, for every key: what features miss of the mean is in the content weights.

    Scores are better and weights worse than without.
    """
    heads = random_heads()
    x, _, moments = random_moments()
    y, queries = 10 * normal(7, D_in_k), x.flatten(0, 1)
    plain, calibrated = method(heads, 5), method(heads, 5, moments)
    before = scores_before(heads, queries, y)
    assert (before - scores_after(plain, queries, y)).mean(1).abs().max() > 0.1
    after = scores_after(calibrated, queries, y)
    assert_alike(after.mean(1), before.mean(1), dtype=torch.float32)
    assert score_error(heads, calibrated, moments) < score_error(heads, plain, moments)
    assert weight_error(heads, calibrated) > weight_error(heads, plain)


# ---------------------------------------------------------------------- the form of factors
def test_features_are_balanced() -> None:
    heads = random_heads()
    for factors in (ragged(heads, 9), cp(heads, 9)):
        assert_alike(factors.query.norm(dim=1), factors.key.norm(dim=1))
        assert_alike(factors.mixing.amax(0), torch.ones(9, dtype=torch.float64))
        assert factors.mixing.abs().max() <= 1


@pytest.mark.parametrize(("dim", "multiple"), [(40, 16), (24, 8), (20, 4)])
def test_groups_of_features(dim: int, multiple: int) -> None:
    heads = random_heads(D=32, D_in=40, D_in_k=40)
    factors = ragged(heads, dim, multiple=multiple)
    assert factors.dim == dim - dim % multiple
    assert all(count % multiple == 0 for count in factors.features)
    if multiple == MIXING_CHUNK:
        assert factors.executed_features == factors.dim  # no head runs over another's features
    assert weight_error(heads, factors) >= weight_error(heads, ragged(heads, factors.dim))
    whole = ragged(random_heads(), H * D, multiple=4)  # the last group of a head is what is left
    assert whole.features == [D] * H


@pytest.mark.parametrize(
    "counts", [[16, 16], [15, 1, 14, 2], [31, 14, 1, 2], [23, 27, 30, 18, 31], [0, 5, 0], [33]]
)
def test_heads_touch_few_chunks(counts: list[int]) -> None:
    order = chunked(counts)
    assert [order.count(head) for head in range(len(counts))] == counts
    chunks = {(head, place // MIXING_CHUNK) for place, head in enumerate(order)}
    fewest = sum(-(-count // MIXING_CHUNK) for count in counts)
    splits = -(-sum(count % MIXING_CHUNK for count in counts) // MIXING_CHUNK)
    assert fewest <= len(chunks) < fewest + max(splits, 1)
    if counts in ([15, 1, 14, 2], [31, 14, 1, 2]):  # rests that fit share a chunk
        assert len(chunks) == fewest


def test_executed_features_are_those_that_the_operator_counts() -> None:
    factors = ragged(random_heads(D=12, D_in=50, D_in_k=50), 37)
    T = 3
    call, _ = parse(
        "collaborative_attention",
        torch.zeros(1, T, 37), torch.zeros(1, T, 37), torch.zeros(1, H, T, 2), factors.mixing.float()
    )  # fmt: skip
    assert factors.executed_features == int(call.score_widths().sum())


# ---------------------------------------------------------------------- bad input
GOOD: dict[str, Any] = {
    "query": torch.zeros(2, 3, 5), "key": torch.zeros(2, 3, 4), "scale": 1.0, "query_bias": torch.zeros(2, 3),
}  # fmt: skip
BAD_HEADS: list[tuple[dict[str, Any], str]] = [
    ({"query": 3}, "query is 3; pass a floating tensor"),
    ({"key": torch.zeros(2, 3, 4, dtype=torch.int8)}, "key has dtype torch.int8"),
    ({"query": torch.zeros(6, 5)}, r"query has shape \[6, 5\]"),
    ({"query": torch.zeros(0, 3, 5)}, r"query has shape \[0, 3, 5\]"),
    ({"query": torch.full((2, 3, 5), torch.nan)}, "query holds NaN or infinity"),
    ({"query_bias": torch.full((2, 3), torch.inf)}, "query_bias holds NaN or infinity"),
    ({"key": torch.zeros(1, 3, 4)}, "key has 1 heads of width 3; query has 2"),
    ({"query_bias": torch.zeros(6)}, r"query_bias has shape \[6\]"),
    ({"query_bias": torch.zeros(3, 2)}, r"query_bias has shape \[3, 2\]"),
    ({"scale": 0.0}, "scale is 0.0; pass the factor"),
    ({"scale": float("nan")}, "scale is nan; pass the factor"),
]
BAD: list[tuple[Callable[[Heads], object], str]] = [
    *(
        (lambda heads, method=method, dim=dim: method(heads, dim), "dim is")
        for method in METHODS.values()
        for dim in (0, -3, 2.5, True, None)
    ),
    *((lambda _, bad=bad: Heads(**{**GOOD, **bad}), message) for bad, message in BAD_HEADS),
    (lambda heads: ragged(heads, 8, multiple=0), r"multiple is 0; pass 1 to 8, which is dim\."),
    (lambda heads: ragged(heads, 8, multiple=16), "multiple is 16; pass 1 to 8"),
    (lambda heads: cp(heads, 8, iterations=0), "iterations is 0"),
    (lambda heads: cp(heads, 8, tolerance=-1.0), "tolerance is -1.0"),
    (lambda heads: cp(heads, 8, tolerance=float("nan")), "tolerance is nan"),
    (
        lambda heads: weight_error(heads, ragged(random_heads(H=3), 4)),
        r"factors have \[H, D_in, D_in_k\] = \[3, 20, 18\]",
    ),
]


def test_bad_arguments() -> None:
    heads = random_heads()
    for call, message in BAD:
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            call(heads)
