"""Masks and excluded keys that do not fit the call are refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import heads_kernels as hk
from tests.ops.bad_calls import (
    BOTH,
    B,
    S,
    T,
    f32,
    good,
    refused,
)

MASKS: dict[str, tuple[Any, type[Exception], str]] = {
    "too long": (
        lambda: hk.Mask(key_lengths=[3, 8]),
        ValueError,
        "key_lengths is [3, 8]; lengths go from 0 to S = 7.",
    ),
    "negative": (
        lambda: hk.Mask(query_lengths=torch.tensor([-1, 5])),
        ValueError,
        "query_lengths is [-1, 5]; lengths go from 0 to T = 5.",
    ),
    "prefix too long": (
        lambda: hk.Mask(causal=True, prefix_lengths=[9, 1]),
        ValueError,
        "prefix_lengths is [9, 1]; lengths go from 0 to S = 7.",
    ),
    "count of lengths": (
        lambda: hk.Mask(key_lengths=[1, 2, 3]),
        ValueError,
        "key_lengths holds 3 lengths, but B is 2; pass 2, or 1 for all.",
    ),
    "size of key_mask": (
        lambda: hk.Mask(key_mask=torch.ones(B, T, dtype=torch.bool)),
        ValueError,
        "key_mask has shape [2, 5], but B is 2 and S is 7; pass [2 or 1, 7].",
    ),
    "float mask of another shape": (
        lambda: f32(T, S + 1),
        ValueError,
        "attn_mask has shape [5, 8], but scores are",
    ),
    "mask of numbers": (
        lambda: torch.ones(T, S, dtype=torch.int64),
        TypeError,
        "attn_mask has dtype torch.int64; pass a hk.Mask, or a bool tensor with True = may",
    ),
    "padding in two dimensions": (
        lambda: torch.ones(B, S, dtype=torch.bool),
        ValueError,
        (
            "attn_mask has shape [2, 7], but [B, H, T, S] is [2, 4, 5, 7]; 2-D is [T, S];"
            " pass a padding mask [B, S] as hk.Mask(key_mask=...)."
        ),
    ),
    "five dimensions": (
        lambda: torch.ones(1, 1, 1, T, S, dtype=torch.bool),
        ValueError,
        "attn_mask has shape [1, 1, 1, 5, 7]; pass a hk.Mask, or a bool tensor",
    ),
    "sparse": (
        lambda: torch.ones(T, S, dtype=torch.bool).to_sparse(),
        ValueError,
        "attn_mask has layout sparse_coo; pass a hk.Mask, or a bool tensor with True = may attend (a float",
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(S, dtype=torch.bool)] * T),
        ValueError,
        "attn_mask has layout nested; pass a hk.Mask, or a bool tensor with True = may attend (a float",
    ),
    "string": (
        lambda: "causal",
        TypeError,
        "attn_mask is a str; pass a hk.Mask, or a bool tensor with True = may attend (a float",
    ),
    "device": (
        lambda: torch.ones(T, S, dtype=torch.bool, device="meta"),
        ValueError,
        "attn_mask is on meta, but query is on cpu; move it there once, before the call.",
    ),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("operator", [*BOTH, "attention_statistics"])
def test_masks(operator: str, name: str) -> None:
    make, kind, message = MASKS[name]
    refused(operator, kind, message, attn_mask=make())


def test_mask_arguments() -> None:
    """What a mask can tell before it meets a call."""
    with pytest.raises(ValueError, match=r"causal is 'diagonal'; use False, True .*lower_right"):
        hk.Mask(causal="diagonal")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"key_mask has dtype torch.int64; pass a bool tensor \[B, S\]"
    ):
        hk.Mask(key_mask=torch.ones(B, S, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"key_lengths has dtype torch.float32; pass an integer"):
        hk.Mask(key_lengths=torch.ones(B))
    with pytest.raises(ValueError, match=r"window is \(1, -2\); pass \(left, right\)"):
        hk.Mask(window=(1, -2))


EXCLUDED: dict[str, tuple[Any, type[Exception], str]] = {
    "list": ([0], TypeError, "exclude_keys is a list; pass bool [S] = [7] or [B, S] = [2, 7], "),
    "dtype": (f32(S), TypeError, "exclude_keys has dtype torch.float32; pass bool [S] = [7] or "),
    "sparse": (
        torch.ones(S, dtype=torch.bool).to_sparse(),
        ValueError,
        "exclude_keys has layout sparse_coo; pass a dense tensor.",
    ),
    "size": (
        torch.ones(T, dtype=torch.bool),
        ValueError,
        "exclude_keys has shape [5]; pass bool [S] = [7] or [B, S] = [2, 7], ",
    ),
    "device": (
        torch.ones(S, dtype=torch.bool, device="meta"),
        ValueError,
        "exclude_keys is on meta; move it to cpu.",
    ),
}


@pytest.mark.parametrize("name", EXCLUDED)
def test_exclude_keys(name: str) -> None:
    exclude, kind, message = EXCLUDED[name]
    with pytest.raises(kind, match="^" + re.escape(message)):
        hk.attention_statistics(**good("attention_statistics"), exclude_keys=exclude)
