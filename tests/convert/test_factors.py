"""Factors against the attention that they replace: exact at full rank, right on average, else refused."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

import heads_kernels as hk
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
    normal,
    random_heads,
    random_moments,
    scores_after,
    scores_before,
)
from tests.support.alike import assert_alike, rounding


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
    assert_alike(scores_after(factors, x[0], y[0]), expected)
    assert weight_error(heads, factors) < rounding(torch.float64)
    assert score_error(heads, factors, moments) < rounding(torch.float64)


def test_exact_at_the_rank_of_the_heads() -> None:
    """Heads of rank 2, and one of rank 0: fewer features than `H D` are exact, and no more are made."""
    mixes = normal(H, D, 2)
    mixes[1] = 0
    heads = Heads(mixes @ normal(H, 2, D_in), normal(H, D, D_in_k), 1.0)
    for method in METHODS.values():
        factors = method(heads, H * D)
        assert factors.features == [2, 0, 2, 2]
        assert weight_error(heads, factors) < rounding(torch.float64)


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
        assert weight_error(heads, factors) < rounding(torch.float64)
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
    assert_alike(out, expected, dtype=torch.float32)


def test_block_indicator_mixing_is_the_layer_itself() -> None:
    heads = random_heads()
    assert heads.query_bias is not None
    _, _, moments = random_moments()
    content = torch.einsum("hd,hde->he", heads.query_bias, heads.key)
    blocks = torch.eye(H, dtype=torch.float64).repeat_interleave(D, 1)
    same = Factors(heads.query.flatten(0, 1), heads.key.flatten(0, 1), blocks, content, heads.scale)
    for error in (weight_error(heads, same), score_error(heads, same, moments)):
        assert_alike(torch.tensor(error), torch.tensor(0.0), dtype=torch.float64)
    x, y = normal(5, D_in), normal(7, D_in_k)
    assert_alike(scores_after(same, x, y), scores_before(heads, x, y))


def test_a_key_bias_changes_nothing() -> None:
    heads = random_heads()
    x, y = normal(5, D_in), normal(7, D_in_k)
    biased = torch.cat([heads.key, normal(H, D, 1)], 2)
    with_bias = dataclasses.replace(heads, key=biased)
    ones = torch.cat([y, torch.ones(7, 1, dtype=torch.float64)], 1)
    before, after = scores_before(heads, x, y), scores_before(with_bias, x, ones)
    assert (before - after).abs().max() > 0.1
    assert_alike(before.softmax(-1), after.softmax(-1))


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
    assert_alike(after.mean(1), before.mean(1), dtype=torch.float32)


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
        "query holds NaN or infinity; correct these weights, or leave the layer out.",
    ),
    "infinite bias": (
        {"query_bias": torch.full((2, 3), torch.inf)},
        ValueError,
        "query_bias holds NaN or infinity; correct these weights, or leave the layer out.",
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
        with pytest.raises(ValueError, match=f"^dim is {dim}; pass an int of at least 1\\."):
            METHODS[method](random_heads(), dim)
    for wrong in (2.5, True, None):
        kind = type(wrong).__name__
        with pytest.raises(TypeError, match=f"^dim is a {kind}; pass an int of at least 1\\."):
            METHODS[method](random_heads(), wrong)


def test_bad_options() -> None:
    heads = random_heads()
    with pytest.raises(ValueError, match=r"^multiple is 0; pass 1 to 8, which is dim\."):
        ragged(heads, 8, multiple=0)
    with pytest.raises(ValueError, match=r"^multiple is 16; pass 1 to 8, which is dim\."):
        ragged(heads, 8, multiple=16)
    with pytest.raises(ValueError, match=r"^iterations is 0; pass an int of at least 1\."):
        cp(heads, 8, iterations=0)
    for tolerance in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"^tolerance is {tolerance}; pass 0 or a small share"):
            cp(heads, 8, tolerance=tolerance)
    other = ragged(random_heads(H=3), 4)
    with pytest.raises(
        ValueError, match=r"^factors have \[H, D_in, D_in_k\] = \[3, 20, 18\]; those"
    ):
        weight_error(heads, other)
