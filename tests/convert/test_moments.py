"""Moments of a layer's inputs against loops over sentences, rows and keys."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from heads_kernels.convert import Heads, Moments, ragged
from tests.support.alike import assert_alike

B, T, S, D_in, D_in_k = 3, 7, 5, 6, 4


def real(*lengths: int, size: int) -> Tensor:
    return torch.arange(size) < torch.tensor(lengths)[:, None]


def by_loops(
    query: Tensor, key: Tensor, query_mask: Tensor, key_mask: Tensor, is_causal: bool
) -> tuple[int, Tensor, Tensor, Tensor]:
    rows = query[query_mask].double()
    covariances = torch.zeros(key.shape[-1], key.shape[-1], dtype=torch.double)
    for b in range(len(query)):
        for t in range(query.shape[1]):
            seen = [s for s in range(key.shape[1]) if key_mask[b, s] and not (is_causal and s > t)]
            if query_mask[b, t] and seen:
                covariances += torch.cov(key[b, seen].double().T, correction=0).reshape_as(
                    covariances
                )
    return len(rows), rows.sum(0), rows.T @ rows, covariances


def agree(found: Moments, expected: tuple[int, Tensor, Tensor, Tensor]) -> None:
    count, query_sum, query_outer, key_outer = expected
    assert int(found.count) == count
    assert_alike(found.query_sum, query_sum)
    assert_alike(found.query_outer, query_outer)
    assert_alike(found.key_outer, key_outer)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(7, 7, 7), (7, 1, 4), (0, 3, 5)])
def test_self_attention(lengths: tuple[int, ...], is_causal: bool) -> None:
    x, mask = torch.randn(B, T, D_in), real(*lengths, size=T)
    found = Moments.of(x, query_mask=mask, is_causal=is_causal)
    agree(found, by_loops(x, x, mask, mask, is_causal))


@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_on_the_left_and_keys_of_their_own(is_causal: bool) -> None:
    x, rows, keys = torch.randn(B, T, D_in), real(7, 3, 5, size=T), real(4, 7, 6, size=T).flip(1)
    found = Moments.of(x, query_mask=rows, key_mask=keys, is_causal=is_causal)
    agree(found, by_loops(x, x, rows, keys, is_causal))


def test_cross_attention() -> None:
    x, y = torch.randn(B, T, D_in), torch.randn(B, S, D_in_k)
    rows, keys = real(7, 2, 4, size=T), real(5, 1, 3, size=S)
    found = Moments.of(x, y, query_mask=rows, key_mask=keys)
    agree(found, by_loops(x, y, rows, keys, False))
    all_real = Moments.of(x, y)
    agree(all_real, by_loops(x, y, real(T, T, T, size=T), real(S, S, S, size=S), False))


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_is_not_real_is_not_read(is_causal: bool) -> None:
    x, mask = torch.randn(B, T, D_in), real(7, 3, 5, size=T)
    expected = by_loops(x, x, mask, mask, is_causal)
    agree(
        Moments.of(
            x.masked_fill(~mask[..., None], torch.nan), query_mask=mask, is_causal=is_causal
        ),
        expected,
    )


def test_batches_add_up() -> None:
    x, mask = torch.randn(B, T, D_in, dtype=torch.bfloat16), real(7, 3, 5, size=T)
    whole = Moments.of(x, query_mask=mask)
    one, *others = (Moments.of(x[b], query_mask=mask[b]) for b in range(B))
    agree(
        sum(others, start=one),
        (int(whole.count), whole.query_sum, whole.query_outer, whole.key_outer),
    )


def test_a_row_of_sentences_added_to_each_sees_its_own_mean() -> None:
    """What a whole sentence of keys shares is no matter: the softmax does not see it."""
    x = torch.randn(B, T, D_in, dtype=torch.double)
    moved = x + 100 * torch.randn(B, 1, D_in, dtype=torch.double)
    assert_alike(Moments.of(moved).key_outer, Moments.of(x).key_outer)


BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "integer inputs": (
        (torch.zeros(2, 3, dtype=torch.int64),),
        {},
        "query_inputs has dtype torch.int64 and shape [2, 3]; pass a floating tensor",
    ),
    "no tokens' dimension": (
        (torch.zeros(3),),
        {},
        "query_inputs has dtype torch.float32 and shape [3]; pass a floating tensor",
    ),
    "float mask": (
        (torch.zeros(2, 3),),
        {"query_mask": torch.ones(2)},
        "query_mask has dtype torch.float32 and shape [2]; pass bool [2], True for real tokens.",
    ),
    "mask of another shape": (
        (torch.zeros(2, 3), torch.zeros(4, 5)),
        {"key_mask": torch.ones(2, dtype=torch.bool)},
        "key_mask has dtype torch.bool and shape [2]; pass bool [4], True for real tokens.",
    ),
    "batches that differ": (
        (torch.zeros(2, 2, 3), torch.zeros(3, 4, 5)),
        {},
        "key_inputs has shape [3, 4, 5]; make its batch [2], as queries'.",
    ),
    "causal cross-attention": (
        (torch.zeros(2, 3), torch.zeros(2, 3)),
        {"is_causal": True},
        "is_causal is True with key_inputs; leave key_inputs out: self-attention.",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_batches(name: str) -> None:
    arguments, options, message = BAD[name]
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        Moments.of(*arguments, **options)


def test_moments_that_do_not_fit() -> None:
    heads = Heads(torch.randn(2, 3, D_in), torch.randn(2, 3, D_in_k), scale=1.0)
    x, y = torch.randn(T, D_in), torch.randn(S, D_in_k)
    with pytest.raises(ValueError, match=re.escape("widths (6, 6); those of the layer are (6, 4)")):
        ragged(heads, 2, Moments.of(x))
    with pytest.raises(ValueError, match=r"^moments are of no tokens; add a batch"):
        ragged(heads, 2, Moments.of(x, y, query_mask=torch.zeros(T, dtype=torch.bool)))
    with pytest.raises(ValueError, match=r"^moments hold NaN or infinity; look for them"):
        ragged(heads, 2, Moments.of(x * torch.nan, y))
    with pytest.raises(ValueError, match=re.escape("widths (6, 6); those that they are added to")):
        Moments.of(x, y) + Moments.of(x)
