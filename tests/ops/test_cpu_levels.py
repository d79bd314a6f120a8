"""What every instruction-set level of the CPU kernels keeps, above all those that multiply pairs of bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.ops.attention import attend_with_lse
from heads_kernels.testing import Inputs, compare, reference
from heads_kernels.testing.accuracy import run
from tests.ops.calls import parsed, tensors

_cpu = pytest.importorskip("heads_kernels._cpu")

OPERATORS = ("gated_attention", "collaborative_attention")

#: Levels that multiply pairs of bfloat16.
PAIR_LEVELS = ("avx512bf16", "amx")


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
    bounds = expected.limits("cpu"), expected.arithmetic()  # of numbers without NaN
    assert all(limits["out"].floor.isfinite().all() for limits in bounds)
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
    bounds = expected.limits("cpu"), expected.arithmetic()  # of numbers without NaN
    assert all(limits["out"].floor.isfinite().all() for limits in bounds)
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
    off = 2 * (Dv + 1) * torch.finfo(torch.float32).eps * size * inputs.parsed().scale
    if operator == "collaborative_attention":
        assert (grads["content_bias"].abs() <= off.sum(-1, keepdim=True)).all()
        mixed = arguments["mixing"][None] * arguments["key"].float()  # [B, H, Ds]
        bound = torch.einsum("bht,bhd->btd", off, mixed.abs())
    else:
        bound = off[..., None] * arguments["key"].float().abs()
    assert (grads["query"].abs() <= 2 * bound).all()  # 2: rounding to dtype and of its sums


@pytest.mark.parametrize("std", [1.0, 30.0])
def test_the_mixed_query_is_not_rounded(level: str, std: float) -> None:
    """lse of bfloat16 is as accurate as float32 lets it be, whatever the heads mix.

    A query rounded after mixing is off by up to 2^-8 of every term of a score; two parts of it by 2^-16.
    """
    arguments = tensors("collaborative_attention", T=70, S=90, D=40, dtype=torch.bfloat16)
    arguments["query"] = arguments["query"] * std
    arguments["mixing"] = torch.randn(4, 40)
    inputs = inputs_of("collaborative_attention", arguments)
    exact = reference(inputs, backward=False).oracle["lse"]
    lse = run(inputs, "cpu", backward=False)["lse"]
    terms = torch.einsum(
        "btd,hd,bsd->bhts", *(arguments[name].double().abs() for name in ("query", "mixing", "key"))
    )
    size = inputs.parsed().scale * (
        terms + arguments["content_bias"].double().abs()[:, :, None]
    ).amax(-1)
    assert ((lse - exact).abs() <= 2.0**-15 * size + 2.0**-20 * (1 + exact.abs())).all()


@pytest.mark.parametrize("Hv", [6, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bits_of_a_shared_query_and_key(level: str, dtype: torch.dtype, Hv: int) -> None:
    """Gradients summed over heads: the same whatever the threads, and whatever else is in the batch."""
    arguments = tensors("collaborative_attention", B=3, H=6, Hv=Hv, T=130, S=140, D=24, dtype=dtype)
    inputs = inputs_of("collaborative_attention", arguments, is_causal=True)
    alone = replace(
        inputs,
        tensors={name: t if name == "mixing" else t[:1] for name, t in arguments.items()},
        dout=inputs.dout[:1],
    )
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 5, 16):
            torch.set_num_threads(count)
            results += [inputs.backward("cpu")[1], alone.backward("cpu")[1]]
    finally:
        torch.set_num_threads(threads)
    for grads in results:
        for name in ("query", "key", "value", "content_bias"):
            assert torch.equal(grads[name][:1], results[0][name][:1]), name
    for grads in results[::2]:
        assert torch.equal(grads["mixing"], results[0]["mixing"])


@pytest.mark.parametrize("operator", OPERATORS)
def test_subnormal_numbers(level: str, operator: str) -> None:
    """The limit of products of bfloat16 pairs: numbers and sums below 2^-126 may count as 0 in them."""
    arguments = tensors(operator, T=20, S=70, D=8, Dv=8, dtype=torch.bfloat16)
    arguments["value"] = (arguments["value"] * 2.0**-127).bfloat16()
    inputs = inputs_of(operator, arguments)
    exact = reference(inputs, backward=False)
    error = (run(inputs, "cpu", backward=False)["out"].double() - exact.oracle["out"]).abs()
    # Each of 70 values, and each sum of two products that an output is made of, the rounding of out.
    limit = (70 + 35 + 2) * 2.0**-126 if level in PAIR_LEVELS else 2.0**-133
    assert (error <= limit).all()


def test_lse_is_rounded_once(level: str) -> None:
    """n keys of the score r, a whole number: lse is r + ln n to half a unit in the last place."""
    most = 300
    n = torch.arange(1, most + 1)
    r = n % 41
    query, key = torch.zeros(most, 1, 1, 8), torch.zeros(most, 1, most, 8)
    query[:, 0, 0, 0], key[..., 0] = r, 1.0
    mask = hk.Mask(key_lengths=n)
    problem = parsed("gated_attention", query, key, key, attn_mask=mask, scale=1.0)
    found = attend_with_lse(problem, "cpu")[1].double().flatten()
    wanted = r.double() + n.double().log()
    half = torch.finfo(torch.float32).eps / 2
    assert ((found - wanted).abs() <= half * wanted).all()
