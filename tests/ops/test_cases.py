"""Every named case on every backend and dtype, held to the one accuracy rule.

Operators and backends come from the tables, cases from `heads_kernels.testing`: a new row of any of
them is tested here without an edit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from heads_kernels.ops.philox import draw_seed
from heads_kernels.testing import CASES, ENTMAX, Case, GatedCase, check
from tests.ops.calls import NAMES, inputs_of
from tests.support.alike import assert_alike
from tests.support.plain import plain

#: Part of its bound that eager's own error may be. It is bounded by twice itself and the floor, so
#: that 0.4 says: at most twice the floor.
EAGER_PART = 0.4

QUICK = [case for case in (*CASES, *ENTMAX) if "model" not in case.tags]
#: Of 32 heads 8, in groups of as many: heads are computed alike.
SLOW = [
    replace(case, H=8, Hk=2)
    if isinstance(case, GatedCase) and (case.H, case.Hk) == (32, 8)
    else case
    for case in CASES
    if "model" in case.tags and "long" not in case.tags
]


def ids(values: tuple[Any, ...]) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in values)


def rows(
    cases: list[Case], dtypes: tuple[torch.dtype, ...], but: tuple[str, ...] = ()
) -> list[Any]:
    """Case x dtype x backend, backends innermost: they share the oracle of `check`."""
    return [
        pytest.param(case, dtype, name, id=ids((case.operator, case, dtype, name)))
        for case in cases
        for dtype in dtypes
        if dtype in case.dtypes
        for name in NAMES
        if name not in but
    ]


def hold(case: Case, dtype: torch.dtype, backend: str) -> None:
    inputs_of(case, backend, dtype)
    device = torch.get_default_device()
    with torch.device(
        "cpu"
    ):  # the default of most programs: the package asks for the device of its operands
        report = check(case, dtype, backend, device=device)
    assert report.ok, str(report)
    if backend == "eager":
        assert report.ratio <= EAGER_PART, str(report)


ALL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("case", "dtype", "backend"), rows(QUICK, ALL))
def test_case(case: Case, dtype: torch.dtype, backend: str) -> None:
    hold(case, dtype, backend)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype", "backend"), rows(SLOW, (torch.float32,), ("eager",)))
def test_model_case(case: Case, dtype: torch.dtype, backend: str) -> None:
    """Not of eager, which has no tiles: its errors at these sizes are part of the bound."""
    hold(case, dtype, backend)


@pytest.mark.parametrize("case", QUICK, ids=lambda case: f"{case.operator}-{case}")
def test_oracle_against_autograd(case: Case) -> None:
    """The eager backend in float64 is what plain PyTorch and its own autograd give, from gradients of out and lse."""
    inputs = case.make(torch.float64, requires_grad=True)
    seed = None
    if case.dropout_p:
        torch.manual_seed(inputs.seed)
        seed = draw_seed(inputs.dout.device)
    expected = plain(inputs.parsed(), seed)
    results, starts = [expected.out], [inputs.dout]
    if case.operator != "entmax_attention":  # whose threshold is not returned
        inputs = replace(inputs, dlse=torch.randn_like(expected.lse))
        results.append(expected.lse)
        starts.append(inputs.dlse)
    out, grads = inputs.backward("eager")
    assert_alike(out, expected.out.detach())
    leaves = list(inputs.tensors.values())
    wanted = torch.autograd.grad(results, leaves, starts, materialize_grads=True)
    assert_alike(grads, dict(zip(inputs.tensors, wanted, strict=True)))
