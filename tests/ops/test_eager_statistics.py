"""Attention statistics on every backend against a loop over rows and keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from tests.ops.calls import NAMES, assert_same_bits, call, serve, tensors
from tests.support.alike import assert_alike
from tests.support.reference import masks, pairs

B, H, T, S, D, Dv = 2, 4, 5, 7, 8, 6
INF, NAN = float("inf"), float("nan")
STATISTICS = NAMES


def brute_statistics(scores: Tensor, visible: Tensor, excluded: Tensor) -> list[Tensor]:
    """Of rows and keys, row by row, key by key."""
    rows = []
    received = torch.zeros(*scores.shape[:2], scores.shape[3], dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, scores.shape[:3])).tolist():
        seen = [j for j in range(scores.shape[3]) if visible[b, h, i, j]]
        if not seen:
            rows.append((-INF, -INF, 0.0, -1, 0.0))
            continue
        weights = torch.exp(scores[b, h, i, seen] - scores[b, h, i, seen].max())
        p = (weights / weights.sum()).tolist()
        lse = torch.logsumexp(scores[b, h, i, seen], 0).item()
        best, argmax = 0.0, -1
        for share, j in zip(p, seen, strict=True):
            received[b, h, j] += share
            if not excluded[b, j] and (argmax == -1 or share > best):
                best, argmax = share, j
        top = -INF if argmax == -1 else scores[b, h, i, argmax].item()
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        rows.append((lse, top, best, argmax, entropy))
    table = torch.tensor(rows, dtype=torch.float64).reshape(*scores.shape[:3], 5)
    return [*table.unbind(-1), received]


def scores_of(arguments: dict[str, Tensor]) -> Tensor:
    query, key = arguments["query"].double(), arguments["key"].double()
    width = query.shape[-1]
    if "mixing" in arguments:
        width /= len(arguments["mixing"])
        scores = torch.einsum("btd,hd,bsd->bhts", query, arguments["mixing"].double(), key)
        scores = scores + arguments["content_bias"].double()[:, :, None]
    else:
        heads = query.shape[1] // key.shape[1]
        key = torch.stack([key[:, h // heads] for h in range(query.shape[1])], 1)
        scores = torch.einsum("bhtd,bhsd->bhts", query, key)
    return scores * width**-0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["gated_attention", "collaborative_attention"])
@pytest.mark.parametrize("mask", masks(B, H, T, S))
@pytest.mark.parametrize("backend", STATISTICS)
def test_statistics(backend: str, mask: str, form: str, dtype: torch.dtype) -> None:
    options, sees = masks(B, H, T, S)[mask]
    arguments = tensors(form, dtype=dtype)
    del arguments["value"]
    excluded = torch.zeros(B, S, dtype=torch.bool)
    excluded[0, [0, 3]] = True
    excluded[1] = True  # nothing is left
    got = call(
        "attention_statistics",
        backend,
        **arguments,
        **options,
        exclude_keys=excluded,
        received=True,
    )
    want = brute_statistics(scores_of(arguments), pairs(B, H, T, S, sees), excluded)
    inside = torch.float64 if dtype == torch.float64 else torch.float32
    # Kernels for GPUs round the mixed query to the working dtype; all else is of float32.
    mixed = backend in ("triton", "cuda") and form == "collaborative_attention"
    least = dtype if mixed else inside
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert a.dtype == (torch.int64 if name == "argmax" else inside)
        assert_alike(a.double(), b.double(), dtype=least, name=name)


@pytest.mark.parametrize("backend", STATISTICS)
def test_statistics_of_many_rows(backend: str) -> None:
    """More rows than a block, a band and lengths that change within it."""
    t, s = 150, 140
    arguments = tensors("attention_statistics", B=1, H=1, Hk=1, T=t, S=s)
    mask = hk.Mask(causal="lower_right", window=(40, 0), query_lengths=[130])
    got = call("attention_statistics", backend, **arguments, attn_mask=mask, received=True)
    visible = pairs(1, 1, t, s, lambda b, h, i, j: i + s - t - 40 <= j <= i + s - t and i < 130)
    want = brute_statistics(scores_of(arguments), visible, torch.zeros(1, s, dtype=torch.bool))
    for a, b in zip(got, want, strict=True):
        assert_alike(a.double(), b.double())


@pytest.mark.parametrize("backend", STATISTICS)
def test_statistics_of_ties_and_outliers(backend: str) -> None:
    query = torch.tensor([1.0, 0.0]).reshape(1, 1, 1, 2)
    key = torch.zeros(1, 1, 6, 2)
    ties = call("attention_statistics", backend, query=query, key=key)
    assert ties.argmax.item() == 0
    assert ties.max_prob.item() == pytest.approx(1 / 6)
    assert ties.entropy.item() == pytest.approx(1.791759469)
    # the excluded key takes all the probability; among the others key 4 still has the largest score
    key[0, 0, :, 0] = torch.tensor([0.0, 5000.0, 1.0, 0.0, 2.0, 2.0])
    first = torch.zeros(6, dtype=torch.bool)
    first[1] = True
    sharp = call("attention_statistics", backend, query=query, key=key, exclude_keys=first)
    assert sharp.argmax.item() == 4
    assert sharp.max_score.item() == pytest.approx(2 / 2**0.5)
    assert sharp.max_prob.item() == 0.0
    assert sharp.entropy.item() == 0.0
    assert not sharp.lse.requires_grad


@pytest.mark.parametrize("empty", ["B", "T", "S"])
@pytest.mark.parametrize("backend", STATISTICS)
def test_statistics_of_nothing(backend: str, empty: str) -> None:
    got = call("attention_statistics", backend, **tensors("attention_statistics", **{empty: 0}))
    assert got.lse.shape == tuple({"B": B, "H": H, "T": T, "S": S, empty: 0}[n] for n in "BHT")
    assert (got.lse == -INF).all()
    assert (got.argmax == -1).all()
    assert (got.max_score == -INF).all()
    assert not got.max_prob.any()
    assert not got.entropy.any()


@pytest.mark.parametrize("backend", STATISTICS)
def test_statistics_ignore_hidden_poison(backend: str) -> None:
    arguments = tensors("attention_statistics")
    mask = hk.Mask(key_lengths=[4, 6])
    serve("attention_statistics", backend, **arguments, attn_mask=mask)
    options = {"attn_mask": mask, "received": True, "backend": backend}
    want = hk.attention_statistics(**arguments, **options)
    arguments["key"][0, :, 4:] = NAN
    arguments["key"][1, :, 6:] = INF
    got = hk.attention_statistics(**arguments, **options)
    assert_same_bits(backend, got, want)
