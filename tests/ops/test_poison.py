"""Memory that may not be read, and memory that must be written.

NaN stands around every input, in everything that a mask hides, in closed heads and rows, and in the memory
that the allocator hands out for results.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.testing import Case, CollaborativeCase, GatedCase, find
from heads_kernels.testing.case import surrounded
from tests.ops import calls
from tests.ops.calls import NAMES, QUICK, assert_hidden_reaches_nothing, assert_same_bits, call, inputs_of, run, tensors
from tests.support.alike import assert_alike, rounding
from tests.support.poison import dirty_allocator

#: A bias hides rows: with sinks `lse`, their sink, does not tell that they see nothing.
BESIDE_SINKS = [
    GatedCase(f"rows_hidden_{gate}", 2, 2, 40, 70, D=16, Dv=16, gate=gate, sinks=True, softcap=3.0,
        bias="B1T1", bias_hides=True)
    for gate in ("H", "BHT", "BHTD")
]  # fmt: skip
BESIDE_SINKS.append(
    CollaborativeCase("rows_hidden", 2, 2, 40, 70, Ds=16, Dv=16, sinks=True, bias="B1T1", bias_hides=True)
)
MASKED = [*(case for case in QUICK if case.is_causal or case.mask is not None), *BESIDE_SINKS]
FUSED = [name for name in NAMES if name != "eager"]


@pytest.mark.check
@pytest.mark.parametrize(("case", "backend"), list(product(QUICK, FUSED)))
def test_all_that_is_written_and_nothing_beside_what_is_read(case: Case, backend: str) -> None:
    """From memory full of NaN the same bits, with more threads too; between NaN the same numbers."""
    inputs = inputs_of(case, backend)
    want = inputs.backward(backend)
    for result in (want[0], *want[1].values()):
        assert result.isfinite().all()
    dirty_allocator(want[0])
    with calls.threads(torch.get_num_threads() + 2):
        assert_same_bits(backend, inputs.backward(backend), want)
    guarded = {name: surrounded(t) for name, t in inputs.tensors.items()}
    found = replace(inputs, tensors=guarded, dout=surrounded(inputs.dout)).backward(backend)
    assert_alike(found, want)


# ---------------------------------------------------------------------- hidden keys and rows
@pytest.mark.parametrize(
    ("case", "backend", "bad"),
    [
        *product(MASKED, NAMES, [torch.nan]),
        *(pytest.param(*row, torch.inf, marks=pytest.mark.slow) for row in product(MASKED, FUSED)),
    ],
)
def test_hidden_values_reach_nothing(case: Case, backend: str, bad: float) -> None:
    assert_hidden_reaches_nothing(calls.with_dlse(inputs_of(case, backend)), backend, bad)


FEW = [find(o, n) for o in calls.OPERATORS for n in ("padded", "holes", "padded_causal", "sinks_all")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("case", "backend"), list(product(FEW, NAMES)))
def test_hidden_values_in_other_dtypes(case: Case, backend: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(case, backend, dtype)
    assert_hidden_reaches_nothing(inputs, backend, torch.nan)
    assert_hidden_reaches_nothing(calls.drawn_dlse(inputs), backend, torch.nan)


@pytest.mark.parametrize("at", [2, 31, 64])
@pytest.mark.parametrize("argument", ["query", "key", "value"])
@pytest.mark.parametrize(("operator", "backend"), calls.DIFFERENTIABLE)
def test_nan_reaches_what_sees_it(operator: str, backend: str, argument: str, at: int) -> None:
    """NaN in a row of one tensor, causal: in outputs and gradients that touch it, in no others.

    The tile on the diagonal has visible and hidden keys at once.
    """
    given = tensors(operator, T=65, S=65, dtype=torch.float32)
    given[argument][1, ..., at, :] = torch.nan
    found = run(operator, backend, **given, is_causal=True)
    sees = torch.zeros(2, 65, dtype=torch.bool)
    sees[1, at : at + 1 if argument == "query" else 65] = True
    assert torch.equal(found["out"].isnan(), sees[:, None, :, None].expand_as(found["out"]))
    per_row = found["query"].isnan().any(-1)
    assert torch.equal(per_row, (sees[:, None] if per_row.dim() == 3 else sees).expand_as(per_row))
    if argument == "query":  # the row reads values 0 to `at`
        assert found["value"][1, :, : at + 1].isnan().all()
        assert not found["value"][1, :, at + 1 :].isnan().any()
    assert not found["value"][0].isnan().any()


@pytest.mark.parametrize("length", [1, 100])
@pytest.mark.parametrize("backend", NAMES)
def test_what_one_head_does_not_see_reaches_another_alone(backend: str, length: int) -> None:
    """NaN in a key and value that two heads share."""
    given = tensors("gated_attention", B=1, H=2, Hk=1, T=length, S=100, dtype=torch.float32)
    mask = hk.Mask(causal="lower_right", window=[(-1, 0), (9, 0)], first_keys=[0, 4])
    clean = call("gated_attention", backend, **given, attn_mask=mask)
    for name in ("key", "value"):
        given[name][:, :, 50] = torch.nan
    found = run("gated_attention", backend, **given, attn_mask=mask)
    sees = mask.to_dense(1, 2, length, 100, torch.get_default_device())[..., 50]
    assert torch.equal(found["out"].isnan(), sees[..., None].expand_as(found["out"]))
    assert_alike(found["out"][~sees], clean[~sees])
    assert torch.equal(found["query"].isnan().any(3), sees)


def in_tokens(t: Tensor) -> Tensor:
    """The same with the heads of a token next to each other."""
    return t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() == 4 else t


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("operator", calls.OPERATORS)
def test_few_rows_see_their_own_keys(operator: str, bad: float, dtype: torch.dtype, tokens_first: bool) -> None:
    """A key that one row of three sees and another does not: only the first gets the NaN of the key or value."""
    sizes = {"H": 6, "S": 700, "D": 96, "Dv": 40}
    if tokens_first:  # so many keys that a task reads several of their heads
        sizes = {"H": 10, "Hk": 5, "S": 900, "D": 256, "Dv": 256}
    S = sizes["S"]
    given = tensors(operator, T=3, **sizes, dtype=dtype)
    if tokens_first:
        given = {name: in_tokens(t) for name, t in given.items()}
    hidden = torch.rand(S) < 0.3
    spoiled = (("value",), ("key", "value"))
    for row_hides, names in product(([True, True, True], [True, False, True]), spoiled):
        kept = torch.tensor(row_hides)
        dense = torch.ones(3, S, dtype=torch.bool)
        dense[kept] = ~hidden
        poisoned = dict(given)
        for name in names:
            poisoned[name] = given[name].clone()
            poisoned[name][..., hidden, :] = bad
        want = call(operator, "cpu", **given, attn_mask=dense)
        got = call(operator, "cpu", **poisoned, attn_mask=dense)
        assert torch.equal(got[:, :, kept], want[:, :, kept])
        assert not got[:, :, ~kept].isfinite().any()


@pytest.mark.parametrize("distance", [25.0, 80.0])
@pytest.mark.parametrize("backend", NAMES)
def test_keys_that_weigh_nothing_beside_a_sink(backend: str, distance: float) -> None:
    """They are seen all the same: their values get small gradients, and a dout that is not finite shows."""
    given = {name: torch.randn(1, 1, 40, 16) for name in ("query", "key", "value")}
    given["sinks"], dout = torch.tensor([distance]), torch.randn(1, 1, 40, 16)
    assert run("gated_attention", backend, dout, **given)["value"].all()
    dout[:, :, 3] = torch.nan
    found = run("gated_attention", backend, dout, **given)
    assert found["value"].isnan().all()
    assert found["query"][:, :, 3].isnan().all()
    assert found["sinks"].isnan().all()


# ---------------------------------------------------------------------- closed heads and rows
@pytest.mark.parametrize("bad", [torch.nan, pytest.param(torch.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", NAMES)
def test_a_closed_head_is_not_read(backend: str, bad: float) -> None:
    """NaN in the query, key and value of a closed head; with closed_grad=False in gradients too."""
    inputs = inputs_of(find("gated_attention", "closed_heads"), backend)
    closed = inputs.tensors["gate"] == 0
    spoiled = {
        name: t if name == "gate" else t.masked_fill(closed[:, None, None], bad) for name, t in inputs.tensors.items()
    }
    poisoned = replace(inputs, tensors=spoiled, options={**inputs.options, "closed_grad": False})
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
@pytest.mark.parametrize(("T", "Dv"), [(1, 8), (63, 5), (130, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_of_closed_heads_are_written(dtype: torch.dtype, T: int, Dv: int, layout: str) -> None:
    """In every memory order, with neighbours that are closed in one batch element and open in the next."""
    B, H = 3, 5
    given = tensors("gated_attention", B=B, H=H, Hk=H, T=T, S=T, Dv=Dv, dtype=dtype)
    if layout == "BTHD":
        given = {name: in_tokens(t) for name, t in given.items()}
    gate = torch.tensor([[0, 0, 1, 0, 2], [1, 0, 0, 0, 1], [0, 0, 0, 0, 0]], dtype=torch.float32)
    expected = hk.gated_attention(**given) * gate[:, :, None, None].to(dtype)
    for leaf in (gate, gate.clone().requires_grad_()):
        dirty_allocator(gate)
        assert torch.equal(call("gated_attention", "cpu", **given, gate=leaf), expected)


@pytest.mark.parametrize("closed_grad", [True, False])
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize(("operator", "backend"), calls.DIFFERENTIABLE)
def test_closed_rows(operator: str, backend: str, learned: bool, closed_grad: bool) -> None:
    """Rows whose gate per token is exactly 0. Tiles of them, here from row 128 on, are skipped on the CPU."""
    B, H, T = 2, 4, 200
    given = tensors(operator, B=B, H=H, T=T, S=150, dtype=torch.float32)
    gate = 0.5 + torch.rand(B, H, T)
    gate[:, 0::2, 70:] = 0.0
    gate[1, 1, :64] = 0.0
    gate[:, 3, :10] = 0.0  # a tile is skipped only if all of its rows are closed
    gate[:, :, 128:] = 0.0

    def attend(backend: str, query: Tensor, dout: Tensor) -> dict[str, Tensor]:
        leaves = {n: t.detach().requires_grad_() for n, t in (given | {"query": query}).items()}
        own = gate.clone().requires_grad_(learned)
        out = call(operator, backend, **leaves, gate=own, closed_grad=closed_grad)
        wanted = leaves | ({"gate": own} if learned else {})
        grads = torch.autograd.grad(out, list(wanted.values()), dout)
        return {"out": out.detach(), **dict(zip(wanted, grads, strict=True))}

    dout = torch.randn(B, H, T, 6)
    found = attend(backend, given["query"], dout)
    assert_alike(found, attend("eager", given["query"], dout))
    assert not found["out"][gate == 0].any()
    if learned and not closed_grad:
        assert not found["gate"][gate == 0].any()
    if backend == "cpu" and not (learned and closed_grad):
        query = given["query"].clone()
        query[..., 128:, :] = dout[:, :, 128:] = torch.nan
        assert_same_bits(backend, attend(backend, query, dout), found)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("backend", NAMES)
def test_a_mixing_vector_that_is_not_read(backend: str, bad: float) -> None:
    """Of heads that are closed or see no key, and by a row that sees none beside rows that read it."""
    given = tensors("collaborative_attention", dtype=torch.float32)
    given["mixing"][0, 3] = bad
    first = torch.tensor([0.0, 1.0, 1.0, 1.0])
    for options, unread in (({"attn_mask": hk.Mask(key_lengths=[0, 0])}, slice(None)), ({"gate": first}, slice(1))):
        found = run("collaborative_attention", backend, **given, **options)
        found.pop("gate", None)  # the gradient of a closed gate is the true one
        assert all(tensor.isfinite().all() for tensor in found.values())
        if "gate" not in options:  # no row sees a key
            assert not any(tensor.any() for tensor in found.values())
        assert not found["mixing"][unread].any()
        assert not found["out"][:, unread].any()
    query_mask = torch.ones(given["query"].shape[:2], dtype=torch.bool).index_fill(1, torch.tensor([1]), False)
    found = run("collaborative_attention", backend, **given, attn_mask=hk.Mask(query_mask=query_mask))
    assert not found["query"][:, 1].any()
    assert found["query"][:, 0].isnan().any()


# ---------------------------------------------------------------------- numbers at the limits
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
    given = {name: torch.randn(1, 1, 40, 16) for name in ("query", "key", "value")}
    given["query"][:, :, :20] *= 1e25
    given["key"][:, :, 20:] *= 1e25
    given["query"][:, :, 20:] *= 1e-25
    given["key"][:, :, :20] *= 1e-25
    found = run("gated_attention", backend, **given, is_causal=True)
    wide = {name: tensor.double() for name, tensor in given.items()}
    want = run("gated_attention", "eager", **wide, is_causal=True)
    for name, exact in want.items():
        size = exact.abs().max()
        assert_alike(found[name].double() / size, exact / size, dtype=torch.float32, name=name)


@pytest.mark.parametrize("T", [41, 64])
@pytest.mark.parametrize("backend", NAMES)
def test_an_infinite_key_meets_no_row_that_is_not_there(backend: str, T: int) -> None:
    """A key that every row sees gives NaN where they do, and nothing through unused lanes."""
    given = {name: torch.randn(1, 1, T, 16) for name in ("query", "key", "value")}
    given["query"] = given["query"].abs() + 0.1
    given["key"][0, 0, 3, 5] = -torch.inf
    mask = hk.Mask(query_lengths=[T - 5])
    found = run("gated_attention", backend, **given, attn_mask=mask)
    for name in ("out", "key", "value"):  # its weight is 0 everywhere
        assert found[name].isfinite().all(), name


def test_a_true_byte_may_be_any_but_zero() -> None:
    query, key, value = torch.randn(3, 1, 2, 130, 8)
    odd = torch.full((1, 130), 255, dtype=torch.uint8).view(torch.bool)
    out = hk.gated_attention(query, key, value, attn_mask=hk.Mask(key_mask=odd), backend="cpu")
    assert_alike(out, hk.gated_attention(query, key, value, backend="cpu"))
