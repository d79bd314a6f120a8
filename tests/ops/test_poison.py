"""Memory that may not be read, and memory that must be written.

NaN stands around every input, in everything that a mask hides, in closed heads, and in the memory
that the allocator hands out for results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.backends import BACKENDS
from heads_kernels.testing import CASES, ENTMAX, Case, find
from heads_kernels.testing.case import surrounded
from tests.ops.calls import NAMES, assert_same_bits, call, inputs_of
from tests.support.alike import assert_alike, rounding
from tests.support.poison import dirty_allocator, hide

QUICK = [case for case in (*CASES, *ENTMAX) if "model" not in case.tags]
MASKED = [case for case in QUICK if case.is_causal or case.mask is not None]
BAD = [torch.nan, pytest.param(torch.inf, marks=pytest.mark.slow)]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def rows(cases: list[Case]) -> list[object]:
    return [
        pytest.param(case, name, id=f"{case.operator}-{case}-{name}")
        for case in cases
        for name in NAMES
    ]


@pytest.mark.check
@pytest.mark.parametrize(("case", "backend"), rows(QUICK))
def test_the_same_bits_from_dirty_memory_on_more_threads(case: Case, backend: str) -> None:
    """Every element of every result is written, and by the same numbers in the same order."""
    inputs = inputs_of(case, backend)
    want = inputs.backward(backend)
    assert want[0].isfinite().all()
    for name, grad in want[1].items():
        assert grad.isfinite().all(), name
    dirty_allocator(want[0])
    with threads(torch.get_num_threads() + 2):
        assert_same_bits(backend, inputs.backward(backend), want)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "backend"), rows(QUICK))
def test_nothing_beside_an_input_is_read(case: Case, backend: str) -> None:
    inputs = inputs_of(case, backend)
    tensors = {name: surrounded(t) for name, t in inputs.tensors.items()}
    guarded = replace(inputs, tensors=tensors, dout=surrounded(inputs.dout))
    out, grads = guarded.backward(backend)
    want, want_grads = inputs.backward(backend)
    assert_alike(out, want)
    for name, grad in want_grads.items():
        assert_alike(grads[name], grad, name=name)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("case", "backend"), rows(MASKED))
def test_hidden_values_reach_nothing(case: Case, backend: str, bad: float) -> None:
    inputs = inputs_of(case, backend)
    poisoned, places = hide(inputs, bad)
    want, got = inputs.backward(backend), poisoned.backward(backend)
    assert_same_bits(backend, got, want)
    for name, place in places.items():
        assert not got[1][name][place].any(), f"d{name} of what is hidden"


@pytest.mark.parametrize("operator", ["gated_attention", "collaborative_attention"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_hidden_values_reach_nothing_in_other_dtypes(operator: str, dtype: torch.dtype) -> None:
    for row in BACKENDS:
        for name in ("padded", "holes", "padded_causal"):
            inputs = find(operator, name).make(dtype)
            if row.unsupported(inputs.parsed()):
                continue
            got, want = (each.backward(row.name) for each in (hide(inputs, torch.nan)[0], inputs))
            assert_same_bits(row.name, got, want)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("backend", NAMES)
def test_a_closed_head_is_not_read(backend: str, bad: float) -> None:
    """NaN in the query, key and value of a closed head; with closed_grad=False in gradients too."""
    inputs = inputs_of(find("gated_attention", "closed_heads"), backend)
    closed = inputs.tensors["gate"] == 0
    tensors = {
        name: t if name == "gate" else t.masked_fill(closed[:, None, None], bad)
        for name, t in inputs.tensors.items()
    }
    poisoned = replace(inputs, tensors=tensors, options={**inputs.options, "closed_grad": False})
    want = replace(inputs, options=poisoned.options).backward(backend)
    assert_same_bits(backend, poisoned.backward(backend), want)
    assert not want[0][:, closed].any()

    # By default the gradient of the closed gate is the true one, which is not finite here.
    out, grads = replace(poisoned, options=inputs.options).backward(backend)
    unpoisoned = inputs.backward(backend)
    del unpoisoned[1]["gate"]
    of_gate = grads.pop("gate")
    assert_same_bits(backend, (out, grads), unpoisoned)
    assert of_gate[~closed].isfinite().all()


@pytest.mark.parametrize("layout", ["BHTD", "BTHD"])
@pytest.mark.parametrize(("T", "Dv"), [(1, 8), (63, 5), (65, 8), (130, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_of_closed_heads_are_written(
    dtype: torch.dtype, T: int, Dv: int, layout: str
) -> None:
    """In every memory order, with neighbours that are closed in one batch element and open in the next."""
    B, H = 3, 5

    def operand(width: int) -> Tensor:
        if layout == "BHTD":
            return torch.randn(B, H, T, width, dtype=dtype)
        return torch.randn(B, T, H, width, dtype=dtype).transpose(1, 2)

    query, key, value = operand(8), operand(8), operand(Dv)
    gate = torch.tensor([[0, 0, 1, 0, 2], [1, 0, 0, 0, 1], [0, 0, 0, 0, 0]], dtype=torch.float32)
    expected = hk.gated_attention(query, key, value) * gate[:, :, None, None].to(dtype)
    for leaf in (gate, gate.clone().requires_grad_()):
        dirty_allocator(query)
        out = call("gated_attention", "cpu", query=query, key=key, value=value, gate=leaf)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("backend", NAMES)
def test_a_causal_row_does_not_see_a_later_nan(backend: str) -> None:
    """The tile on the diagonal holds visible and hidden keys at once."""
    inputs = inputs_of(find("gated_attention", "length_65_causal"), backend)
    clean = inputs.call(backend)
    for j in (0, 1, 31, 32, 33, 63, 64):
        tensors = {**inputs.tensors}
        for name in ("key", "value"):
            tensors[name] = tensors[name].clone()
            tensors[name][:, :, j] = torch.nan
        out = replace(inputs, tensors=tensors).call(backend)
        assert_same_bits(backend, out[:, :, :j], clean[:, :, :j])
        assert out[:, :, j:].isnan().all(), j


@pytest.mark.parametrize("backend", NAMES)
def test_values_as_large_as_a_float_holds(backend: str) -> None:
    """A row that sees one key has its value, the largest number that there is too."""
    largest = torch.finfo(torch.float32).max
    numbers = torch.tensor([largest, -largest, 3.4025e38, -3.4025e38, 3.4e38, 1e38, 1.0, 0.0])
    value = numbers.reshape(1, 1, 1, 8)
    query, key = torch.randn(2, 1, 1, 1, 8)
    out = call("gated_attention", backend, query=query, key=key, value=value)
    torch.testing.assert_close(out, value, rtol=rounding(torch.float32), atol=0.0)


@pytest.mark.parametrize("backend", NAMES)
def test_a_hidden_pair_may_overflow(backend: str) -> None:
    """The product of a query and a key that it does not see is infinite; both are finite."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 40, 16) for _ in range(3))
    query[:, :, :20] *= 1e25
    key[:, :, 20:] *= 1e25
    query[:, :, 20:] *= 1e-25
    key[:, :, :20] *= 1e-25
    leaves = [t.requires_grad_() for t in (query, key, value)]
    out = hk.gated_attention(*leaves, is_causal=True, backend=backend)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want = hk.gated_attention(*wide, is_causal=True, backend="eager")
    assert_alike(out.double(), want, dtype=torch.float32)
    grads = torch.autograd.grad(out.sum(), leaves)
    for grad, exact in zip(grads, torch.autograd.grad(want.sum(), wide), strict=True):
        size = exact.abs().max()
        assert_alike(grad.double() / size, exact / size, dtype=torch.float32)


@pytest.mark.parametrize("T", [41, 64])
@pytest.mark.parametrize("backend", NAMES)
def test_an_infinite_key_meets_no_row_that_is_not_there(backend: str, T: int) -> None:
    """A key that every row sees gives NaN where they do, and nothing through unused lanes."""
    torch.manual_seed(0)
    query = torch.rand(1, 1, T, 16) + 0.1
    key, value = torch.randn(2, 1, 1, T, 16)
    key[0, 0, 3, 5] = -float("inf")
    leaves = [t.requires_grad_() for t in (query, key, value)]
    mask = hk.Mask(query_lengths=[T - 5])
    out = hk.gated_attention(*leaves, attn_mask=mask, backend=backend)
    dkey, dvalue = torch.autograd.grad(out.sum(), leaves[1:])
    assert out.isfinite().all()  # its weight is 0 everywhere
    assert dkey.isfinite().all()
    assert dvalue.isfinite().all()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("backend", NAMES)
def test_the_mixing_vector_of_a_closed_head_is_not_read(backend: str, bad: float) -> None:
    inputs = inputs_of(find("collaborative_attention", "closed_all"), backend)
    poisoned = {**inputs.tensors, "mixing": torch.full_like(inputs.tensors["mixing"], bad)}
    out, grads = replace(inputs, tensors=poisoned).backward(backend)
    assert not out.any()
    for name in ("query", "key", "value", "mixing"):
        assert not grads[name].any(), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend", NAMES)
def test_rows_that_see_nothing_do_not_read_the_mixing_vector(backend: str, bad: float) -> None:
    query, key, mixing = torch.randn(2, 5, 16), torch.randn(2, 6, 16), torch.full((3, 16), bad)
    leaves = [t.requires_grad_() for t in (query, key, mixing)]
    mask = hk.Mask(key_lengths=[0, 0])
    out = hk.collaborative_attention(
        *leaves[:2], torch.randn(2, 3, 6, 8), mixing, attn_mask=mask, backend=backend
    )
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert not grad.any()


def test_a_true_byte_may_be_any_but_zero() -> None:
    query, key, value = torch.randn(3, 1, 2, 130, 8)
    odd = torch.full((1, 130), 255, dtype=torch.uint8).view(torch.bool)
    out = hk.gated_attention(query, key, value, attn_mask=hk.Mask(key_mask=odd), backend="cpu")
    assert_alike(out, hk.gated_attention(query, key, value, backend="cpu"))
