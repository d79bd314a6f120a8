"""Statistics of attention rows: the named cases, brute force, and what is particular to them."""

import functools
from typing import Any

import pytest
import torch

import heads_kernels as hk
from heads_kernels.testing import CASES, Case, compare, find, reference
from heads_kernels.testing.accuracy import Reference
from tests.ops.calls import NAMES, OPERATORS, assert_ok, assert_same_bits, call, serve, tensors, threads
from tests.support.alike import assert_alike
from tests.support.plain import plain

#: Not those that differ in their gates alone, and of 1000 keys those with few rows; test_empty_calls has no keys.
QUICK = [
    case
    for case in CASES
    if not (case.dropout_p or "model" in case.tags or case.name.startswith(("gate_", "closed")))
    and case.S > 0
    and case.T * case.S < 500_000
]


def measure(backend: str, **given: Any) -> hk.AttentionStatistics:
    return call("attention_statistics", backend, **given)


@functools.lru_cache(maxsize=2)
def expected(case: Case, dtype: torch.dtype, device: torch.device) -> Reference:
    """Shared by the backends, which are checked one after the other."""
    return reference(case.make(dtype, device).statistics())


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", QUICK)
def test_case(case: Case, dtype: torch.dtype, backend: str) -> None:
    serve("attention_statistics", backend, **case.make(dtype).statistics().arguments())
    assert_ok(compare(expected(case, dtype, torch.get_default_device()), backend))


@pytest.mark.parametrize("case", QUICK)
def test_oracle_is_the_plain_formula(case: Case) -> None:
    """Eager in float64: what keys receive are the probabilities by the weights of rows."""
    inputs = case.make(torch.float64)
    given = inputs.statistics().arguments()
    found, weights = measure("eager", **given), given["received"]
    _, lse, p = plain(inputs.parsed())
    assert_alike((found.lse, found.max_prob), (lse, p.amax(-1)))
    assert_alike(found.entropy, torch.special.entr(p).sum(-1))
    assert_alike(found.received, (p * weights[..., None]).sum(2))


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("name", ["small", "padded", "holes", "window", "lower_right_blind_rows"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_excluded_keys(operator: str, name: str, backend: str) -> None:
    """They keep their share of the probability and never are the maximum."""
    case = find(operator, name)
    inputs = case.make(torch.float32)
    given = inputs.statistics(received=True).arguments()
    p = plain(inputs.to(torch.float64).parsed()).probabilities
    every = measure(backend, **given)
    for share, batch in ((0.3, case.B), (0.6, 1), (1.0, 1)):
        excluded = torch.rand(batch, case.S) < share
        argument = excluded[0] if batch == 1 else excluded
        got = measure(backend, **given, exclude_keys=argument)
        for field in ("lse", "entropy", "received"):
            assert_same_bits(backend, getattr(got, field), getattr(every, field))
        best = p.masked_fill(excluded[:, None, None], 0.0).amax(-1)  # of float32: keys may tie
        assert_alike(got.max_prob.double(), best, dtype=torch.float32)
        found = got.argmax >= 0
        assert torch.equal(found, best > 0)
        at = p.gather(-1, got.argmax.clamp(min=0)[..., None])[..., 0]
        assert_alike(at[found], best[found], dtype=torch.float32)
        score = (got.lse + got.max_prob.log())[found]
        assert_alike(got.max_score[found], score)
        assert (got.max_score[~found] == -torch.inf).all()


@pytest.mark.parametrize("backend", NAMES)
def test_of_equal_scores_the_first_key_is_the_maximum(backend: str) -> None:
    query, key = torch.zeros(2, 3, 5, 8), torch.randn(2, 3, 70, 8)
    assert not measure(backend, query=query, key=key, attn_mask=hk.Mask(key_lengths=[70, 9])).argmax.any()


@pytest.mark.parametrize("backend", NAMES)
def test_no_gradient(backend: str) -> None:
    query = torch.randn(1, 1, 3, 4, requires_grad=True)
    weights = torch.rand(3, requires_grad=True)
    got = measure(backend, query=query, key=torch.randn(1, 1, 5, 4), received=weights)
    assert not any(t.requires_grad for t in got)


# ---------------------------------------------------------------------- what keys receive
@pytest.mark.parametrize("backend", NAMES)
def test_weights_of_rows_broadcast(backend: str) -> None:
    given = tensors("attention_statistics", T=70, S=66, dtype=torch.float32)
    ones = measure(backend, **given, received=True)
    for shape in ((), (70,), (4, 1), (2, 1, 1), (2, 4, 70)):
        assert_same_bits(backend, measure(backend, **given, received=torch.ones(shape)), ones)
    weights = torch.rand(2, 1, 70)
    got = measure(backend, **given, received=weights).received
    whole = measure(backend, **given, received=weights.expand(2, 4, 70))
    assert_same_bits(backend, got, whole.received)
    assert measure(backend, **given, received=False).received is None


@pytest.mark.parametrize("backend", NAMES)
def test_rows_that_count_nothing(backend: str) -> None:
    """Rows of weight 0, padded rows and rows that see nothing, with NaN in all that nothing may read."""
    given = tensors("attention_statistics", B=1, T=70, S=66, dtype=torch.float32)
    mask = hk.Mask(query_lengths=[65], key_lengths=[60])
    weights = torch.rand(1, 4, 70)
    weights[..., 3] = 0.0
    spoiled = {name: tensor.clone() for name, tensor in given.items()}
    clean = measure(backend, **given, attn_mask=mask, received=weights).received
    assert not clean[..., 60:].any()
    spoiled["query"][:, :, 65:] = torch.nan
    spoiled["query"][:, :, 3] = torch.nan
    spoiled["key"][:, :, 60:] = torch.nan
    weights[..., 65:] = torch.nan
    got = measure(backend, **spoiled, attn_mask=mask, received=weights)
    assert_same_bits(backend, got.received, clean)
    hidden = torch.zeros(70, 66, dtype=torch.bool)
    nothing = measure(backend, **given, attn_mask=hidden, received=True)
    assert not nothing.received.any()
    assert (nothing.max_score == -torch.inf).all()


@pytest.mark.parametrize("backend", NAMES)
def test_a_row_that_is_nan_reaches_the_keys_that_it_sees(backend: str) -> None:
    given = tensors("attention_statistics", B=1, H=2, Hk=2, T=70, S=70, dtype=torch.float32)
    given["query"][:, 1, 40] = torch.nan
    got = measure(backend, **given, is_causal=True, received=True)
    expected = torch.zeros(1, 2, 70, dtype=torch.bool)
    expected[:, 1, :41] = True
    assert torch.equal(got.received.isnan(), expected)
    assert got.max_score[:, 1, 40].isnan().all()
    assert got.max_score.isnan().sum() == 1


@pytest.mark.parametrize("sizes", [(0, 4, 5, 7), (2, 0, 5, 7), (2, 4, 0, 7), (2, 4, 5, 0)])
@pytest.mark.parametrize("backend", NAMES)
def test_empty_calls(sizes: tuple[int, ...], backend: str) -> None:
    B, H, T, S = sizes
    query, key = torch.randn(B, H, T, 8), torch.randn(B, H, S, 8)
    got = measure(backend, query=query, key=key, received=True)
    assert got.received.shape == (B, H, S)
    assert not got.received.any()
    if S == 0:
        assert (torch.stack(got[:2]) == -torch.inf).all()
        assert (got.argmax == -1).all()
        assert not got.max_prob.any()
        assert not got.entropy.any()


@pytest.mark.parametrize("backend", ["cpu"])
@pytest.mark.parametrize("operator", ["attention_statistics", "collaborative_attention"])
def test_received_is_the_same_with_any_number_of_threads(operator: str, backend: str) -> None:
    given = tensors(operator, B=1, T=300, S=333, D=24, dtype=torch.float32)
    given.pop("value", None)
    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append(measure(backend, **given, received=True).received)
    assert_same_bits(backend, found[1:], [found[0], found[0]])
