"""Sizes that int32 can't hold, refusals of a backend, and odd calls that are served."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import heads_kernels as hk
from heads_kernels import checks
from heads_kernels.call import Call
from heads_kernels.mask import UNBOUNDED, Intervals
from heads_kernels.mask.terms import QueryLengths
from heads_kernels.ops.attention import attention_op
from heads_kernels.ops.statistics import statistics_op
from tests.ops.calls import EVERY, OPERATORS, H, S, T, good, parsed, tensors


# ---------------------------------------------------------------------- sizes that int32 can't hold
def long(operator: str, B: int = 1, H: int = 2, T: int = 1, S: int = 1) -> dict[str, Any]:
    """Arguments of these sizes, by stride 0."""
    one = tensors(operator, B=1, H=1, Hk=1, T=1, S=1, D=8, dtype=torch.float32)
    sizes = {"query": (H, T, 8), "key": (H, S, 8), "value": (H, S, 6), "content_bias": (H, S)}
    if "mixing" in one:
        sizes |= {"query": (T, 8), "key": (S, 8)}
    shapes = {name: (B, *size) for name, size in sizes.items()} | {"mixing": (H, 8)}
    return {name: tensor.expand(shapes[name]) for name, tensor in one.items()}


@pytest.mark.parametrize("operator", [*OPERATORS, "attention_statistics"])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"S": 2**31 - 1}, "key has S = 2147483647; split the call: S is at most 1073740800."),
        ({"S": 2**32 + 5}, "key has S = 4294967301; split the call: S is at most 1073740800."),
        ({"T": 2**30 + 256}, "query has T = 1073742080; split the call: T is at most 1073740800."),
        ({"T": checks.MAX_LENGTH + 1}, "query has T = 1073740801; "),
        ({"B": 2**31}, "query has B = 2147483648; split the call: B is at most 2147483647."),
        ({"H": 2**31}, "query has H = 2147483648; split the call: H is at most 2147483647."),
    ],
)
def test_sizes_that_int32_can_not_hold(
    operator: str, sizes: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a mask is computed, which would take 17 GB for 2**30 rows."""
    compute = QueryLengths.intervals

    def intervals(self: QueryLengths, B: int, H: int, T: int, *rest: Any) -> Intervals:
        assert T <= checks.MAX_LENGTH
        return compute(self, B, H, T, *rest)

    monkeypatch.setattr(QueryLengths, "intervals", intervals)
    mask = hk.Mask(causal="lower_right", key_lengths=[1], query_lengths=[1])
    arguments = {**long(operator, **sizes), "attn_mask": mask}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        getattr(hk, operator)(**arguments)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        hk.explain(operator, **arguments)


def test_the_longest_call_that_is_served() -> None:
    """Its band limits and its last rows stay within int32; nothing is computed here."""
    most = checks.MAX_LENGTH
    windows = hk.Mask(causal="lower_right", window=(UNBOUNDED - 1, UNBOUNDED - 1))
    for rows, keys in ((most, 1), (1, most)):
        arguments = long("gated_attention", T=rows, S=keys)
        problem = parsed("gated_attention", **arguments, attn_mask=windows)
        lo, hi = problem.intervals.band_lo, problem.intervals.band_hi
        assert -UNBOUNDED <= lo <= hi <= UNBOUNDED
        assert most + 1024 + UNBOUNDED <= 2**31
        assert problem.intervals.band_hi == keys - rows + 1


@pytest.mark.parametrize("operator", [*OPERATORS, "attention_statistics"])
def test_the_op_itself_refuses_them(operator: str) -> None:
    """Where sizes are symbolic the call cannot judge them."""
    arguments = long(operator, S=2**31)
    call = Call(**arguments, band_lo=-9, band_hi=9)
    for backend in ("cpu", "eager"):
        op, save = (attention_op, [False])
        if operator == "attention_statistics":
            op, save = (statistics_op, [])
        with pytest.raises(ValueError, match=r"^key (has S = 2147483648|is too long)"):
            op(*call, *save, backend)


def test_explain_refuses_as_the_call_does() -> None:
    arguments = good("gated_attention")
    with pytest.raises(TypeError, match="unexpected keyword argument 'gates'"):
        hk.explain("gated_attention", **arguments, gates=1)
    with pytest.raises(ValueError, match="operator is a Tensor; use one of 'gated_attention', "):
        hk.explain(*arguments.values())


# ---------------------------------------------------------------------- refusals of a backend
@pytest.mark.parametrize(("operator", "backend"), EVERY)
def test_an_explicit_backend_never_falls_back(operator: str, backend: str) -> None:
    """Dense masks, strided rows: served, or refused with the reasons that `explain` gives."""
    strided = {
        name: torch.stack([t, t], -1)[..., 0] if name in ("query", "key", "value") else t
        for name, t in good(operator).items()
    }
    for arguments in ({**good(operator), "attn_mask": torch.rand(H, T, S) > 0.5}, strided):
        run = getattr(hk, operator)
        choice = hk.explain(run, **arguments, backend=backend)
        if choice.backend == backend:
            run(**arguments, backend=backend)
            continue
        (reasons,) = choice.refusals.values()
        assert reasons
        with pytest.raises(ValueError, match=f"^{operator}: ") as raised:
            run(**arguments, backend=backend)
        assert all(reason in str(raised.value) for reason in reasons)
        run(**arguments)  # somebody serves it
