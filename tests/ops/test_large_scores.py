"""Biases, content biases, sinks and scores of any finite size, by a call with small ones that has the same result."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from tests.ops.calls import NAMES, call, run, tensors
from tests.support.alike import assert_alike

LEAST, MOST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
INF = torch.inf
#: The operators that have sinks, and all of them.
WITH_SINKS = list(product(("gated_attention", "collaborative_attention", "attention_statistics"), NAMES))
EVERY = [*WITH_SINKS, *product(("entmax_attention",), NAMES)]
#: Two tiles of keys; one row of them may be split.
S = 70


def patterns() -> tuple[Tensor, Tensor, Tensor]:
    """Biases of rows `[rows, S]`, small ones with the same probabilities, and which rows need scores of 0 for that."""
    zero = torch.zeros(S)
    some = torch.arange(S) % 3 == 0
    rows = [
        (zero.masked_fill(some, LEAST), zero.masked_fill(some, -INF), 1),
        (zero.masked_fill(some, -3e38), zero.masked_fill(some, -INF), 1),
        (zero.masked_fill(some, 3e38), zero.masked_fill(~some, -INF), 0),
        (zero.index_fill(0, torch.tensor([5]), MOST), zero.masked_fill(torch.arange(S) != 5, -INF), 1),
        (zero.index_fill(0, torch.tensor([66]), 3e38), zero.masked_fill(torch.arange(S) != 66, -INF), 1),
        (torch.full((S,), LEAST), zero, 0),
        (torch.full((S,), -1e9), zero, 0),
        (torch.full((S,), 3e38), zero, 0),
        (torch.full((S,), -3e38).masked_fill(some, LEAST), zero.masked_fill(some, -INF), 0),
    ]  # fmt: skip
    large, small, random = zip(*rows, strict=True)
    return torch.stack(large), torch.stack(small), torch.tensor(random, dtype=torch.float32)


LARGE, SMALL, RANDOM = patterns()
ROWS = len(LARGE)


def operands(operator: str, T: int, by_head: bool) -> dict[str, Any]:
    """Random tensors whose scores are 0 in the rows, or in the heads, that need it."""
    heads = ROWS if by_head else 2
    given: dict[str, Any] = tensors(operator, B=1, H=heads, Hk=heads, T=T, S=S, dtype=torch.float32)
    given.pop("content_bias", None)
    if by_head and "mixing" in given:
        given["mixing"] *= RANDOM[:, None]
    else:
        given["query"] *= RANDOM[:, None, None] if by_head else RANDOM[:, None]
    if operator == "entmax_attention":
        given["alpha"] = torch.linspace(1.2, 2.0, heads)
    return given


def results(operator: str, backend: str, /, **given: Any) -> dict[str, Tensor]:
    """The results, lse too where the operator returns it, and the gradients of query, key, value, mixing and sinks."""
    if operator == "attention_statistics":
        return call(operator, backend, **given, received=True)._asdict()
    heads, T, Dv = given["value"].shape[1], given["query"].shape[-2], given["value"].shape[-1]
    dout = torch.ones(1, heads, T, Dv).cumsum(-1)
    has_lse = operator != "entmax_attention"
    if has_lse and ROWS in (heads, T):
        # Softmax keeps one number of a row, in which the sum of several large scores is lost: docs/limits.md.
        dout *= RANDOM[:, None, None] if heads == ROWS else RANDOM[:, None]
    found = run(operator, backend, dout, **given)
    for name in ("alpha", "bias", "content_bias"):
        found.pop(name, None)
    if has_lse:
        found["lse"] = call(operator, backend, **given, return_lse=True)[1]
    return found


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], **added: Tensor) -> None:
    """`added` broadcasts to rows: what a result has with a large bias beside that with a small one."""
    for name, more in added.items():
        size = more.abs().clamp(min=1.0)
        assert_alike(found.pop(name) / size, (expected.pop(name) + more) / size, name=name)
    assert_alike(found, expected)


#: The lse of a large bias less that of the small one.
ADDED = LARGE.masked_fill(SMALL == -INF, -INF).amax(-1)


@pytest.mark.parametrize("place", ["pairs", "keys", "offsets", "content"])
@pytest.mark.parametrize(("operator", "backend"), EVERY)
def test_a_large_bias(operator: str, backend: str, place: str) -> None:
    if place == "pairs":  # the patterns are those of query rows, else of heads
        given, large, small, added = operands(operator, ROWS, False), LARGE, SMALL, ADDED
    else:
        given, added = operands(operator, 1, True), ADDED[:, None]
        large, small = LARGE[:, None], SMALL[:, None]
    if place == "content":
        if operator != "collaborative_attention":
            pytest.skip("without a content bias")
        given["scale"] = 1.0
        large, small = LARGE.clone(), small.clone()
        large[-1], small[-1] = 0.0, 0.0  # kernels bound what is this large: none is larger
        found = results(operator, backend, **given, content_bias=large[None])
        del found["lse"]
    elif place == "offsets":  # T is 1: the table is a row of the bias
        found = results(operator, backend, **given, bias=hk.OffsetBias(LARGE, first=0))
    else:
        found = results(operator, backend, **given, bias=large)
    expected = results(operator, "eager", **given, bias=small)
    expected = {name: expected[name] for name in found}
    rows = found.keys() & {"lse", "max_score"}
    compare(found, expected, **dict.fromkeys(rows, added))


SINKS = torch.tensor([1e20, MOST, -INF, -1e20, LEAST])


@pytest.mark.parametrize("keys", [0, S])
@pytest.mark.parametrize(("operator", "backend"), WITH_SINKS)
def test_a_large_sink(operator: str, backend: str, keys: int) -> None:
    heads = len(SINKS)
    given: dict[str, Any] = tensors(operator, B=1, H=heads, Hk=heads, T=3, S=keys, dtype=torch.float32)
    given.pop("content_bias", None)
    small = torch.tensor([1e4, 1e4, -INF, -INF, -INF])  # weights of 0 beside any score, or none
    expected = results(operator, "eager", **given, sinks=small)
    added = torch.where(SINKS > 0, SINKS - small, 0.0)[:, None]
    if keys == 0:  # lse is the sink
        expected["lse"] = SINKS[:, None].expand_as(expected["lse"])
        added = torch.zeros_like(added)
    compare(results(operator, backend, **given, sinks=SINKS), expected, lse=added)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize(("operator", "backend"), [each for each in EVERY if each[0] != "attention_statistics"])
def test_a_large_score_takes_all(operator: str, backend: str, length: int) -> None:
    given = operands(operator, length, True)
    given["query"].zero_()[..., 0] = 1e19
    given["key"][..., 66, 0] = 1e19
    if "mixing" in given:
        given["mixing"] = torch.ones_like(given["mixing"])
    out = call(operator, backend, **given)
    assert_alike(out, given["value"][:, :, 66:67].expand_as(out))
