"""What a score is made of: biases, tables of offsets, caps and sinks, by identities and against PyTorch's own; those of
any finite size, by a call with small ones that has the same result."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.batch import bias_batches, flatten_bias
from heads_kernels.ops import eager
from heads_kernels.testing import CASES, ENTMAX, Case
from tests.ops.calls import ATTENTION, DIFFERENTIABLE, EVERY, NAMES, call, run, tensors
from tests.support.alike import assert_alike
from tests.support.refusals import assert_refused

B, H, T, S = 2, 4, 37, 70  # two tiles of keys; one row of them may be split


def test_a_bias_of_offsets_is_dense() -> None:
    """A table and the slopes of ALiBi, also for rows that start later, and loaded from a file."""
    table, slopes = torch.randn(H, 33), torch.tensor([0.5, 0.25])
    apart = torch.arange(S) - torch.arange(T)[:, None]
    for bias, expected in (
        (hk.OffsetBias(table), table[:, (apart + 16).clamp(0, 32)]),
        (hk.OffsetBias(table, first=-20), table[:, (apart + 20).clamp(0, 32)]),
        (hk.OffsetBias(table).starting_at(S - T), table[:, (apart - (S - T) + 16).clamp(0, 32)]),
        (hk.OffsetBias.alibi(slopes), -slopes[:, None, None] * apart.abs()),
        (hk.OffsetBias.alibi(slopes).starting_at(S - T), -slopes[:, None, None] * (apart - (S - T)).abs()),
    ):
        stored = io.BytesIO()
        torch.save(bias, stored)
        stored.seek(0)
        for each in (bias, torch.load(stored, weights_only=True)):
            assert_alike(each.to_dense(T, S), expected)


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


# ---------------------------------------------------------------------- any finite size
LEAST, MOST, INF = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max, torch.inf


def patterns() -> tuple[Tensor, Tensor, Tensor]:
    """Biases of rows `[rows, S]`, small ones with the same probabilities, and which rows need scores of 0 for that."""
    zero = torch.zeros(S)
    some = torch.arange(S) % 3 == 0
    rows = [
        (zero.masked_fill(some, LEAST), zero.masked_fill(some, -INF), 1),
        (zero.masked_fill(some, -3e38), zero.masked_fill(some, -INF), 1),
        (zero.masked_fill(some, 3e38), zero.masked_fill(~some, -INF), 0),
        (zero.index_fill(0, torch.tensor([5]), MOST), zero.masked_fill(torch.arange(S) != 5, -INF), 1),
        (zero.index_fill(0, torch.tensor([66]), 3e38), zero.masked_fill(torch.arange(S) != 66, -INF), 1),
        (torch.full((S,), LEAST), zero, 0),
        (torch.full((S,), -1e9), zero, 0),
        (torch.full((S,), 3e38), zero, 0),
        (torch.full((S,), -3e38).masked_fill(some, LEAST), zero.masked_fill(some, -INF), 0),
    ]
    large, small, random = zip(*rows, strict=True)
    return torch.stack(large), torch.stack(small), torch.tensor(random, dtype=torch.float32)


LARGE, SMALL, RANDOM = patterns()
ROWS = len(LARGE)


def operands(operator: str, T: int, by_head: bool) -> dict[str, Any]:
    """Random tensors whose scores are 0 in the rows, or in the heads, that need it."""
    heads = ROWS if by_head else 2
    given: dict[str, Any] = tensors(operator, B=1, H=heads, Hk=heads, T=T, S=S, dtype=torch.float32)
    given.pop("content_bias", None)
    if by_head and "mixing" in given:
        given["mixing"] *= RANDOM[:, None]
    else:
        given["query"] *= RANDOM[:, None, None] if by_head else RANDOM[:, None]
    if operator == "entmax_attention":
        given["alpha"] = torch.linspace(1.2, 2.0, heads)
    return given


def results(operator: str, backend: str, /, **given: Any) -> dict[str, Tensor]:
    """The results, lse too where the operator returns it, and the gradients of query, key, value, mixing and sinks."""
    if operator == "attention_statistics":
        return call(operator, backend, **given, received=True)._asdict()
    heads, T, Dv = given["value"].shape[1], given["query"].shape[-2], given["value"].shape[-1]
    dout = torch.ones(1, heads, T, Dv).cumsum(-1)
    has_lse = operator != "entmax_attention"
    if has_lse and ROWS in (heads, T):
        # Softmax keeps one number of a row, in which the sum of several large scores is lost: docs/limits.md.
        dout *= RANDOM[:, None, None] if heads == ROWS else RANDOM[:, None]
    found = run(operator, backend, dout, **given)
    for name in ("alpha", "bias", "content_bias"):
        found.pop(name, None)
    if has_lse:
        found["lse"] = call(operator, backend, **given, return_lse=True)[1]
    return found


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], **added: Tensor) -> None:
    """`added` broadcasts to rows: what a result has with a large bias beside that with a small one."""
    for name, more in added.items():
        size = more.abs().clamp(min=1.0)
        assert_alike(found.pop(name) / size, (expected.pop(name) + more) / size, name=name)
    assert_alike(found, expected)


#: The lse of a large bias less that of the small one.
ADDED = LARGE.masked_fill(SMALL == -INF, -INF).amax(-1)


@pytest.mark.parametrize("place", ["pairs", "keys", "offsets", "content"])
@pytest.mark.parametrize(("operator", "backend"), [*EVERY, *(("entmax_attention", name) for name in NAMES)])
def test_a_large_bias(operator: str, backend: str, place: str) -> None:
    if place == "pairs":  # the patterns are those of query rows, else of heads
        given, large, small, added = operands(operator, ROWS, False), LARGE, SMALL, ADDED
    else:
        given, added = operands(operator, 1, True), ADDED[:, None]
        large, small = LARGE[:, None], SMALL[:, None]
    if place == "content":
        if operator != "collaborative_attention":
            pytest.skip("without a content bias")
        given["scale"] = 1.0
        large, small = LARGE.clone(), small.clone()
        large[-1], small[-1] = 0.0, 0.0  # kernels bound what is this large: none is larger
        found = results(operator, backend, **given, content_bias=large[None])
        del found["lse"]
    elif place == "offsets":  # T is 1: the table is a row of the bias
        found = results(operator, backend, **given, bias=hk.OffsetBias(LARGE, first=0))
    else:
        found = results(operator, backend, **given, bias=large)
    expected = results(operator, "eager", **given, bias=small)
    expected = {name: expected[name] for name in found}
    rows = found.keys() & {"lse", "max_score"}
    compare(found, expected, **dict.fromkeys(rows, added))


SINKS = torch.tensor([1e20, MOST, -INF, -1e20, LEAST])


@pytest.mark.parametrize("keys", [0, S])
@pytest.mark.parametrize(("operator", "backend"), EVERY)
def test_a_large_sink(operator: str, backend: str, keys: int) -> None:
    heads = len(SINKS)
    given: dict[str, Any] = tensors(operator, B=1, H=heads, Hk=heads, T=3, S=keys, dtype=torch.float32)
    given.pop("content_bias", None)
    small = torch.tensor([1e4, 1e4, -INF, -INF, -INF])  # weights of 0 beside any score, or none
    expected = results(operator, "eager", **given, sinks=small)
    added = torch.where(SINKS > 0, SINKS - small, 0.0)[:, None]
    if keys == 0:  # lse is the sink
        expected["lse"] = SINKS[:, None].expand_as(expected["lse"])
        added = torch.zeros_like(added)
    compare(results(operator, backend, **given, sinks=SINKS), expected, lse=added)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize(("operator", "backend"), ATTENTION)
def test_a_large_score_takes_all(operator: str, backend: str, length: int) -> None:
    given = operands(operator, length, True)
    factor = 3e4 if backend == "triton" else 1e19  # scores beyond 1e9 are not exact there: docs/limits.md
    given["query"].zero_()[..., 0] = factor
    given["key"][..., 66, 0] = factor
    if "mixing" in given:
        given["mixing"] = torch.ones_like(given["mixing"])
    out = call(operator, backend, **given)
    assert_alike(out, given["value"][:, :, 66:67].expand_as(out))
