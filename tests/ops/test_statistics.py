"""Statistics of attention rows against brute force, on the masks and mixings of the named cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.batch import expand_bias
from heads_kernels.testing import CASES, Case, peak_memory, plain, row_statistics
from tests.ops.calls import NAMES, assert_same_bits, call, parsed, serve
from tests.support.alike import assert_alike

BACKENDS = NAMES
QUICK = [case for case in CASES if "model" not in case.tags and not case.dropout_p]


def arguments(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    return row_statistics.statistics_arguments(case.make(dtype))


def widened(value: object) -> object:
    if isinstance(value, hk.OffsetBias):
        return hk.OffsetBias(value.values.double())
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def brute_force(given: dict[str, object], excluded: Tensor | None = None) -> hk.AttentionStatistics:
    """From the whole matrix of probabilities in float64; `excluded` is `[B or 1, S]`."""
    wide = {name: widened(value) for name, value in given.items()}
    problem = parsed("attention_statistics", **wide)
    _, lse, p = plain(problem)
    entropy = torch.where(p > 0, -p * p.clamp(min=5e-324).log(), 0.0).sum(-1)
    visible = problem.intervals.to_dense(problem.T, problem.S).expand(p.shape)
    if problem.bias is not None:
        visible = visible & (expand_bias(problem.bias, problem.B) > -torch.inf)
    allowed = visible if excluded is None else visible & ~excluded[:, None, None]
    if problem.S == 0:
        return hk.AttentionStatistics(lse, lse * 0, lse.long(), entropy)
    best, argmax = p.masked_fill(~allowed, -1.0).max(-1)
    nothing = ~allowed.any(-1)
    return hk.AttentionStatistics(
        lse, best.masked_fill(nothing, 0.0), argmax.masked_fill(nothing, -1), entropy
    )


def agree(got: hk.AttentionStatistics, want: hk.AttentionStatistics, dtype: torch.dtype) -> None:
    for name in ("lse", "max_prob", "entropy"):
        assert_alike(getattr(got, name).double(), getattr(want, name), dtype=dtype, name=name)
    assert got.argmax.dtype == torch.int64
    assert torch.equal(got.argmax, want.argmax)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", QUICK, ids=lambda case: f"{case.operator}-{case}")
def test_case(case: Case, dtype: torch.dtype, backend: str) -> None:
    """Held to the bound of `row_statistics`, which follows from the roundings of scores."""
    if not case.S:
        pytest.skip("no keys: test_eager_statistics.py")
    inputs = case.make(dtype)
    serve("attention_statistics", backend, **row_statistics.statistics_arguments(inputs))
    wrong, _ = row_statistics.check_statistics(inputs, backend)
    assert not wrong, wrong


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["small", "padded", "holes", "window", "lower_right_blind_rows"])
@pytest.mark.parametrize("operator", ["gated_attention", "collaborative_attention"])
def test_excluded_keys(operator: str, name: str, backend: str) -> None:
    """They keep their share of the probability and never are the maximum."""
    case = next(c for c in QUICK if c.operator == operator and c.name == name)
    dtype = torch.float64 if backend in ("eager", "cpu") else torch.float32
    given = arguments(case, dtype)
    for share, batch in ((0.3, case.B), (0.6, 1), (1.0, 1)):
        excluded = torch.rand(batch, case.S) < share
        argument = excluded[0] if batch == 1 else excluded
        got = call("attention_statistics", backend, **given, exclude_keys=argument)
        want = brute_force(given, excluded)
        if dtype == torch.float32:  # keys may tie
            there = got.argmax >= 0
            chosen = got.argmax.clamp(min=0)[..., None]
            out = excluded[:, None, None].expand(*chosen.shape[:3], case.S).gather(-1, chosen)
            assert torch.equal(there, want.argmax >= 0)
            assert not out[there].any()
            agree(got._replace(argmax=want.argmax), want, dtype)
        else:
            agree(got, want, dtype)
        unchanged = call("attention_statistics", backend, **given)
        assert_same_bits(backend, (got.lse, got.entropy), (unchanged.lse, unchanged.entropy))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("a", "largest"), [(1.0, 0.5761), (10.0, 0.99991), (100.0, 1.0)])
def test_softmax_saturates(backend: str, a: float, largest: float) -> None:
    """Scores [a, a, 2a], as in the usual example of why scores are divided by sqrt(D)."""
    query = torch.ones(1, 1, 1, 1)
    key = torch.tensor([a, a, 2 * a]).reshape(1, 1, 3, 1)
    got = call("attention_statistics", backend, query=query, key=key, scale=1.0)
    assert got.max_prob.item() == pytest.approx(largest, abs=5e-5)
    assert got.argmax.item() == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_even_attention(backend: str) -> None:
    """Equal scores: the first key, probability 1 / n, entropy ln n, lse = score + ln n."""
    query, key = torch.zeros(2, 3, 5, 8), torch.randn(2, 3, 70, 8)
    mask = hk.Mask(key_lengths=[70, 9])
    got = call("attention_statistics", backend, query=query, key=key, attn_mask=mask)
    for b, n in enumerate((70, 9)):
        for found, want in (
            (got.max_prob, 1 / n),
            (got.entropy, math.log(n)),
            (got.lse, math.log(n)),
        ):
            assert_alike(found[b], torch.full((3, 5), want))
    assert not got.argmax.any()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_long_rows_are_streamed(backend: str) -> None:
    """T = S = 4096: the matrix of one head would take 64 MiB."""
    query, key = torch.randn(1, 1, 4096, 16), torch.randn(1, 1, 4096, 16)
    call("attention_statistics", backend, query=query[:, :, :64], key=key)
    peak = peak_memory(lambda: call("attention_statistics", backend, query=query, key=key))
    assert peak.extra < 24 << 20, peak
    got = call("attention_statistics", backend, query=query, key=key)
    given = {"query": query[:, :, ::97], "key": key}
    agree(hk.AttentionStatistics(*(t[:, :, ::97] for t in got)), brute_force(given), torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_gradient(backend: str) -> None:
    query = torch.randn(1, 1, 3, 4, requires_grad=True)
    got = call("attention_statistics", backend, query=query, key=torch.randn(1, 1, 5, 4))
    assert not any(t.requires_grad for t in got)
