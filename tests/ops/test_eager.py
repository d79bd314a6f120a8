"""What masks mean, asked about every pair, and what an exact zero means, on every backend."""

from __future__ import annotations

import pytest
import torch

import heads_kernels as hk
from heads_kernels.ops.attention import attend_with_lse
from tests.mask.masks import HEADS, Arguments, oracle
from tests.ops.calls import (
    DIFFERENTIABLE,
    NAMES,
    OPERATORS,
    assert_same_bits,
    parsed,
    run,
    tensors,
)
from tests.support.alike import assert_alike
from tests.support.plain import plain

B, T, S = 2, 5, 7


def masks() -> dict[str, Arguments]:
    """Arguments of masks by name."""
    holes, rows = torch.rand(B, S) > 0.4, torch.rand(B, T) > 0.4
    holes[-1] = False
    return {
        "causal": {"causal": True},
        "lower right": {"causal": "lower_right"},
        "window": {"window": [(2, 1)]},
        "head windows": {"window": [(-1, 0), (0, -1), (1, 1)], "first_keys": [0, 2, 1]},
        "lengths": {"key_lengths": [S // 2, S - 1], "query_lengths": [T - 1, 0]},
        "holes": {"key_mask": holes, "query_mask": rows},
        "documents": {"document_ids": (torch.arange(T)[None] // 2, torch.arange(S)[None] // 3)},
    }


@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("operator", OPERATORS)
def test_masks(operator: str, mask: str) -> None:
    """Output and the gradient of every argument of eager equal those of the plain formula under a dense mask."""
    given = masks()[mask]
    visible = oracle(given, B, T, S)
    arguments = tensors(operator, H=HEADS, Hk=HEADS) | {"gate": torch.randn(HEADS).double()}
    leaves = {name: tensor.requires_grad_() for name, tensor in arguments.items()}
    expected = plain(parsed(operator, **leaves, attn_mask=visible)).out
    dout = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, list(leaves.values()), dout)
    want = {"out": expected.detach(), **dict(zip(leaves, grads, strict=True))}
    assert_alike(run(operator, "eager", dout, **arguments, attn_mask=hk.Mask(**given)), want)


# ---------------------------------------------------------------------- exact zeros
@pytest.mark.parametrize("backend", NAMES)
def test_closed_grad_of_mixing(backend: str) -> None:
    """With closed_grad=False the zeros of mixing report no slope; all others keep theirs."""
    arguments = tensors("collaborative_attention", D=64)
    arguments["mixing"][0, :32] = 0.0
    arguments["mixing"][2, 16:] = 0.0
    arguments["mixing"][3, ::2] = 0.0
    zero = arguments["mixing"] == 0
    full = run("collaborative_attention", backend, **arguments)
    less = run("collaborative_attention", backend, **arguments, closed_grad=False)
    assert_same_bits(backend, less["out"], full["out"])
    assert full["mixing"][zero].all()
    full["mixing"].masked_fill_(zero, 0.0)
    assert_alike(less, full)


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
    arguments = tensors(operator, Hk=4, D=64, dtype=torch.float32)
    small = torch.tensor([1e-50, 0.0, -1e-50, 1.0], dtype=torch.float64)
    if name == "mixing":
        arguments["mixing"] = arguments["mixing"].double()
        arguments["mixing"][3] = small.repeat_interleave(16)  # a chunk each
    else:
        arguments["gate"] = small
    grads = [run(operator, backend, **arguments, closed_grad=closed_grad)[name] for closed_grad in (True, False)]
    zero = arguments[name] == 0
    assert grads[0].all()
    assert not grads[1][zero].any()
    assert_alike(grads[1][~zero], grads[0][~zero])


@pytest.mark.parametrize("T", [5, 40])
@pytest.mark.parametrize("backend", ["cpu"])
def test_lse_without_values(backend: str, T: int) -> None:
    query, key = torch.randn(2, 4, T, 8), torch.randn(2, 2, 6, 8)
    problem = parsed("gated_attention", query, key, torch.empty(2, 2, 6, 0))
    scores = query @ key.repeat_interleave(2, 1).mT * 8**-0.5
    assert_alike(attend_with_lse(problem, backend)[1], torch.logsumexp(scores, -1))
