"""Every backend in float64 against the naive formula of `reference.py`: outputs and every gradient.

The eager backend is the oracle of the others: here it meets something that is not the package.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels import functional
from heads_kernels.ops.gated_attention import OPERATOR as GATED
from heads_kernels.ops.philox import seed_of
from heads_kernels.problem import Problem
from heads_kernels.testing import Inputs, compare, reference
from tests.ops.calls import DIFFERENTIABLE, EVERY, TABLES, assert_same_bits, call, serve, tensors
from tests.support.alike import assert_alike
from tests.support.reference import attention, keeps, masks, pairs

B, H, T, S, D, Dv = 2, 4, 5, 7, 8, 6
NAN = float("nan")
INF = float("inf")
MASKS = list(masks(B, H, T, S))
STATISTICS = [backend for operator, backend in EVERY if operator == "attention_statistics"]

GATES = {
    "head": (H,),
    "batch head": (B, H),
    "token": (B, H, T),
    "element": (B, H, T, Dv),
    "one": (1,),
    "head of any batch": (1, H),
    "token of any head": (B, 1, T),
    "token, written out": (1, H, T, 1),
    "column": (1, 1, 1, Dv),
}


def default_scale(arguments: dict[str, Tensor]) -> float:
    width = arguments["query"].shape[-1]
    return (width / arguments["mixing"].shape[0] if "mixing" in arguments else width) ** -0.5


def check(
    operator: str,
    backend: str,
    arguments: dict[str, Tensor],
    visible: Tensor,
    kept: Tensor | None = None,
    **options: Any,
) -> None:
    """Output and the gradient of every argument equal those of the naive formula."""
    out = call(operator, backend, **arguments, **options)
    scale = options.get("scale", default_scale(arguments))
    expected = attention(
        arguments, visible, scale, options.get("gate_activation", "identity"), kept
    )
    assert_alike(out, expected)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, list(arguments.values()), dout)
    wanted = torch.autograd.grad(expected, list(arguments.values()), dout)
    for name, got, want in zip(arguments, grads, wanted, strict=True):
        assert_alike(got, want, name=f"d{name}")


def everything(sizes: tuple[int, int, int, int] = (B, H, T, S)) -> Tensor:
    return pairs(*sizes, lambda b, h, i, j: True)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_masks(operator: str, backend: str, mask: str) -> None:
    options, sees = masks(B, H, T, S)[mask]
    arguments = tensors(operator, grad=True)
    arguments["gate"] = torch.randn(H, dtype=torch.float64, requires_grad=True)
    check(operator, backend, arguments, pairs(B, H, T, S, sees), **options)


@pytest.mark.parametrize("activation", ["identity", "sigmoid", "softplus"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_gates(operator: str, backend: str, gate: str, activation: str) -> None:
    options, sees = masks(B, H, T, S)["causal lengths"]
    arguments = tensors(operator, grad=True)
    values = torch.randn(GATES[gate], dtype=torch.float64)
    values.view(-1)[::2] = 0.0  # closed heads of an identity gate; a logit like others else
    arguments["gate"] = values.requires_grad_()
    visible = pairs(B, H, T, S, sees)
    check(operator, backend, arguments, visible, gate_activation=activation, **options)


@pytest.mark.parametrize("sizes", [(4, 1, 5, 7, 8, 6), (4, 4, 1, 9, 3, 1), (6, 3, 9, 1, 1, 5)])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_sizes(operator: str, backend: str, sizes: tuple[int, ...]) -> None:
    """Grouped-query heads, one row, one key, odd widths; no gate and a scale of its own."""
    heads, groups, t, s, d, dv = sizes
    arguments = tensors(operator, H=heads, Hk=groups, T=t, S=s, D=d, Dv=dv, grad=True)
    check(operator, backend, arguments, everything((B, heads, t, s)), scale=-0.7)


@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_dropout(operator: str, backend: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed, p = 2**50 + 11, 0.25
    monkeypatch.setattr(functional, "_seed", lambda problem: seed_of(seed))
    options, sees = masks(B, H, T, S)[mask]
    arguments = tensors(operator, grad=True)
    arguments["gate"] = torch.randn(B, H, T, dtype=torch.float64, requires_grad=True)
    kept = keeps(seed, p, B, H, T, S).double() / (1 - p)
    check(operator, backend, arguments, pairs(B, H, T, S, sees), kept, dropout_p=p, **options)


@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_views(operator: str, backend: str) -> None:
    """Transposed heads, slices of something wider, a broadcast gate: read in place."""
    arguments = {}
    for name, tensor in tensors(operator).items():
        wide = torch.randn(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=torch.float64)
        if tensor.dim() == 4:
            wide = wide.transpose(1, 2).contiguous().transpose(1, 2)
        arguments[name] = wide[..., 1:-2].requires_grad_()
    arguments["gate"] = torch.randn(B, 1, T, dtype=torch.float64).expand(B, H, T).requires_grad_()
    visible = pairs(B, H, T, S, lambda b, h, i, j: j <= i)
    check(operator, backend, arguments, visible, is_causal=True)


@pytest.mark.parametrize(("dtype", "D"), [(torch.float64, 8), (torch.float32, 130)])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_only_what_is_asked_for(operator: str, backend: str, dtype: torch.dtype, D: int) -> None:
    """The gradient of each argument alone is the one that it has beside all others."""
    arguments = tensors(operator, D=D, dtype=dtype)
    arguments["gate"] = torch.randn(H, dtype=dtype)
    leaves = {name: tensor.requires_grad_() for name, tensor in arguments.items()}
    out = call(operator, backend, **leaves)
    dout = torch.randn_like(out)
    together = torch.autograd.grad(out, list(leaves.values()), dout)
    for name, want in zip(leaves, together, strict=True):
        alone = {n: t.detach().requires_grad_(n == name) for n, t in leaves.items()}
        (got,) = torch.autograd.grad(call(operator, backend, **alone), alone[name], dout)
        assert_alike(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_dtypes(operator: str, backend: str, dtype: torch.dtype) -> None:
    """The output is that of the naive formula in float64, a few roundings apart; gradients keep the accuracy rule."""
    arguments = {name: t.to(dtype) for name, t in tensors(operator).items()}
    arguments["gate"] = torch.rand(H, dtype=torch.float32)
    serve(operator, backend, **arguments)
    inputs = Inputs(operator, arguments, {}, torch.randn(B, H, T, Dv).to(dtype))
    out, grads = inputs.backward(backend)
    assert out.dtype == dtype
    wide = {name: t.double() for name, t in arguments.items()}
    expected = attention(wide, everything(), default_scale(wide))
    # roundings: the output's own, attended's and those of the float32 inside
    tolerance = {"rtol": 3 * torch.finfo(dtype).eps, "atol": 3 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out.double(), expected, **tolerance)
    assert {name: t.dtype for name, t in grads.items()} == {
        name: t.dtype for name, t in arguments.items()
    }
    report = compare(reference(inputs), backend)
    assert report.ok, str(report)


# ---------------------------------------------------------------------- to the letter
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_rows_that_see_nothing(operator: str, backend: str) -> None:
    arguments = tensors(operator, grad=True)
    mask = hk.Mask(query_lengths=[3, 0])
    out = call(operator, backend, **arguments, attn_mask=mask)
    assert torch.equal(out[0, :, 3:], torch.zeros_like(out[0, :, 3:]))
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert (out[0, :, :3] != 0).all()
    dquery, *rest = torch.autograd.grad(out.sum(), list(arguments.values()))
    assert not dquery[1].any()
    assert not dquery[0, ..., 3:, :].any()
    assert all(bool(torch.isfinite(grad).all()) for grad in rest)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", ["lengths", "causal lengths", "holes", "documents"])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_hidden_poison_reaches_nothing(
    operator: str, backend: str, mask: str, dtype: torch.dtype, poison: float
) -> None:
    options, sees = masks(B, H, T, S)[mask]
    visible = pairs(B, H, T, S, sees).any(1)
    unseen, fully_masked = ~visible.any(1), ~visible.any(2)  # keys [B, S] and rows [B, T]
    clean = tensors(operator, dtype=dtype)
    clean["gate"] = torch.rand(B, H, T, dtype=dtype)
    dout = torch.randn(B, H, T, Dv, dtype=dtype)
    results = []
    for poisoned in (False, True):
        arguments = {name: tensor.clone() for name, tensor in clean.items()}
        upstream = dout.clone()
        if poisoned:
            for name, hidden in (("key", unseen), ("value", unseen), ("query", fully_masked)):
                rows = hidden if arguments[name].dim() == 3 else hidden[:, None]
                arguments[name].masked_fill_(rows[..., None], poison)
            if "content_bias" in arguments:
                arguments["content_bias"].masked_fill_(unseen[:, None], poison)
            arguments["gate"].masked_fill_(fully_masked[:, None], poison)
            upstream.masked_fill_(fully_masked[:, None, :, None], poison)
        leaves = {name: tensor.requires_grad_() for name, tensor in arguments.items()}
        out = call(operator, backend, **leaves, **options)
        results.append([out, *torch.autograd.grad(out, list(leaves.values()), upstream)])
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.isfinite(got).all()
        assert_alike(got, want)


@pytest.mark.parametrize("argument", ["query", "key", "value"])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_nan_reaches_what_sees_it(operator: str, backend: str, argument: str) -> None:
    """NaN in row 2 of one tensor, causal: in outputs and gradients that touch it, in no others."""
    arguments = tensors(operator, T=S)
    arguments[argument][1, ..., 2, :] = NAN
    leaves = {name: tensor.requires_grad_() for name, tensor in arguments.items()}
    out = call(operator, backend, **leaves, is_causal=True)
    rows = torch.zeros(B, S, dtype=torch.bool)
    rows[1, 2 : 3 if argument == "query" else S] = True
    assert torch.equal(out.isnan(), rows[:, None, :, None].expand_as(out))
    (dquery,) = torch.autograd.grad(out.sum(), leaves["query"], retain_graph=True)
    per_row = dquery.isnan().any(-1)
    assert torch.equal(per_row, (rows[:, None] if per_row.dim() == 3 else rows).expand_as(per_row))
    (dvalue,) = torch.autograd.grad(out.sum(), leaves["value"])
    if argument == "query":  # row 2 reads values 0 to 2
        assert dvalue[1, :, :3].isnan().all()
        assert not dvalue[1, :, 3:].isnan().any()
    assert not dvalue[0].isnan().any()


@pytest.mark.parametrize("closed_grad", [True, False])
@pytest.mark.parametrize("ranks", ["head", "batch head"])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_closed_heads(operator: str, backend: str, ranks: str, closed_grad: bool) -> None:
    arguments = tensors(operator, Hk=H)
    gate = torch.rand(GATES[ranks], dtype=torch.float64) + 0.5
    gate[..., 1], gate[..., 3] = 0.0, -0.0
    arguments["gate"] = gate
    arguments["value"][:, 1] = NAN  # no one reads a closed head, but for the gradient of its gate
    leaves = {name: tensor.requires_grad_() for name, tensor in arguments.items()}
    out = call(operator, backend, **leaves, closed_grad=closed_grad)
    assert torch.equal(out[:, 1::2], torch.zeros_like(out[:, 1::2]))
    grads = dict(zip(leaves, torch.autograd.grad(out.sum(), list(leaves.values())), strict=True))
    dgate = grads.pop("gate")
    assert all(bool(torch.isfinite(grad).all()) for grad in grads.values())
    assert not grads["value"][:, 1::2].any()
    if closed_grad:
        opened = {**arguments, "gate": torch.ones_like(gate)}
        attended = attention(opened, everything(), default_scale(opened))
        want = attended.sum((2, 3)) if ranks == "batch head" else attended.sum((0, 2, 3))
        torch.testing.assert_close(dgate, want, equal_nan=True)
    else:
        assert not dgate[..., 1::2].any()
        assert dgate[..., ::2].all()


@pytest.mark.parametrize("backend", [row.name for row in TABLES["collaborative_attention"]])
def test_closed_grad_of_mixing(backend: str) -> None:
    """With closed_grad=False the zeros of mixing report no slope; all others keep theirs."""
    arguments = tensors("collaborative_attention", D=64, grad=True)
    with torch.no_grad():
        arguments["mixing"][0, :32] = 0.0
        arguments["mixing"][2, 16:] = 0.0
        arguments["mixing"][3, ::2] = 0.0
    zero = arguments["mixing"] == 0
    check("collaborative_attention", backend, arguments, everything())
    out = call("collaborative_attention", backend, **arguments)
    part = call("collaborative_attention", backend, **arguments, closed_grad=False)
    assert_same_bits(backend, part, out)
    dout = torch.randn_like(out)
    full = torch.autograd.grad(out, list(arguments.values()), dout)
    less = torch.autograd.grad(part, list(arguments.values()), dout)
    for name, want, got in zip(arguments, full, less, strict=True):
        if name == "mixing":
            assert want[zero].all()
            want = want.masked_fill(zero, 0.0)
        assert_alike(got, want)


@pytest.mark.parametrize(
    ("operator", "backend", "name"),
    [
        (operator, backend, name)
        for operator, backend in DIFFERENTIABLE
        for name in ("gate", "mixing")
        if name == "gate" or operator == "collaborative_attention"
    ],
)
def test_zero_is_judged_in_its_own_dtype(operator: str, backend: str, name: str) -> None:
    """A number that float64 holds and float32 does not closes nothing beside float32 queries."""
    arguments = tensors(operator, Hk=H, D=64, dtype=torch.float32)
    small = torch.tensor([1e-50, 0.0, -1e-50, 1.0], dtype=torch.float64)
    if name == "mixing":
        arguments["mixing"] = arguments["mixing"].double()
        arguments["mixing"][3] = small.repeat_interleave(16)  # a chunk each
    else:
        arguments["gate"] = small
    grads = []
    for closed_grad in (True, False):
        leaves = {key: t.detach().requires_grad_() for key, t in arguments.items()}
        out = call(operator, backend, **leaves, closed_grad=closed_grad)
        grads += torch.autograd.grad((out + 1).square().sum(), leaves[name])
    zero = arguments[name] == 0
    assert grads[0].all()
    assert not grads[1][zero].any()
    torch.testing.assert_close(grads[1][~zero], grads[0][~zero], rtol=1e-5, atol=1e-5)


EMPTY = {
    "batch": {"B": 0},
    "rows": {"T": 0},
    "keys": {"S": 0},
    "heads": {"H": 0, "Hk": 0},
    "values": {"Dv": 0},
    "width": {"D": 0},
}


@pytest.mark.parametrize("mask", [None, hk.Mask(causal=True), hk.Mask(key_lengths=[0])])
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_empty(operator: str, backend: str, empty: str, mask: hk.Mask | None) -> None:
    arguments = tensors(operator, **EMPTY[empty], grad=True)
    heads = EMPTY[empty].get("H", H)
    arguments["gate"] = torch.rand(heads, dtype=torch.float64, requires_grad=True)
    options: dict[str, Any] = {"scale": 1.0, "attn_mask": mask, "dropout_p": 0.5}
    out = call(operator, backend, **arguments, **options)
    assert out.shape == torch.Size(
        [EMPTY[empty].get(n, d) for n, d in zip(("B", "H", "T", "Dv"), (B, H, T, Dv), strict=True)]
    )
    if empty == "keys":
        assert not out.any()
    grads = torch.autograd.grad(out.sum(), list(arguments.values()))
    for name, grad in zip(arguments, grads, strict=True):
        assert grad.shape == arguments[name].shape
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("T", [5, 40])
def test_lse_without_values(T: int) -> None:
    query, key = torch.randn(2, 4, T, 8), torch.randn(2, 2, 6, 8)
    problem = Problem.gated(query, key, torch.empty(2, 2, 6, 0))
    scores = query @ key.repeat_interleave(2, 1).mT * 8**-0.5
    assert_alike(GATED.with_lse(problem, "cpu")[1], torch.logsumexp(scores, -1))


@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_the_same_bits(operator: str, backend: str) -> None:
    arguments = tensors(operator, T=70, S=130, dtype=torch.float32, grad=True)
    runs = []
    for _ in range(2):
        out = call(operator, backend, **arguments, is_causal=True)
        runs.append([out, *torch.autograd.grad(out.sum(), list(arguments.values()))])
    assert_same_bits(backend, *runs)
