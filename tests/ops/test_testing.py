"""The instruments themselves: cases, the accuracy rule, timers, memory, poison."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import peak
from heads_kernels.call import active_widths
from heads_kernels.ops import entmax, formula
from heads_kernels.ops import gate as gates
from heads_kernels.testing import COLLABORATIVE, accuracy, check, compare, find, reference, time_in_turn
from heads_kernels.testing.accuracy import _LEAST, _chance
from heads_kernels.testing.case import Case, CollaborativeCase, EntmaxCase, GatedCase, surrounded
from heads_kernels.testing.rounding import SAMPLES
from tests.support.poison import dirty_allocator

SMALL = find("gated_attention", "closed_batch_heads")


# ---------------------------------------------------------------------- cases
def test_ragged_supports_are_disjoint_and_cover() -> None:
    for case in COLLABORATIVE:
        if case.mixing in ("blocks", "ragged", "unaligned"):
            assert case.mixing_support().sum(0).eq(1).all()
    ragged = find("collaborative_attention", "bert_base_256_ragged").make().parsed()
    assert active_widths(ragged.mixing).sum() == 256


# ---------------------------------------------------------------------- the accuracy rule
FAULTS = {
    "scaled by 1 + 1e-5": lambda t: t * (1 + 1e-5),
    "one element off by a hundredth of the rest": lambda t: t + 0.01 * first(t) * t.abs().mean(),
    "rounded to bfloat16": lambda t: t.bfloat16().to(t.dtype),
    "a NaN": lambda t: t.masked_fill(first(t), torch.nan),
    "an infinity": lambda t: t.masked_fill(first(t), torch.inf),
    "transposed": lambda t: t.mT.contiguous() if t.dim() > 1 else t[None],
    "another dtype": lambda t: t.double(),
    "one row missing": lambda t: t.clone().index_fill_(-1 if t.dim() < 3 else -2, LAST, 0.0),
}
LAST = torch.tensor([1])


def first(t: Tensor) -> Tensor:
    """True at the last element of the tensor that is not 0."""
    place = torch.zeros(t.numel(), dtype=torch.bool)
    place[t.flatten().nonzero().max()] = True
    return place.reshape(t.shape)


@cache
def small_reference() -> accuracy.Reference:
    found = reference(SMALL.make())
    assert compare(found, "eager").ok
    return found


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["out", "lse", "dquery", "dkey", "dvalue", "dgate"])
def test_a_fault_is_found(name: str, fault: str) -> None:
    good = small_reference()
    found = good.judge(name, FAULTS[fault](good.eager[name]))
    assert not found.ok
    assert str(found).startswith(f"FAIL {name}")


LOW = (torch.float32, torch.bfloat16, torch.float16)
_TERMS: Any = {"bias": "1HTS", "gate": "H", "softcap": 3.0}
MANY_TERMS = (
    GatedCase("many_terms", 2, 3, 65, 70, D=16, Dv=24, dropout_p=0.1, **_TERMS),
    CollaborativeCase("many_terms", 2, 3, 65, 70, Ds=32, Dv=24, dropout_p=0.1, **_TERMS),
    EntmaxCase("many_terms", 2, 3, 65, 70, D=16, Dv=24, alpha=(1.2, 1.8), **_TERMS),
)


def scaled(by: float, argument: int | None = None) -> Callable[..., Any]:
    """A function whose first result, or argument, is `by` times as large."""

    def change(function: Callable[..., Any], *args: Any) -> Any:
        if argument is not None:
            return function(*(a * by if n == argument else a for n, a in enumerate(args)))
        result = function(*args)
        if result is None:
            return None
        return (result[0] * by, *result[1:]) if isinstance(result, tuple) else result * by

    return change


def slope(function: Callable[..., Any], *args: Any) -> Any:
    score, slope_of_cap = function(*args)
    return score, slope_of_cap * 1.003


def truncated(function: Callable[..., Any], *args: Any) -> Tensor:
    """Truncated to 8 bits in the place of a rounding."""
    return (function(*args).view(torch.int32) & -(1 << 16)).view(torch.float32)


#: What is wrong in which functions of eager, for every operator.
SYSTEMATIC: dict[str, tuple[ModuleType, dict[str, Callable[..., Any]]]] = {
    "raw scores": (formula, {"raw_scores": scaled(1.003)}),
    "dP": (formula, {"score_gradient": scaled(1.003, 1)}),
    "delta": (formula, {"score_gradient": scaled(1.003, 2)}),
    "dS": (formula, {"score_gradient": scaled(0.997)}),
    "dS truncated": (formula, {"score_gradient": truncated}),
    "gate": (gates, {"factors": scaled(0.997)}),
    "slope of the cap": (formula, {"finish": slope}),
    "gradient of the bias": (formula, {"bias_gradient": scaled(1.003, 0)}),
}
OF_SOFTMAX: dict[str, tuple[ModuleType, dict[str, Callable[..., Any]]]] = {
    "p": (formula, {"softmax": scaled(1.003), "probabilities": scaled(1.003)}),
    "p in the forward pass": (formula, {"softmax": scaled(1.003)}),
    "p in the backward pass": (formula, {"probabilities": scaled(0.997)}),
    "p truncated": (formula, {"probabilities": truncated}),
    "share kept by dropout": (formula, {"kept_share": scaled(1.003)}),
    "dgate": (formula, {"gate_rows": scaled(1.003)}),
}
OF_ENTMAX: dict[str, tuple[ModuleType, dict[str, Callable[..., Any]]]] = {
    "slopes": (entmax, {"slopes": scaled(1.003)}),
    "dalpha": (entmax, {"alpha_derivative": scaled(1.003)}),
}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("case", MANY_TERMS)
def test_systematic_faults_are_found(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 0.3 %, which is less than one rounding to bfloat16."""
    cases = case, find(case.operator, "mean")
    good = [reference(each.make(dtype)) for each in cases]
    assert all(compare(each, "eager").ok for each in good)
    own = OF_ENTMAX if case.operator == "entmax_attention" else OF_SOFTMAX
    for name, (module, changes) in (SYSTEMATIC | own).items():
        with monkeypatch.context() as patch:
            for function, change in changes.items():
                patch.setattr(module, function, partial(change, getattr(module, function)))
            assert not all(compare(each, "eager").ok for each in good), name


@pytest.mark.parametrize("dtype", LOW)
def test_a_small_head_counts(dtype: torch.dtype) -> None:
    case = find("gated_attention", "declining_heads")
    # In float16 dscores of a smaller head are subnormal: 0 is as near as a kernel may be.
    case = replace(case, decline=2.0**-6) if dtype == torch.float16 else case
    good = reference(case.make(dtype))
    for name in ("out", "dquery", "dvalue"):
        found = good.eager[name]
        assert good.judge(name, found).ok
        assert not good.judge(name, found.index_fill(1, LAST, 0.0)).ok


@pytest.mark.parametrize("dtype", LOW)
def test_the_floor_is_near_rounding(dtype: torch.dtype) -> None:
    """A few units in the last place of each quantity, and what probabilities add."""
    got = reference(find("gated_attention", "width_96").make(dtype))
    for name, (rows, _) in got.floors.items():
        own = torch.finfo(torch.float32 if name in ("lse", "dgate") else dtype).eps / 2
        size = own * float(got.oracle[name].square().mean().sqrt())
        assert 0.2 * size < float(rows.square().mean().sqrt()) < 20 * size, name


def test_float64_is_its_own_oracle() -> None:
    report = check(SMALL, torch.float64, "eager")
    assert report.ratio == 0.0
    assert all(q.bound < 1e-12 for q in report.quantities), str(report)


# ---------------------------------------------------------------------- timers and memory
def test_turns_alternate() -> None:
    order: list[str] = []

    def slow(name: str) -> None:
        order.append(name)
        time.sleep(1e-3)

    timings = time_in_turn({"a": lambda: slow("a"), "b": lambda: slow("b")}, budget_s=0.02, warmup=1, least=4)
    assert "".join(order[4:12]) == "abababab"
    assert 1e-3 <= timings["a"].minimum <= timings["a"].median < 0.1
    assert timings["a"].calls == 1
    assert len(timings["a"].samples) >= 4


@pytest.mark.gpu
def test_launches_of_the_host_are_not_timed() -> None:
    rows, seconds = torch.ones(1, device="cuda"), 4e-3  # less than what flushes hide

    def slow() -> Tensor:
        time.sleep(seconds)
        return rows + 1

    assert time_in_turn({"slow": slow}, device="cuda", cold=True, budget_s=0.0)["slow"].median < seconds


@pytest.mark.parametrize("resettable", [True, False])
def test_peak_memory(resettable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not resettable:
        monkeypatch.setattr(peak, "_resettable", lambda: False)

    def use() -> Tensor:
        scratch = torch.ones(32 << 20, dtype=torch.uint8)
        time.sleep(2e-2)  # the sampling thread looks every millisecond
        return scratch[: 4 << 20].clone()

    use()
    for _ in range(2):
        found = peak.peak_memory(use)
        assert found.result == 4 << 20
        # The result may be in pages that the C library had not returned: 4 MiB less.
        assert found.extra == pytest.approx(32 << 20, abs=6 << 20)
        assert found.how == ("sampled" if not resettable else found.how)


# ---------------------------------------------------------------------- poison
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 5, 7), (0, 3, 5), ()])
def test_surrounded(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    inner = surrounded(tensor)
    assert torch.equal(inner, tensor)
    if len(shape) > 1 and tensor.numel():
        assert inner.stride(-1) == 1
        assert inner.storage_offset() % 16
        around = torch.tensor([], dtype=tensor.dtype).set_(inner.untyped_storage())
        assert int(around.isfinite().sum()) == tensor.numel()


def test_dirty_allocator() -> None:
    like = torch.ones(1)
    dirty_allocator(like)
    assert any(torch.empty(n).isnan().any() for n in (64, 256, 1024, 4096, 16384))


def test_chance_is_one_in_a_million() -> None:
    """Of the F distribution; the errors of many numbers may be a fixed factor above the floor."""
    for count in (1, 2):
        square = _chance(count) ** 2
        of_floor = torch.tensor(SAMPLES * count / 2.0, dtype=torch.float64)
        share = 1 / (1 + square / SAMPLES)  # of the floor in the sum of all squares, beta distributed
        drawn = torch.distributions.Beta(of_floor, torch.tensor(count / 2.0).double())
        grid = torch.linspace(1e-9, share, 100_001, dtype=torch.float64)
        exceeded = torch.trapezoid(drawn.log_prob(grid).exp(), grid).item()
        assert 1e-7 < exceeded < 2e-6, count
    assert _chance(1, 1000) > 1.5 * _chance(1)
    assert _chance(1000) == _LEAST
