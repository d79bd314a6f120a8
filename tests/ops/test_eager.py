"""The eager backend in float64 against the naive formula of `reference.py`, and every backend to the letter.

Eager is the oracle of the others in test_cases.py: here it meets something that is not the package.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from heads_kernels.ops.attention import attend_with_lse
from tests.ops.calls import (
    DIFFERENTIABLE,
    NAMES,
    OPERATORS,
    assert_same_bits,
    call,
    parsed,
    tensors,
)
from tests.support.alike import assert_alike
from tests.support.reference import attention, masks, pairs

B, H, T, S = 2, 4, 5, 7
EAGER = [(operator, "eager") for operator in OPERATORS]
NAN = float("nan")
MASKS = list(masks(B, H, T, S))


def default_scale(arguments: dict[str, Tensor]) -> float:
    width = arguments["query"].shape[-1]
    return (width / arguments["mixing"].shape[0] if "mixing" in arguments else width) ** -0.5


def check(
    operator: str, backend: str, arguments: dict[str, Tensor], visible: Tensor, **options: Any
) -> None:
    """Output and the gradient of every argument equal those of the naive formula."""
    out = call(operator, backend, **arguments, **options)
    expected = attention(arguments, visible, default_scale(arguments))
    assert_alike(out, expected)
    dout = torch.randn_like(out)
    leaves = list(arguments.values())
    grads, wanted = (torch.autograd.grad(each, leaves, dout) for each in (out, expected))
    for name, got, want in zip(arguments, grads, wanted, strict=True):
        assert_alike(got, want, name=f"d{name}")


def everything() -> Tensor:
    return pairs(B, H, T, S, lambda b, h, i, j: True)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("operator", "backend"), EAGER)
def test_masks(operator: str, backend: str, mask: str) -> None:
    options, sees = masks(B, H, T, S)[mask]
    arguments = tensors(operator, grad=True)
    arguments["gate"] = torch.randn(H, dtype=torch.float64, requires_grad=True)
    check(operator, backend, arguments, pairs(B, H, T, S, sees), **options)


# ---------------------------------------------------------------------- to the letter


@pytest.mark.parametrize("argument", ["query", "key", "value"])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_nan_reaches_what_sees_it(operator: str, backend: str, argument: str) -> None:
    """NaN in row 2 of one tensor, causal: in outputs and gradients that touch it, in no others."""
    arguments = tensors(operator, T=S, dtype=torch.float32)
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


@pytest.mark.parametrize("backend", NAMES)
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


@pytest.mark.parametrize("T", [5, 40])
@pytest.mark.parametrize("backend", ["cpu"])
def test_lse_without_values(backend: str, T: int) -> None:
    query, key = torch.randn(2, 4, T, 8), torch.randn(2, 2, 6, 8)
    problem = parsed("gated_attention", query, key, torch.empty(2, 2, 6, 0))
    scores = query @ key.repeat_interleave(2, 1).mT * 8**-0.5
    assert_alike(attend_with_lse(problem, backend)[1], torch.logsumexp(scores, -1))
