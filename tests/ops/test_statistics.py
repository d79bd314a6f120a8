"""Statistics of attention rows: the named cases, brute force, and what is particular to them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from benchmarks.peak import peak_memory
from heads_kernels.batch import expand_bias
from heads_kernels.testing import CASES, Case, row_statistics
from tests.ops.calls import NAMES, assert_same_bits, call, parsed, serve, tensors
from tests.support.alike import assert_alike
from tests.support.plain import plain

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
    received = None if problem.row_weights is None else (problem.row_weights[..., None] * p).sum(2)
    entropy = torch.where(p > 0, -p * p.clamp(min=5e-324).log(), 0.0).sum(-1)
    visible = problem.intervals.to_dense(problem.T, problem.S).expand(p.shape)
    if problem.bias is not None:
        visible = visible & (expand_bias(problem.bias, problem.B) > -torch.inf)
    allowed = visible if excluded is None else visible & ~excluded[:, None, None]
    if problem.S == 0:
        nothing = torch.full_like(lse, -torch.inf)
        return hk.AttentionStatistics(lse, nothing, lse * 0, lse.long(), entropy, received)
    best, argmax = p.masked_fill(~allowed, -1.0).max(-1)
    nothing = ~allowed.any(-1)
    score = (lse + best.clamp(min=0.0).log()).masked_fill(nothing, -torch.inf)
    best, argmax = best.masked_fill(nothing, 0.0), argmax.masked_fill(nothing, -1)
    return hk.AttentionStatistics(lse, score, best, argmax, entropy, received)


def agree(got: hk.AttentionStatistics, want: hk.AttentionStatistics, dtype: torch.dtype) -> None:
    for name in ("lse", "max_score", "max_prob", "entropy"):
        assert_alike(getattr(got, name).double(), getattr(want, name), dtype=dtype, name=name)
    assert (got.received is None) == (want.received is None)
    if got.received is not None and want.received is not None:
        assert_alike(got.received.double(), want.received, dtype=dtype, name="received")
    assert got.argmax.dtype == torch.int64
    assert torch.equal(got.argmax, want.argmax)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", QUICK, ids=lambda case: f"{case.operator}-{case}")
def test_case(case: Case, dtype: torch.dtype, backend: str) -> None:
    """Held to the bound of `row_statistics`, which follows from the roundings of scores."""
    if not case.S:
        pytest.skip("no keys: test_empty_calls")
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
        got = call("attention_statistics", backend, **given, exclude_keys=argument, received=True)
        want = brute_force({**given, "received": True}, excluded)
        if dtype == torch.float32:  # keys may tie
            there = got.argmax >= 0
            chosen = got.argmax.clamp(min=0)[..., None]
            out = excluded[:, None, None].expand(*chosen.shape[:3], case.S).gather(-1, chosen)
            assert torch.equal(there, want.argmax >= 0)
            assert not out[there].any()
            agree(got._replace(argmax=want.argmax), want, dtype)
        else:
            agree(got, want, dtype)
        unchanged = call("attention_statistics", backend, **given, received=True)
        kept = ("lse", "entropy", "received")
        assert_same_bits(
            backend, [getattr(got, n) for n in kept], [getattr(unchanged, n) for n in kept]
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_even_attention(backend: str) -> None:
    """Equal scores: the first key, probability 1 / n, entropy ln n, lse = score + ln n."""
    query, key = torch.zeros(2, 3, 5, 8), torch.randn(2, 3, 70, 8)
    mask = hk.Mask(key_lengths=[70, 9])
    got = call("attention_statistics", backend, query=query, key=key, attn_mask=mask)
    for b, n in enumerate((70, 9)):
        for found, want in (
            (got.max_score, 0.0),
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
    given = {"query": query, "key": key, "received": True}
    peak = peak_memory(lambda: call("attention_statistics", backend, **given))
    assert peak.extra < 24 << 20, peak
    *rows, received = call("attention_statistics", backend, **given)
    want = brute_force({"query": query[:, :, ::97], "key": key})
    agree(hk.AttentionStatistics(*(t[:, :, ::97] for t in rows)), want, torch.float32)
    assert_alike(received.sum(2), torch.full((1, 1), 4096.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_gradient(backend: str) -> None:
    query = torch.randn(1, 1, 3, 4, requires_grad=True)
    weights = torch.rand(3, requires_grad=True)
    given = {"query": query, "key": torch.randn(1, 1, 5, 4), "received": weights}
    got = call("attention_statistics", backend, **given)
    assert not any(t.requires_grad for t in got)


# ---------------------------------------------------------------------- what keys receive


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operator", ["gated_attention", "collaborative_attention"])
def test_received_is_the_gradient_of_a_value_of_ones(operator: str, backend: str) -> None:
    """d (sum_i w_i out_i) / d value_j of values of width 1, with a mask, sinks, a cap and a bias."""
    serve("attention_statistics", backend, **tensors("attention_statistics", dtype=torch.float32))
    B, H, T, S = 2, 4, 70, 75
    sizes: dict[str, Any] = {"B": B, "T": T, "S": S, "dtype": torch.float32}
    given: dict[str, Any] = tensors(operator, **sizes)
    given |= {
        "bias": torch.randn(H, T, S),
        "softcap": 2.0,
        "sinks": torch.randn(H),
        "attn_mask": hk.Mask(causal="lower_right", key_lengths=[75, 30], query_lengths=[70, 61]),
    }
    given.pop("value")
    weights = torch.randn(B, H, T)
    received = call("attention_statistics", backend, **given, received=weights).received
    wide = {name: widened(value) for name, value in given.items()}
    if operator == "gated_attention":  # a key of its own for each query head, and so a value
        wide["key"] = wide["key"].repeat_interleave(2, 1)
    value = torch.ones(B, H, S, 1, dtype=torch.float64, requires_grad=True)
    out = getattr(hk, operator)(value=value, **wide, backend="eager")[..., 0]
    (expected,) = torch.autograd.grad(out, value, weights.double())
    # Kernels for GPUs round the mixed query to the working dtype, here float32.
    assert_alike(received.double(), expected[..., 0], dtype=torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_rows_broadcast(backend: str) -> None:
    given = tensors("attention_statistics", T=70, S=66, dtype=torch.float32)
    ones = call("attention_statistics", backend, **given, received=True)
    for shape in ((), (70,), (4, 1), (2, 1, 1), (2, 4, 70)):
        again = call("attention_statistics", backend, **given, received=torch.full(shape, 1.0))
        assert_same_bits(backend, again[:5], ones[:5])
        assert_same_bits(backend, again.received, ones.received)
    weights = torch.rand(2, 1, 70)
    got = call("attention_statistics", backend, **given, received=weights).received
    whole = call("attention_statistics", backend, **given, received=weights.expand(2, 4, 70))
    assert_same_bits(backend, got, whole.received)
    assert call("attention_statistics", backend, **given, received=False).received is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_count_nothing(backend: str) -> None:
    """Rows of weight 0, padded rows and rows that see nothing, with NaN in all that nothing may read."""
    given = tensors("attention_statistics", B=1, T=70, S=66, dtype=torch.float32)
    mask = hk.Mask(query_lengths=[65], key_lengths=[60])
    weights = torch.rand(1, 4, 70)
    weights[..., 3] = 0.0
    spoiled = {name: tensor.clone() for name, tensor in given.items()}
    clean = call(
        "attention_statistics", backend, **given, attn_mask=mask, received=weights
    ).received
    assert not clean[..., 60:].any()
    spoiled["query"][:, :, 65:] = torch.nan
    spoiled["query"][:, :, 3] = torch.nan
    spoiled["key"][:, :, 60:] = torch.nan
    weights[..., 65:] = torch.nan
    got = call("attention_statistics", backend, **spoiled, attn_mask=mask, received=weights)
    assert_same_bits(backend, got.received, clean)
    hidden = torch.zeros(70, 66, dtype=torch.bool)
    nothing = call("attention_statistics", backend, **given, attn_mask=hidden, received=True)
    assert not nothing.received.any()
    assert (nothing.max_score == -torch.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_is_nan_reaches_the_keys_that_it_sees(backend: str) -> None:
    given = tensors("attention_statistics", B=1, H=2, Hk=2, T=70, S=70, dtype=torch.float32)
    given["query"][:, 1, 40] = torch.nan
    got = call("attention_statistics", backend, **given, is_causal=True, received=True)
    expected = torch.zeros(1, 2, 70, dtype=torch.bool)
    expected[:, 1, :41] = True
    assert torch.equal(got.received.isnan(), expected)
    assert got.max_score[:, 1, 40].isnan().all()
    assert got.max_score.isnan().sum() == 1


@pytest.mark.parametrize("sizes", [(0, 4, 5, 7), (2, 0, 5, 7), (2, 4, 0, 7), (2, 4, 5, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_calls(sizes: tuple[int, ...], backend: str) -> None:
    B, H, T, S = sizes
    query, key = torch.randn(B, H, T, 8), torch.randn(B, H, S, 8)
    got = call("attention_statistics", backend, query=query, key=key, received=True)
    assert got.received.shape == (B, H, S)
    assert not got.received.any()
    if S == 0:
        assert (got.lse == -torch.inf).all()
        assert (got.max_score == -torch.inf).all()
        assert (got.argmax == -1).all()
        assert not got.max_prob.any()
        assert not got.entropy.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operator", ["attention_statistics", "collaborative_attention"])
def test_received_is_the_same_with_any_number_of_threads(operator: str, backend: str) -> None:
    given = tensors(operator, B=1, T=300, S=333, D=24, dtype=torch.float32)
    given.pop("value", None)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(call("attention_statistics", backend, **given, received=True).received)
    finally:
        torch.set_num_threads(before)
    assert_same_bits(backend, found[1:], [found[0], found[0]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_largest_score_under_a_sink_that_takes_all(backend: str) -> None:
    """Its probability rounds to 0, and so lse and max_prob do not tell it."""
    given = tensors("attention_statistics", T=9, S=70, dtype=torch.float32)
    plain_ = call("attention_statistics", backend, **given, received=True)
    got = call("attention_statistics", backend, **given, sinks=torch.full((4,), 1e4), received=True)
    assert not got.max_prob.any()
    assert not got.received.any()
    assert_same_bits(backend, got.max_score, plain_.max_score)
