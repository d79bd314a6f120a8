"""What every instruction-set level of the CPU kernels keeps, above all those that multiply pairs of bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from calls import tensors
from torch import Tensor

import heads_kernels as hk
from heads_kernels.testing import Inputs, compare, reference

_cpu = pytest.importorskip("heads_kernels._cpu")

OPERATORS = ("gated_attention", "collaborative_attention")


@pytest.fixture(params=_cpu.available_levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _cpu.level()
    _cpu.use_level(request.param)
    yield request.param
    _cpu.use_level(before)


def inputs_of(operator: str, arguments: dict[str, Tensor], **options: Any) -> Inputs:
    T, Dv = arguments["query"].shape[-2], arguments["value"].shape[-1]
    B, H = arguments["query"].shape[0], arguments.get("mixing", arguments["query"][0]).shape[0]
    dout = torch.randn(B, H, T, Dv).to(arguments["query"].dtype)
    return Inputs(operator, arguments, options, dout)


@pytest.mark.parametrize("operator", OPERATORS)
def test_rows_that_overlap(level: str, operator: str) -> None:
    """Keys 64 and on of head 0 are keys 0 and on of head 1; a NaN there reaches the head that may see it."""
    sizes = {"B": 8, "H": 2, "Hk": 2, "T": 130, "S": 130, "D": 8, "Dv": 8}  # B: tiles share windows
    arguments = tensors(operator, **sizes, dtype=torch.bfloat16)
    numbers = torch.randn(64 * 3 + 130 * 3 + 8).bfloat16()
    values = (8, 2, 130, 8), (0, 64 * 3, 3, 1)
    seen = torch.ones(1, 130, dtype=torch.bool)
    seen[:, 64 + 60 : 64 + 63] = False  # of head 0: number 379 is in keys 60 to 62 of head 1
    arguments["value"] = numbers.as_strided(*values)
    clean = inputs_of(operator, arguments, attn_mask=hk.Mask(causal=True, key_mask=seen))
    expected = reference(clean, backward=False)
    numbers = numbers.clone()
    numbers[379] = torch.nan
    poisoned = numbers.as_strided(*values)
    for wanted in (expected.oracle, expected.eager):
        wanted["out"][:, 1] += (0 * poisoned[:, 1]).cumsum(1)
    report = compare(
        replace(expected, inputs=replace(clean, tensors=arguments | {"value": poisoned})), "cpu"
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("operator", OPERATORS)
def test_rows_that_are_one_row(level: str, operator: str) -> None:
    """A value of stride 0 with a NaN: it is in its own column of every output, and in no other."""
    arguments = tensors(operator, B=1, T=200, S=200, D=8, Dv=8, dtype=torch.bfloat16)
    row = torch.randn_like(arguments["value"][..., :1, :])
    arguments["value"] = row.expand_as(arguments["value"])
    clean = inputs_of(operator, arguments, is_causal=True)
    expected = reference(clean, backward=False)
    row = row.clone()
    row[..., 2] = torch.nan
    for wanted in (expected.oracle, expected.eager):
        wanted["out"][..., 2] = torch.nan
    poisoned = arguments | {"value": row.expand_as(arguments["value"])}
    report = compare(replace(expected, inputs=replace(clean, tensors=poisoned)), "cpu")
    assert report.ok, str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_row_with_one_key_has_no_score_gradient(
    level: str, operator: str, dtype: torch.dtype
) -> None:
    """Its probability is 1 whatever its score: dP and delta are one number, up to two sums in float32."""
    B, H, Dv = 2, 4, 48
    arguments = tensors(operator, B=B, H=H, Hk=H, T=70, S=1, D=32, Dv=Dv, dtype=dtype)
    arguments["gate"] = torch.rand(B, H, 70) + 0.5
    inputs = inputs_of(operator, arguments)
    _, grads = inputs.backward("cpu")
    dattended = arguments["gate"][..., None] * inputs.dout.float()
    size = (dattended * arguments["value"].float()).abs().sum(-1)  # [B, H, T]
    off = 2 * (Dv + 1) * torch.finfo(torch.float32).eps * size * inputs.problem().scale
    if operator == "collaborative_attention":
        assert (grads["content_bias"].abs() <= off.sum(-1, keepdim=True)).all()
        mixed = arguments["mixing"][None] * arguments["key"].float()  # [B, H, Ds]
        bound = torch.einsum("bht,bhd->btd", off, mixed.abs())
    else:
        bound = off[..., None] * arguments["key"].float().abs()
    assert (grads["query"].abs() <= 2 * bound).all()  # 2: rounding to dtype and of its sums
