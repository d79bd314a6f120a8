"""Factors of both methods against dense algebra: exact at full rank, the best at any, right on average."""

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heads_kernels.call import MIXING_CHUNK
from heads_kernels.convert import Factors, Heads, Moments, features
from heads_kernels.convert.features import METHODS, chunked
from tests.convert.random_heads import D, D_in, D_in_k, H, random_heads
from tests.support.alike import assert_alike, rounding
from tests.support.nn_layers import random
from tests.support.refusals import assert_refused

CALIBRATED = pytest.mark.parametrize("calibrated", [False, True])


# ---------------------------------------------------------------------- dense linear algebra
def random_moments() -> tuple[Tensor, Tensor, Moments]:
    """Correlated inputs of 5 sentences, with a mean: queries `[5, 60, D_in]`, keys `[5, 40, D_in_k]`."""
    x = random(5, 60, D_in) @ random(D_in, D_in) + random(D_in)
    y = random(5, 40, D_in_k) @ random(D_in_k, D_in_k) + 3 * random(5, 1, D_in_k)
    return x, y, Moments.of(x, y)


def scores_before(heads: Heads, x: Tensor, y: Tensor) -> Tensor:
    """`[H, T, S]`."""
    query = torch.einsum("hde,te->htd", heads.query, x)
    if heads.query_bias is not None:
        query = query + heads.query_bias[:, None]
    return heads.scale * torch.einsum("htd,hde,se->hts", query, heads.key, y)


def scores_after(factors: Factors, x: Tensor, y: Tensor) -> Tensor:
    scores = torch.einsum("te,re,hr,rf,sf->hts", x, factors.query, factors.mixing, factors.key, y)
    return factors.scale * (scores + (factors.content @ y.T)[:, None])


def dense(heads: Heads) -> Any:
    """The tensor `[D_in, H, D_in_k]` of all products."""
    return torch.einsum("hdq,hdk->qhk", heads.query, heads.key).numpy()


def dense_after(factors: Factors) -> Any:
    return torch.einsum("rq,hr,rk->qhk", factors.query, factors.mixing, factors.key).numpy()


def whitened(moments: Moments, tensor: Any) -> Any:
    """`C_q^1/2 T_h C_k^1/2` with symmetric roots, of covariances as NumPy has them."""
    count = float(moments.count)
    mean = moments.query_sum.numpy() / count
    covariances = (moments.query_outer.numpy() / count - np.outer(mean, mean), moments.key_outer.numpy() / count)
    roots = []
    for covariance in covariances:
        values, vectors = np.linalg.eigh(covariance)
        roots.append(vectors @ np.diag(np.sqrt(np.maximum(values, 0))) @ vectors.T)
    return np.einsum("pq,qhk,kl->phl", roots[0], tensor, roots[1])


def relative(before: Any, after: Any) -> float:
    return float(np.linalg.norm(before - after) / np.linalg.norm(before))


def score_error(heads: Heads, factors: Factors, x: Tensor, y: Tensor) -> float:
    """Of every query with the keys of every sentence, each row less its mean."""
    queries = x.flatten(0, 1)
    before = torch.stack([scores_before(heads, queries, keys) for keys in y])
    after = torch.stack([scores_after(factors, queries, keys) for keys in y])
    before, after = (scores - scores.mean(-1, keepdim=True) for scores in (before, after))
    return float((before - after).norm() / before.norm())


# ---------------------------------------------------------------------- exact at full rank
@CALIBRATED
@pytest.mark.parametrize("method", METHODS)
def test_exact_at_full_rank(method: str, calibrated: bool) -> None:
    for bias, dim in itertools.product((False, True), (H * D, H * D + 5)):
        heads = random_heads(bias=bias)
        x, y, moments = random_moments()
        factors = heads.fit(dim, moments if calibrated else None, method=method)
        assert (factors.dim, factors.scale) == (H * D, heads.scale)
        assert_alike(scores_after(factors, x[0], y[0]), scores_before(heads, x[0], y[0]))
        assert factors.error < rounding(torch.float64)


@pytest.mark.parametrize("method", METHODS)
def test_exact_at_the_rank_of_the_heads(method: str) -> None:
    """Heads of rank 2 and one of rank 0, heads wider than their inputs, heads of zeros: no more features are made."""
    mixes = random(H, D, 2)
    mixes[1] = 0
    low = Heads(mixes @ random(H, 2, D_in), random(H, D, D_in_k), 1.0)
    assert low.fit(H * D, method=method).features == [2, 0, 2, 2]
    wide = Heads(random(4, 9, 5), random(4, 9, 7), 1.0)
    assert wide.fit(4 * 9, method=method).dim == 4 * 5
    assert 0 < wide.fit(6, method=method).error < 1
    zeros = Heads(torch.zeros(H, D, D_in), torch.zeros(H, D, D_in_k), 1.0)
    assert zeros.fit(5, method=method).dim == 1
    assert not scores_after(zeros.fit(5, method=method), random(3, D_in), random(3, D_in_k)).any()
    assert zeros.spectrum().errors().isfinite().all()
    for heads in (low, wide, zeros):
        assert heads.fit(100, method=method).error < rounding(torch.float64)


# ---------------------------------------------------------------------- the best at any rank
@pytest.mark.parametrize(("dim", "calibrated"), [(1, True), (7, False), (16, True), (23, False)])
def test_ragged_is_the_best_choice_of_singular_values(dim: int, calibrated: bool) -> None:
    heads = random_heads()
    _, _, moments = random_moments()
    factors = heads.fit(dim, moments if calibrated else None, method="ragged")
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


@CALIBRATED
def test_the_error_never_grows(calibrated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From that of ragged on. Momentum overshoots in some sweeps of a third of these draws, which are undone."""
    for _ in range(10):
        heads = random_heads(H=2, D=4)
        moments = random_moments()[2] if calibrated else None
        errors = [heads.fit(5, moments, method="ragged").error]
        for sweeps in range(1, 17):
            monkeypatch.setattr(features, "_ITERATIONS", sweeps)
            errors.append(heads.fit(5, moments).error)
        assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(errors))


def test_planted_features_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that share 6 features, each behind a basis of its own; copies of one head, which share all.

    These are rotated alike in queries and keys: one head's scores, however unlike the projections look.
    """
    monkeypatch.setattr(features, "_TOLERANCE", 1e-6)
    monkeypatch.setattr(features, "_ITERATIONS", 1000)
    bases = torch.linalg.qr(random(H, 8, 6)).Q  # [H, D, 6]
    query = torch.einsum("hdr,hr,re->hde", bases, random(H, 6), random(6, D_in))
    heads = Heads(query, torch.einsum("hdr,re->hde", bases, random(6, D_in_k)), 1.0)
    assert relative(dense(heads), dense_after(heads.fit(6))) < 1e-6
    assert heads.fit(6, method="ragged").error > 0.1
    rotations = torch.linalg.qr(random(H, D, D)).Q
    copies = Heads(rotations @ random(D, D_in), rotations @ random(D, D_in_k), 1.0)
    factors = copies.fit(D)
    assert relative(dense(copies), dense_after(factors)) < 1e-6
    assert_alike(factors.mixing, torch.ones(H, D, dtype=torch.float64))
    assert copies.fit(D, method="ragged").error > 0.5


# ---------------------------------------------------------------------- errors and what moments are for
@pytest.mark.parametrize("method", METHODS)
def test_errors_are_those_of_weights_and_scores(method: str) -> None:
    """And those of `"ragged"` are the curves."""
    heads = random_heads()
    x, y, moments = random_moments()
    weights, scores = heads.spectrum().errors(), heads.spectrum(moments).errors()
    assert len(weights) == len(scores) == H * D + 1
    assert weights[0] == 1
    assert weights[-1] == scores[-1] == 0
    assert heads.spectrum().square == pytest.approx(float(np.square(dense(heads)).sum()))
    centred = torch.stack([scores_before(heads, x.flatten(0, 1), keys) for keys in y])
    centred = centred - centred.mean(-1, keepdim=True)
    square = float(centred.square().mean((0, 2, 3)).sum())
    assert heads.spectrum(moments).score_square == pytest.approx(square, rel=1e-4)
    for dim in range(1, H * D, 3):
        plain, calibrated = heads.fit(dim, method=method), heads.fit(dim, moments, method=method)
        assert plain.error == pytest.approx(relative(dense(heads), dense_after(plain)))
        assert calibrated.error == pytest.approx(score_error(heads, calibrated, x, y), rel=1e-4)
        if method == "ragged":
            assert plain.error == pytest.approx(float(weights[dim]))
            assert calibrated.error == pytest.approx(float(scores[dim]))


@pytest.mark.parametrize("method", METHODS)
def test_moments_make_scores_right_on_average(method: str) -> None:
    """Over the calibration queries, for every key: what features miss of the mean is in the content weights.

    Scores are better and weights worse than without.
    """
    heads = random_heads()
    x, sentences, moments = random_moments()
    y, queries = 10 * random(7, D_in_k), x.flatten(0, 1)
    plain, calibrated = heads.fit(5, method=method), heads.fit(5, moments, method=method)
    before = scores_before(heads, queries, y)
    assert (before - scores_after(plain, queries, y)).mean(1).abs().max() > 0.1
    after = scores_after(calibrated, queries, y)
    assert_alike(after.mean(1), before.mean(1), dtype=torch.float32)
    assert calibrated.error < score_error(heads, plain, x, sentences)
    assert relative(dense(heads), dense_after(calibrated)) > plain.error


# ---------------------------------------------------------------------- the form of factors
@pytest.mark.parametrize(("dim", "multiple"), [(40, 16), (24, 8), (20, 4)])
def test_groups_of_features(dim: int, multiple: int) -> None:
    heads = random_heads(D=32, D_in=40, D_in_k=40)
    factors = heads.fit(dim, multiple=multiple, method="ragged")
    assert factors.dim == dim - dim % multiple
    assert all(count % multiple == 0 for count in factors.features)
    if multiple == MIXING_CHUNK:
        assert factors.executed_features == factors.dim  # no head runs over another's features
    assert factors.error >= heads.fit(factors.dim, method="ragged").error
    assert factors.error == pytest.approx(relative(dense(heads), dense_after(factors)))
    whole = random_heads().fit(H * D, multiple=4, method="ragged")
    assert whole.features == [D] * H  # the last group of a head is what is left


@pytest.mark.parametrize("counts", [[16, 16], [15, 1, 14, 2], [31, 14, 1, 2], [23, 27, 30, 18, 31], [0, 5, 0], [33]])
def test_heads_touch_few_chunks(counts: list[int]) -> None:
    order = chunked(counts)
    assert [order.count(head) for head in range(len(counts))] == counts
    chunks = {(head, place // MIXING_CHUNK) for place, head in enumerate(order)}
    fewest = sum(-(-count // MIXING_CHUNK) for count in counts)
    splits = -(-sum(count % MIXING_CHUNK for count in counts) // MIXING_CHUNK)
    assert fewest <= len(chunks) < fewest + max(splits, 1)
    if counts in ([15, 1, 14, 2], [31, 14, 1, 2]):  # rests that fit share a chunk
        assert len(chunks) == fewest


def test_bad_arguments() -> None:
    query, key, bias = torch.zeros(2, 3, 5), torch.zeros(2, 3, 4), torch.zeros(2, 3)
    assert_refused(
        ({"query": 3}, TypeError, "query is a int"),
        ({"key": key.to(torch.int8)}, TypeError, "key has dtype torch.int8"),
        ({"query": torch.zeros(6, 5)}, r"query has shape \[6, 5\]"),
        ({"query": query[:0]}, r"query has shape \[0, 3, 5\]"),
        ({"query": query * torch.nan}, "query holds NaN or infinity"),
        ({"key": key[:1]}, r"key has shape \[1, 3, 4\]; .* are \[2, 3\]"),
        ({"query_bias": bias.T}, r"query_bias has shape \[3, 2\]"),
        ({"scale": float("nan")}, "scale is nan"),
        of=partial(Heads, query=query, key=key, scale=1.0, query_bias=bias),
    )
    dims = [(0, ValueError), (-3, ValueError), (2.5, TypeError), (True, TypeError), (None, TypeError)]
    assert_refused(
        *(({"dim": dim, "method": method}, error, "dim is") for dim, error in dims for method in METHODS),
        ({"multiple": 0}, "multiple is 0; pass 1 to 8"),
        ({"multiple": 16}, "multiple is 16; pass 1 to 8"),
        ({"method": "svd"}, "method is 'svd'; use one of 'cp', 'ragged'"),
        of=partial(random_heads().fit, dim=8, method="ragged"),
    )
