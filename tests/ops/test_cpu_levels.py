"""What every instruction-set level of the CPU kernels keeps, above all those that multiply pairs of bfloat16."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import heads_kernels as hk
from heads_kernels.testing import compare, reference
from tests.ops.calls import OPERATORS, assert_ok, at_level, case_of, threads

_cpu = pytest.importorskip("heads_kernels._cpu", reason="needs the CPU kernels")


@pytest.fixture(params=_cpu.available_levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    with at_level(request.param):
        yield request.param


@pytest.mark.parametrize("views", ["overlap", "one row"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_rows_in_the_same_memory(level: str, operator: str, views: str) -> None:
    """A NaN that belongs to several rows of value, causal: it reaches those that see one of them.

    Keys 64 and on of head 0 are keys 0 and on of head 1; or the stride between rows is 0, and the NaN is in its own
    column of every output.
    """
    inputs = case_of(operator, 8, 2, 130, 130, D=8, Dv=8).make(torch.bfloat16)  # B: tiles share windows
    numbers, at = torch.randn(64 * 3 + 130 * 3 + 8).bfloat16(), 379
    shape, strides = (8, 2, 130, 8), (0, 64 * 3, 3, 1)
    seen = torch.ones(1, 130, dtype=torch.bool)
    if views == "overlap":
        seen[:, 64 + 60 : 64 + 63] = False  # of head 0: number 379 is in keys 60 to 62 of head 1
    else:
        strides, at = (0, 8, 0, 1), 2
    value = numbers.as_strided(shape, strides)
    inputs.tensors["value"] = value
    clean = replace(inputs, options={"attn_mask": hk.Mask(causal=True, key_mask=seen)})
    expected = reference(clean, backward=False)
    assert expected.floors["out"].rows.isfinite().all()  # of numbers without NaN
    numbers[at] = torch.nan
    head = 1 if views == "overlap" else 0
    for wanted in (expected.oracle, expected.eager):
        wanted["out"][:, head] += (0 * value[:, head]).cumsum(1)
    assert_ok(compare(replace(expected, inputs=clean), "cpu"))


@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chunks_without_mixing_are_not_read(level: str, dtype: torch.dtype, T: int) -> None:
    """A NaN of the query there reaches only the heads that mix it; a few rows are decoded."""
    query, key, value = torch.randn(1, T, 48), torch.randn(1, 90, 48), torch.randn(1, 2, 90, 16)
    mixing = torch.ones(2, 48)
    mixing[0, 16:32] = mixing[1, 32:] = 0
    query[..., 16:32] = torch.nan
    operands = (each.to(dtype) for each in (query, key, value, mixing))
    out = hk.collaborative_attention(*operands, backend="cpu")
    assert out[:, 0].isfinite().all()
    assert out[:, 1].isnan().all()


@pytest.mark.parametrize("Ds", [32, 64, 96])
def test_a_chunk_that_ends_within_a_load(level: str, Ds: int) -> None:
    """Mixing in float32 fills the low halves of the mixed query, of which bfloat16 has none."""
    query, key, value = torch.randn(32, 4, Ds), torch.randn(32, 40, Ds), torch.randn(32, 8, 40, 16)
    mixing = torch.randn(8, Ds)
    mixing[:, :16] = 0
    operands = (each.bfloat16() for each in (query, key, value))
    assert hk.collaborative_attention(*operands, mixing, backend="cpu").isfinite().all()


@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
@pytest.mark.parametrize("operator", ["gated_attention", "collaborative_attention"])
def test_bits_of_a_decoded_row(level: str, operator: str, layout: str) -> None:
    """The same whatever the threads, and whichever heads that share its keys and values are closed."""
    arguments = {"query": torch.randn(1, 16, 1, 128), "key": torch.randn(1, 8, 512, 128)}
    if operator == "collaborative_attention":
        arguments = {"query": torch.randn(1, 1, 64), "key": torch.randn(1, 512, 64), "mixing": torch.randn(16, 64)}
    arguments["value"] = torch.randn(1, 8, 512, 128)
    if layout == "tokens first":
        arguments["value"] = arguments["value"].transpose(1, 2).contiguous().transpose(1, 2)
    one_closed = torch.ones(16)
    one_closed[1] = 0
    if operator == "gated_attention":
        arguments["enable_gqa"] = True
    results = []
    for count in (1, 2, 3, 4, 8):
        with threads(count):
            results += [
                getattr(hk, operator)(**arguments, gate=gate, backend="cpu") for gate in (torch.ones(16), one_closed)
            ]
    others = [0, *range(2, 16)]
    assert all(torch.equal(out[:, others], results[0][:, others]) for out in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_row_with_one_key_has_no_score_gradient(level: str, operator: str, dtype: torch.dtype) -> None:
    """Its probability is 1 whatever its score: dP and delta are one number, up to two sums in float32."""
    Dv = 48
    inputs = case_of(operator, 2, 4, 70, 1, D=32, Dv=Dv, gate="BHT").make(dtype)
    arguments, (_, grads) = inputs.tensors, inputs.backward("cpu")
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


@pytest.mark.parametrize("Hv", [6, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bits_of_a_shared_query_and_key(level: str, dtype: torch.dtype, Hv: int) -> None:
    """Gradients summed over heads: the same whatever the threads, and whatever else is in the batch."""
    inputs = case_of("collaborative_attention", 3, 6, 130, 140, D=24, Dv=8, Hv=Hv, is_causal=True).make(dtype)
    of_first = {name: t if name == "mixing" else t[:1] for name, t in inputs.tensors.items()}
    alone = replace(inputs, tensors=of_first, dout=inputs.dout[:1])
    results = []
    for count in (1, 2, 3, 5, 16):
        with threads(count):
            results += [inputs.backward("cpu")[1], alone.backward("cpu")[1]]
    for grads in results:
        for name in ("query", "key", "value", "content_bias"):
            assert torch.equal(grads[name][:1], results[0][name][:1]), name
    for grads in results[::2]:
        assert torch.equal(grads["mixing"], results[0]["mixing"])
