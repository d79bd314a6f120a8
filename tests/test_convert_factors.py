"""Ragged and shared factors against dense linear algebra in NumPy, and against the attention that they replace."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.convert import (
    Factors,
    Heads,
    Moments,
    cp,
    error_curve,
    ragged,
    score_error,
    weight_error,
)
from heads_kernels.convert.ragged import chunked
from heads_kernels.problem import MIXING_CHUNK

H, D, D_in, D_in_k = 4, 6, 20, 18
METHODS = {"ragged": ragged, "cp": cp}


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def random_heads(
    H: int = H, D: int = D, D_in: int = D_in, D_in_k: int = D_in_k, bias: bool = True
) -> Heads:
    """Heads whose singular values fall, and differ from head to head."""
    fall = (
        torch.logspace(0, -1, D, dtype=torch.float64)[:, None]
        / (1 + torch.arange(H))[:, None, None]
    )
    query_bias = normal(H, D) if bias else None
    return Heads(normal(H, D, D_in) * fall, normal(H, D, D_in_k), D**-0.5, query_bias)


def random_moments(D_in: int = D_in, D_in_k: int = D_in_k) -> tuple[Tensor, Tensor, Moments]:
    """Correlated inputs of 5 sentences, with a mean: queries `[5, 60, D_in]`, keys `[5, 40, D_in_k]`."""
    x = normal(5, 60, D_in) @ normal(D_in, D_in) + normal(D_in)
    y = normal(5, 40, D_in_k) @ normal(D_in_k, D_in_k) + 3 * normal(5, 1, D_in_k)
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
    covariances = (
        moments.query_outer.numpy() / count - np.outer(mean, mean),
        moments.key_outer.numpy() / count,
    )
    roots = []
    for covariance in covariances:
        values, vectors = np.linalg.eigh(covariance)
        roots.append(vectors @ np.diag(np.sqrt(np.maximum(values, 0))) @ vectors.T)
    return np.einsum("pq,qhk,kl->phl", roots[0], tensor, roots[1])


def relative(before: Any, after: Any) -> float:
    return float(np.linalg.norm(before - after) / np.linalg.norm(before))


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


# ---------------------------------------------------------------------- exact at full rank
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dim", [H * D, H * D + 5])
@pytest.mark.parametrize("method", METHODS)
def test_exact_at_full_rank(method: str, dim: int, bias: bool, calibrated: bool) -> None:
    heads = random_heads(bias=bias)
    x, y, moments = random_moments()
    factors = METHODS[method](heads, dim, moments if calibrated else None)
    assert factors.dim == H * D
    assert factors.scale == heads.scale
    expected = scores_before(heads, x[0], y[0])
    torch.testing.assert_close(scores_after(factors, x[0], y[0]), expected, rtol=1e-9, atol=1e-9)
    assert weight_error(heads, factors) < 1e-9
    assert score_error(heads, factors, moments) < 1e-9


def test_exact_at_the_rank_of_the_heads() -> None:
    """Heads of rank 2, and one of rank 0: fewer features than `H D` are exact, and no more are made."""
    mixes = normal(H, D, 2)
    mixes[1] = 0
    heads = Heads(mixes @ normal(H, 2, D_in), normal(H, D, D_in_k), 1.0)
    for method in METHODS.values():
        factors = method(heads, H * D)
        assert factors.features == [2, 0, 2, 2]
        assert weight_error(heads, factors) < 1e-12


def test_heads_without_any_weight() -> None:
    heads = Heads(torch.zeros(H, D, D_in), torch.zeros(H, D, D_in_k), 1.0)
    for method in METHODS.values():
        factors = method(heads, 5)
        assert factors.dim == 1
        assert not scores_after(factors, normal(3, D_in), normal(3, D_in_k)).any()
        assert weight_error(heads, factors) == 0
    assert error_curve(heads).isfinite().all()


def test_heads_wider_than_their_inputs() -> None:
    heads = random_heads(D=9, D_in=5, D_in_k=7)
    for method in METHODS.values():
        factors = method(heads, 4 * 9)
        assert factors.dim == 4 * 5
        assert weight_error(heads, factors) < 1e-12
        assert 0 < weight_error(heads, method(heads, 6)) < 1


@pytest.mark.parametrize("method", METHODS)
def test_operators_give_what_ordinary_attention_gave(method: str) -> None:
    """With biases of queries and of keys, in float32; the key bias is dropped."""
    B, T, S, Dv = 2, 9, 7, 5
    heads = random_heads()
    x, y, value = torch.randn(B, T, D_in), torch.randn(B, S, D_in_k), torch.randn(B, H, S, Dv)
    mask = hk.Mask(key_lengths=[7, 4])
    assert heads.query_bias is not None
    query = (
        torch.einsum("hde,bte->bhtd", heads.query.float(), x) + heads.query_bias.float()[:, None]
    )
    key = torch.einsum("hde,bse->bhsd", heads.key.float(), y) + torch.randn(H, 1, D)
    expected = hk.gated_attention(query, key, value, attn_mask=mask, scale=heads.scale)

    factors = METHODS[method](heads, H * D)
    out = hk.collaborative_attention(
        x @ factors.query.T.float(),
        y @ factors.key.T.float(),
        value,
        factors.mixing.float(),
        (y @ factors.content.T.float()).mT.contiguous(),
        attn_mask=mask,
        scale=factors.scale,
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_block_indicator_mixing_is_the_layer_itself() -> None:
    heads = random_heads()
    assert heads.query_bias is not None
    _, _, moments = random_moments()
    content = torch.einsum("hd,hde->he", heads.query_bias, heads.key)
    blocks = torch.eye(H, dtype=torch.float64).repeat_interleave(D, 1)
    same = Factors(heads.query.flatten(0, 1), heads.key.flatten(0, 1), blocks, content, heads.scale)
    assert weight_error(heads, same) == 0
    assert score_error(heads, same, moments) < 1e-15
    x, y = normal(5, D_in), normal(7, D_in_k)
    torch.testing.assert_close(scores_after(same, x, y), scores_before(heads, x, y))


def test_a_key_bias_changes_nothing() -> None:
    heads = random_heads()
    x, y = normal(5, D_in), normal(7, D_in_k)
    biased = torch.cat([heads.key, normal(H, D, 1)], 2)
    with_bias = dataclasses.replace(heads, key=biased)
    ones = torch.cat([y, torch.ones(7, 1, dtype=torch.float64)], 1)
    before, after = scores_before(heads, x, y), scores_before(with_bias, x, ones)
    assert (before - after).abs().max() > 0.1
    torch.testing.assert_close(before.softmax(-1), after.softmax(-1))


# ---------------------------------------------------------------------- ragged
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
        torch.testing.assert_close(factors.query.norm(dim=1), factors.key.norm(dim=1))
        torch.testing.assert_close(factors.mixing.amax(0), torch.ones(9, dtype=torch.float64))
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
    assert weight_error(heads, factors) < 1e-12


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
    problem = hk.Problem.collaborative(
        torch.zeros(1, T, 37), torch.zeros(1, T, 37), torch.zeros(1, H, T, 2), factors.mixing.float()
    )  # fmt: skip
    assert factors.executed_features == int(problem.score_widths().sum())


# ---------------------------------------------------------------------- shared features
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
    torch.testing.assert_close(factors.mixing, torch.ones(H, D, dtype=torch.float64))
    assert weight_error(heads, ragged(heads, D)) > 0.5


@pytest.mark.parametrize("method", METHODS)
def test_rotated_heads_are_the_same_heads(method: str) -> None:
    heads = random_heads(bias=False)
    rotation = torch.linalg.qr(normal(H, D, D)).Q
    rotated = Heads(rotation @ heads.query, rotation @ heads.key, heads.scale)
    factors = METHODS[method](heads, 10)
    assert weight_error(rotated, factors) == pytest.approx(weight_error(heads, factors))
    whole = METHODS[method](rotated, H * D)
    assert weight_error(heads, whole) < 1e-12


def test_the_same_call_gives_the_same_numbers() -> None:
    heads = random_heads()
    state = torch.get_rng_state()
    one, other = (cp(heads, 9) for _ in range(2))
    for field in dataclasses.fields(Factors)[:4]:
        assert torch.equal(getattr(one, field.name), getattr(other, field.name))
    assert torch.equal(state, torch.get_rng_state())


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


# ---------------------------------------------------------------------- what moments are for
@pytest.mark.parametrize("method", METHODS)
def test_scores_are_right_on_average(method: str) -> None:
    """Over the calibration queries, for every key: what the features miss of the mean is in the content weights."""
    heads = random_heads()
    x, _, moments = random_moments()
    y = 10 * normal(7, D_in_k)
    queries = x.flatten(0, 1)
    before = scores_before(heads, queries, y)
    after = scores_after(METHODS[method](heads, 5, moments), queries, y)
    uncorrected = scores_after(METHODS[method](heads, 5), queries, y)
    assert (before - uncorrected).mean(1).abs().max() > 0.1
    torch.testing.assert_close(after.mean(1), before.mean(1), rtol=1e-9, atol=1e-7)


@pytest.mark.parametrize("calibrated", [False, True])
def test_score_error_is_that_of_the_scores(calibrated: bool) -> None:
    """Of every query with the keys of every sentence, each row less its mean."""
    heads = random_heads()
    x, y, moments = random_moments()
    factors = cp(heads, 7, moments if calibrated else None, iterations=5)
    before, after = (
        torch.stack([score(x.flatten(0, 1), keys) for keys in y])
        for score in (
            lambda *inputs: scores_before(heads, *inputs),
            lambda *inputs: scores_after(factors, *inputs),
        )
    )
    before, after = (scores - scores.mean(-1, keepdim=True) for scores in (before, after))
    expected = float((before - after).norm() / before.norm())
    assert score_error(heads, factors, moments) == pytest.approx(expected, rel=1e-4)


def test_moments_make_scores_better_and_weights_worse() -> None:
    heads = random_heads()
    _, _, moments = random_moments()
    for method in METHODS.values():
        plain, calibrated = method(heads, 8), method(heads, 8, moments)
        assert score_error(heads, calibrated, moments) < score_error(heads, plain, moments)
        assert weight_error(heads, calibrated) > weight_error(heads, plain)


# ---------------------------------------------------------------------- bad input
GOOD: dict[str, Any] = {
    "query": torch.zeros(2, 3, 5),
    "key": torch.zeros(2, 3, 4),
    "scale": 1.0,
    "query_bias": torch.zeros(2, 3),
}
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no tensor": ({"query": 3}, TypeError, "query is 3; pass a floating tensor [H, D, D_in]."),
    "integers": (
        {"key": torch.zeros(2, 3, 4, dtype=torch.int8)},
        TypeError,
        "key has dtype torch.int8; pass a floating tensor [H, D, D_in_k].",
    ),
    "rank": (
        {"query": torch.zeros(6, 5)},
        ValueError,
        "query has shape [6, 5]; pass [H, D, D_in].",
    ),
    "no heads": (
        {"query": torch.zeros(0, 3, 5)},
        ValueError,
        "query has shape [0, 3, 5]; pass [H, D, D_in].",
    ),
    "NaN": (
        {"query": torch.full((2, 3, 5), torch.nan)},
        ValueError,
        "query holds NaN or infinity; pass finite weights.",
    ),
    "infinite bias": (
        {"query_bias": torch.full((2, 3), torch.inf)},
        ValueError,
        "query_bias holds NaN or infinity; pass finite weights.",
    ),
    "grouped keys": (
        {"key": torch.zeros(1, 3, 4)},
        ValueError,
        "key has 1 heads of width 3; query has 2 of width 3; repeat keys that heads share.",
    ),
    "bias of one dimension": (
        {"query_bias": torch.zeros(6)},
        ValueError,
        "query_bias has shape [6]; pass [H, D].",
    ),
    "bias of other heads": (
        {"query_bias": torch.zeros(3, 2)},
        ValueError,
        "query_bias has shape [3, 2]; pass [H, D] = [2, 3].",
    ),
    "scale 0": ({"scale": 0.0}, ValueError, "scale is 0.0; pass the factor"),
    "scale NaN": ({"scale": float("nan")}, ValueError, "scale is nan; pass the factor"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_heads(name: str) -> None:
    bad, kind, message = BAD[name]
    with pytest.raises(kind, match="^" + re.escape(message)):
        Heads(**{**GOOD, **bad})


@pytest.mark.parametrize("method", METHODS)
def test_bad_dims(method: str) -> None:
    for dim in (0, -3):
        with pytest.raises(ValueError, match=f"^dim is {dim}; pass at least 1"):
            METHODS[method](random_heads(), dim)
    for wrong in (2.5, True, None):
        with pytest.raises(TypeError, match=f"^dim is {wrong}; pass a number of features."):
            METHODS[method](random_heads(), wrong)


def test_bad_options() -> None:
    heads = random_heads()
    with pytest.raises(ValueError, match=r"^multiple is 0; pass 1 to 8, which is dim\."):
        ragged(heads, 8, multiple=0)
    with pytest.raises(ValueError, match=r"^multiple is 16; pass 1 to 8, which is dim\."):
        ragged(heads, 8, multiple=16)
    with pytest.raises(ValueError, match=r"^iterations is 0; pass at least 1\."):
        cp(heads, 8, iterations=0)
    for tolerance in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"^tolerance is {tolerance}; pass 0 or a small share"):
            cp(heads, 8, tolerance=tolerance)
    other = ragged(random_heads(H=3), 4)
    with pytest.raises(
        ValueError, match=r"^factors have \[H, D_in, D_in_k\] = \[3, 20, 18\]; those"
    ):
        weight_error(heads, other)
