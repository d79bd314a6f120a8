"""What a score is made of: biases, tables of offsets, caps and sinks, by identities and against PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import heads_kernels as hk
from heads_kernels.batch import bias_batches, flatten_bias
from heads_kernels.ops import eager
from heads_kernels.testing import CASES, ENTMAX, Case
from tests.ops.calls import DIFFERENTIABLE, run, tensors
from tests.support.alike import assert_alike
from tests.support.refusals import assert_refused

B, H, T, S = 2, 4, 37, 70


def test_a_bias_of_offsets_is_dense() -> None:
    """A table and the slopes of ALiBi, also for rows that start later."""
    table, slopes = torch.randn(H, 33), torch.tensor([0.5, 0.25])
    apart = torch.arange(S) - torch.arange(T)[:, None]
    for bias, expected in (
        (hk.OffsetBias(table), table[:, (apart + 16).clamp(0, 32)]),
        (hk.OffsetBias(table, first=-20), table[:, (apart + 20).clamp(0, 32)]),
        (hk.OffsetBias(table).starting_at(S - T), table[:, (apart - (S - T) + 16).clamp(0, 32)]),
        (hk.OffsetBias.alibi(slopes), -slopes[:, None, None] * apart.abs()),
        (hk.OffsetBias.alibi(slopes).starting_at(S - T), -slopes[:, None, None] * (apart - (S - T)).abs()),
    ):
        assert_alike(bias.to_dense(T, S), expected)


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
    got = run(operator, backend, **given, bias=bias.masked_fill(~visible, -torch.inf))
    assert_alike(got, run(operator, backend, **given, bias=bias, attn_mask=visible))


@pytest.mark.parametrize(
    "lead", [(2, 1), (1, 3), *(pytest.param(each, marks=pytest.mark.check) for each in ((1, 1), (2, 3)))]
)
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_any_batch_dimensions_share_a_bias(operator: str, backend: str, lead: tuple[int, int]) -> None:
    """A bias that rows of an alignment share, `[batch, 1, H, T, S]`, is not expanded."""
    batch = (2, 3)
    given = tensors(operator, B=6, H=2, Hk=2, T=9, S=11, dtype=torch.float32)
    several = {name: value if name == "mixing" else value.unflatten(0, batch) for name, value in given.items()}
    bias = torch.randn(*lead, 2, 9, 11)
    flat = flatten_bias(bias, batch, (2, 9, 11))
    assert flat.data_ptr() == bias.data_ptr()
    assert flat.numel() == bias.numel()
    outer, inner = bias_batches(flat, 6)
    assert outer * inner == 6
    whole = bias.expand(*batch, 2, 9, 11).reshape(6, 2, 9, 11)
    got = run(operator, backend, **several, bias=bias)
    want = run(operator, backend, **given, bias=whole)
    assert_alike(got["out"].flatten(0, 1), want["out"])
    assert_alike(got["bias"], want["bias"].unflatten(0, batch).sum_to_size(bias.shape))


def test_bad_tables() -> None:
    two = torch.zeros(32, 2)
    assert_refused(
        ((torch.zeros(3),), r"table has shape \[3\]; pass \[H, n\]"),
        ((torch.zeros(2, 0),), r"table has shape \[2, 0\]; pass \[H, n\]"),
        ((two.long(),), TypeError, "table has dtype torch.int64"),
        ((two, 1.0), TypeError, "first is a float"),
        of=hk.OffsetBias,
    )
    assert_refused(((two,), r"slopes has shape \[32, 2\]; pass one slope per head"), of=hk.OffsetBias.alibi)
    assert_refused(
        ({"weight": two[:3]}, r"weight has shape \[3, 2\]; pass \[buckets, H\], at least 4"),
        ({"weight": two, "max_distance": 8}, "max_distance is 8; pass more than 8"),
        ({"weight": two, "max_distance": 2**62}, f"max_distance is {2**62}; pass at most"),
        of=hk.OffsetBias.t5,
    )


@pytest.mark.parametrize(
    "case", [case for case in (*CASES, *ENTMAX) if "nasty" in case.tags and case.B * case.T * case.S < 10_000]
)
def test_calls_of_some_rows_and_heads(case: Case) -> None:
    whole = case.make(torch.float64).parsed()
    heads, rows = [case.H - 1, case.H // 2, 0], (case.T // 3, case.T)
    some = whole.of_rows(*rows).of_heads(heads)
    expected = eager.row_probabilities(whole)[:, heads, rows[0] :]
    assert_alike(eager.row_probabilities(some), expected)
