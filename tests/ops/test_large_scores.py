"""Biases, content biases, sinks and scores of any finite size, by a call with small ones that has the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from tests.ops.calls import DIFFERENTIABLE, NAMES, call, tensors
from tests.support.alike import assert_alike

LEAST, MOST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
INF = torch.inf
EVERY = [
    *DIFFERENTIABLE,
    *(
        (operator, name)
        for operator in ("entmax_attention", "attention_statistics")
        for name in NAMES
    ),
]
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
    """The results, and the gradients of all tensors but alpha; lse, where the operator returns it."""
    if operator == "attention_statistics":
        return call(operator, backend, **given, received=True)._asdict()
    names = ("query", "key", "value", "mixing", "sinks")
    leaves = {name: given[name].requires_grad_() for name in names if name in given}
    if operator == "entmax_attention":
        out = call(operator, backend, **given)
    else:
        out, lse = call(operator, backend, **given, return_lse=True)
    dout = torch.ones_like(out).cumsum(-1)
    if operator != "entmax_attention" and out.shape[1:3].count(ROWS):
        # Softmax keeps one number of a row, in which the sum of several large scores is lost: docs/limits.md.
        dout *= RANDOM[:, None, None] if out.shape[1] == ROWS else RANDOM[:, None]
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    found = {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}
    if operator != "entmax_attention":
        found["lse"] = lse.detach()
    return found


def compare(found: dict[str, Any], expected: dict[str, Any], added: Tensor) -> None:
    """`added` broadcasts to rows: what the lse of a large bias has beside that of a small one."""
    if "lse" in found:
        size = added.abs().clamp(min=1.0)
        assert_alike(found["lse"] / size, (expected["lse"] + added) / size)
    rest = [name for name, value in expected.items() if name != "lse" and value is not None]
    assert_alike({n: found[n] for n in rest}, {n: expected[n] for n in rest})


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
        found.pop("lse")
    elif place == "offsets":  # T is 1: the table is a row of the bias
        found = results(operator, backend, **given, bias=hk.OffsetBias(LARGE, first=0))
    else:
        found = results(operator, backend, **given, bias=large)
    expected = results(operator, "eager", **given, bias=small)
    if operator == "attention_statistics":  # the largest score has the bias too
        size = added.abs().clamp(min=1.0)
        assert_alike(found.pop("max_score") / size, (expected.pop("max_score") + added) / size)
    compare(found, expected, added)


SINKS = torch.tensor([1e20, MOST, -INF, -1e20, LEAST])


@pytest.mark.parametrize("keys", [0, S])
@pytest.mark.parametrize(
    ("operator", "backend"), [each for each in EVERY if each[0] != "entmax_attention"]
)
def test_a_large_sink(operator: str, backend: str, keys: int) -> None:
    heads = len(SINKS)
    given: dict[str, Any] = tensors(
        operator, B=1, H=heads, Hk=heads, T=3, S=keys, dtype=torch.float32
    )
    given.pop("content_bias", None)
    small = torch.tensor([1e4, 1e4, -INF, -INF, -INF])  # weights of 0 beside any score, or none
    expected = results(operator, "eager", **given, sinks=small)
    added = torch.where(SINKS > 0, SINKS - small, 0.0)[:, None]
    if keys == 0:  # lse is the sink
        expected["lse"] = SINKS[:, None].expand_as(expected["lse"])
        added = torch.zeros_like(added)
    compare(results(operator, backend, **given, sinks=SINKS.clone()), expected, added)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize(
    ("operator", "backend"), [each for each in EVERY if each[0] != "attention_statistics"]
)
def test_a_large_score_takes_all(operator: str, backend: str, length: int) -> None:
    given = operands(operator, length, True)
    given["query"].zero_()[..., 0] = 1e19
    given["key"][..., 66, 0] = 1e19
    if "mixing" in given:
        given["mixing"] = torch.ones_like(given["mixing"])
    out = call(operator, backend, **given)
    assert_alike(out, given["value"][:, :, 66:67].expand_as(out))
