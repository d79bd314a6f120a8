"""Moments of a layer's inputs against loops over sentences, rows and keys."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from heads_kernels.convert import Heads, Moments
from tests.convert.random_heads import assert_moments, moments_by_hand
from tests.support.alike import assert_alike

B, T, S, D_in, D_in_k = 3, 7, 5, 6, 4


def real(*lengths: int, size: int, left: bool = False) -> Tensor:
    mask = torch.arange(size) < torch.tensor(lengths)[:, None]
    return mask.flip(1) if left else mask


WHOLE = real(T, T, T, size=T)
#: Real rows, and real keys: whole, padded, empty, of their own and on the left.
MASKS = [
    (WHOLE, WHOLE),
    *((rows := real(*lengths, size=T), rows) for lengths in ((7, 1, 4), (0, 3, 5))),
    (real(7, 3, 5, size=T), real(4, 7, 6, size=T, left=True)),
]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("rows", "keys"), MASKS)
def test_self_attention(rows: Tensor, keys: Tensor, is_causal: bool) -> None:
    """What is not real is not read."""
    x = torch.randn(B, T, D_in)
    expected = moments_by_hand([(x, x, rows, keys, is_causal)])
    read = x.masked_fill(~(rows | keys)[..., None], torch.nan)
    found = Moments.of(read, query_mask=rows, key_mask=keys, is_causal=is_causal)
    assert_moments(found, expected)


def test_cross_attention() -> None:
    x, y = torch.randn(B, T, D_in), torch.randn(B, S, D_in_k)
    rows, keys = real(7, 2, 4, size=T), real(5, 1, 3, size=S)
    found = Moments.of(x, y, query_mask=rows, key_mask=keys)
    assert_moments(found, moments_by_hand([(x, y, rows, keys, False)]))
    expected = moments_by_hand([(x, y, WHOLE, real(S, S, S, size=S), False)])
    assert_moments(Moments.of(x, y), expected)


def test_batches_add_up() -> None:
    x, mask = torch.randn(B, T, D_in, dtype=torch.bfloat16), real(7, 3, 5, size=T)
    one, *others = (Moments.of(x[b], query_mask=mask[b]) for b in range(B))
    assert_moments(sum(others, start=one), Moments.of(x, query_mask=mask))


def test_a_row_of_sentences_added_to_each_sees_its_own_mean() -> None:
    """What a whole sentence of keys shares is no matter: the softmax does not see it."""
    x = torch.randn(B, T, D_in, dtype=torch.double)
    moved = x + 100 * torch.randn(B, 1, D_in, dtype=torch.double)
    assert_alike(Moments.of(moved).key_outer, Moments.of(x).key_outer)


PAIR = torch.zeros(2, 3)
BAD: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((PAIR.long(),), {}, "query_inputs has dtype torch.int64"),
    ((PAIR[0],), {}, "query_inputs has dtype torch.float32 and shape"),
    ((PAIR,), {"query_mask": torch.ones(2)}, "query_mask has dtype"),
    (
        (PAIR, torch.zeros(4, 5)),
        {"key_mask": torch.ones(2, dtype=torch.bool)},
        "key_mask has dtype torch.bool and shape [2]; pass bool [4]",
    ),
    ((torch.zeros(2, 2, 3), torch.zeros(3, 4, 5)), {}, "key_inputs has shape [3, 4, 5]"),
    ((PAIR, PAIR), {"is_causal": True}, "is_causal is True with key_in"),
]


def test_bad_batches() -> None:
    for arguments, options, message in BAD:
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            Moments.of(*arguments, **options)


def test_moments_that_do_not_fit() -> None:
    heads = Heads(torch.randn(2, 3, D_in), torch.randn(2, 3, D_in_k), scale=1.0)
    x, y = torch.randn(T, D_in), torch.randn(S, D_in_k)
    for moments, message in (
        (Moments.of(x), re.escape("widths (6, 6); those of the layer are (6, 4)")),
        (Moments.of(x, y, query_mask=torch.zeros(T, dtype=torch.bool)), "moments has no tokens"),
        (Moments.of(x * torch.nan, y), "moments holds NaN or infinity"),
    ):
        with pytest.raises(ValueError, match=message):
            heads.fit(2, moments)
    with pytest.raises(ValueError, match=re.escape("widths (6, 6); those that they are added to")):
        Moments.of(x, y) + Moments.of(x)
