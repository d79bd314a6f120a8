"""What a score is made of: biases, tables of offsets, caps and sinks, by identities and against PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.batch import bias_batches, flatten_bias
from heads_kernels.ops import eager, scores
from heads_kernels.testing import CASES, ENTMAX, Case
from tests.ops.calls import DIFFERENTIABLE, call, tensors
from tests.support.alike import assert_alike

B, H, T, S = 2, 4, 37, 70


def arguments(operator: str, **sizes: Any) -> dict[str, Tensor]:
    return tensors(operator, B=B, H=H, T=T, S=S, dtype=torch.float32, **sizes)


def both(operator: str, backend: str, **given: Any) -> dict[str, Tensor]:
    """The output and the gradients of all tensors among the arguments."""
    leaves = {
        name: value.requires_grad_()
        for name, value in given.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.is_leaf
    }
    out = call(operator, backend, **given)
    grads = torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out).cumsum(-1))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_a_table_of_offsets_is_its_dense_bias(operator: str, backend: str) -> None:
    given = arguments(operator)
    table = torch.randn(H, 33, requires_grad=True)
    offsets = hk.OffsetBias(table, first=-20)
    out = call(operator, backend, **given, bias=offsets)
    assert_alike(out, call(operator, backend, **given, bias=offsets.to_dense(T, S)))
    i, j = torch.arange(T)[:, None], torch.arange(S)
    dense = table[:, (j - i + 20).clamp(0, 32)]
    assert_alike(offsets.to_dense(T, S), dense)
    dout = torch.randn_like(out)
    want = torch.autograd.grad(call(operator, backend, **given, bias=dense), table, dout)
    assert_alike(torch.autograd.grad(out, table, dout), want)


def test_alibi() -> None:
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    i, j = torch.arange(T)[:, None], torch.arange(S)
    want = -slopes[:, None, None] * (j - i).abs()
    assert_alike(hk.OffsetBias.alibi(slopes).to_dense(T, S), want)
    later = hk.OffsetBias.alibi(slopes).starting_at(S - T).to_dense(T, S)
    assert_alike(later, -slopes[:, None, None] * (j - i - (S - T)).abs())


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("max_distance", [20, 64, 128])
def test_t5(bidirectional: bool, max_distance: int) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    weight = torch.randn(32, H, requires_grad=True)
    i, j = torch.arange(200)[:, None], torch.arange(300)
    buckets = t5.T5Attention._relative_position_bucket(j - i, bidirectional, 32, max_distance)
    bias = hk.OffsetBias.t5(weight, bidirectional, max_distance)
    assert torch.equal(bias.to_dense(200, 300), weight[buckets].permute(2, 0, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [hk.OffsetBias, hk.OffsetBias.alibi, hk.OffsetBias.t5])
def test_a_narrow_table_is_computed_in_float32(make: Any, dtype: torch.dtype) -> None:
    """Distances are exact, and gradients are rounded once, after the sum over the offsets that share an entry."""
    shape = {"alibi": (H,), "t5": (32, H)}.get(make.__name__, (H, 32))
    narrow = torch.rand(shape).to(dtype).requires_grad_()
    wide = narrow.detach().float().requires_grad_()
    found, want = make(narrow).to_dense(30, 500), make(wide).to_dense(30, 500)
    assert torch.equal(found, want)
    dbias = torch.rand_like(want)
    found, want = (torch.autograd.grad(*pair, dbias)[0] for pair in ((found, narrow), (want, wide)))
    assert_alike(found, want.to(dtype))


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_tiles_that_a_bias_hides_whole(operator: str, backend: str, shared: bool) -> None:
    """Two documents and rows that see nothing: what is left is as if the bias were finite under a mask."""
    length = 130
    given = tensors(operator, B=B, H=H, T=length, S=length, dtype=torch.float32)
    documents = torch.arange(length) // 65
    visible = documents[:, None] == documents
    visible[70:75] = False
    bias = torch.randn(1 if shared else B, 1, length, length)
    got = both(operator, backend, **given, bias=bias.masked_fill(~visible, -torch.inf))
    want = both(operator, backend, **given, bias=bias.clone(), attn_mask=visible)
    for name, tensor in want.items():
        assert_alike(got[name], tensor, name=name)


@pytest.mark.parametrize("lead", [(1, 1), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_any_batch_dimensions_share_a_bias(
    operator: str, backend: str, lead: tuple[int, int]
) -> None:
    """A bias that rows of an alignment share, `[batch, 1, H, T, S]`, is not expanded."""
    batch = (2, 3)
    given = tensors(operator, B=6, H=2, Hk=2, T=9, S=11, dtype=torch.float32)
    several = {
        name: value if name == "mixing" else value.unflatten(0, batch)
        for name, value in given.items()
    }
    bias = torch.randn(*lead, 2, 9, 11)
    flat = flatten_bias(bias, batch, (2, 9, 11))
    assert flat.data_ptr() == bias.data_ptr()
    assert flat.numel() == bias.numel()
    outer, inner = bias_batches(flat, 6)
    assert outer * inner == 6
    whole = bias.expand(*batch, 2, 9, 11).reshape(6, 2, 9, 11)
    got = both(operator, backend, **several, bias=bias.clone())
    want = both(operator, backend, **given, bias=whole.clone())
    assert_alike(got["out"].flatten(0, 1), want["out"])
    assert_alike(got["bias"], want["bias"].unflatten(0, batch).sum_to_size(bias.shape))


def test_bad_tables() -> None:
    for table, message in (
        (torch.zeros(3), "table has shape"),
        (torch.zeros(2, 0), "table has shape"),
        (torch.zeros(2, 3).long(), "table has dtype"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            hk.OffsetBias(table)
    with pytest.raises(TypeError, match="first is a float"):
        hk.OffsetBias(torch.zeros(2, 3), first=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="slopes has shape"):
        hk.OffsetBias.alibi(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="max_distance is 8; pass more than 8"):
        hk.OffsetBias.t5(torch.zeros(32, 2), max_distance=8)
    with pytest.raises(ValueError, match=f"max_distance is {2**62}; pass at most {2**24}"):
        hk.OffsetBias.t5(torch.zeros(32, 2), max_distance=2**62)


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in (*CASES, *ENTMAX)
        if "nasty" in case.tags and case.B * case.T * case.S < 10_000
    ],
    ids=lambda case: f"{case.operator}-{case}",
)
def test_calls_of_some_rows_and_heads(case: Case) -> None:
    whole = case.make(torch.float64).parsed()
    heads, rows = [case.H - 1, 0], (case.T // 3, case.T)
    some = scores.of_heads(scores.of_rows(whole, *rows), heads)
    expected = eager.row_probabilities(whole)[:, heads, rows[0] :]
    assert_alike(eager.row_probabilities(some), expected)
