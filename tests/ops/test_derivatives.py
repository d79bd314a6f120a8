"""Gradients of each operand without the others, and of calls with sizes of 0 and 1. Derivatives beyond the first,
forward mode and `torch.func`: the eager backend has them, by plain operations."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import deterministic

import heads_kernels as hk
from tests.ops.calls import ATTENTION, assert_same_bits, call, case_of, fixed_seed, function, serve, tensors
from tests.support.alike import assert_alike

# ---------------------------------------------------------------------- gradients, from memory that starts as NaN
SPARSE = "entmax_attention"
#: Each kind of gate, beside a dense bias or a table of offsets.
TERMS: dict[str, dict[str, Any]] = {
    "no gate": {"bias": "BHTS"},
    "of heads": {"gate": "H", "bias": "1HTS"},
    "of rows": {"gate": "BHT", "bias": "HTS"},
    "of elements": {"gate": "BHTD", "offsets": 5},
}


@pytest.fixture
def memory_starts_as_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("memory_starts_as_nan")
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize(("operator", "backend"), ATTENTION)
def test_one_operand_and_every_other(operator: str, backend: str, terms: str) -> None:
    """A gradient has the same bits whichever others are asked for."""
    inputs = case_of(operator, 1, 2, 3, 5, D=8, Dv=4, **TERMS[terms], sinks=operator != SPARSE).make()
    serve(operator, backend, **inputs.arguments())
    _, every = inputs.backward(backend)
    for name in every:
        for asked in ({name}, every.keys() - {name}):
            _, grads = inputs.requires_grad(*asked).backward(backend)
            assert grads.keys() == asked
            assert_same_bits(backend, grads, {each: every[each] for each in grads})


@pytest.mark.usefixtures("memory_starts_as_nan")
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("size", ["B", "H", "T", "S", "D", "Dv"])
@pytest.mark.parametrize(("operator", "backend"), ATTENTION)
def test_sizes_of_0_and_1(operator: str, backend: str, size: str, number: int) -> None:
    """Every element of every result is written, as by the formula in float64."""
    sizes = {"B": 2, "H": 2, "T": 3, "S": 5, "D": 8, "Dv": 4, size: number}
    lengths, widths = [sizes[name] for name in "BHTS"], {name: sizes[name] for name in ("D", "Dv")}
    for terms in (TERMS["of heads"], TERMS["of elements"]):
        if "offsets" in terms and sizes["H"] == 0:  # a table has heads
            continue
        inputs = case_of(operator, *lengths, **widths, scale=0.5, **terms, sinks=operator != SPARSE).make()
        serve(operator, backend, **inputs.arguments())
        found, want = inputs.backward(backend), inputs.to(torch.float64).backward("eager")
        assert_alike(found[0].double(), want[0], dtype=torch.float32)
        for name, grad in found[1].items():
            assert_alike(grad.double(), want[1][name], dtype=torch.float32, name=f"d{name}")


# ---------------------------------------------------------------------- those of eager beyond the first
B, H, T, S, D = 2, 2, 3, 4, 4
EVERY = ("gated_attention", "collaborative_attention", SPARSE)
#: The last row of the first example sees nothing.
MASK = hk.Mask(key_lengths=[2, 4], query_lengths=[2, 3])

#: Options, and tensors beside the operands with their shapes.
CALLS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "plain": ({}, {}),
    "gate of heads": ({"attn_mask": MASK}, {"gate": (H,)}),
    "gate of elements": ({"gate_activation": "sigmoid", "is_causal": True}, {"gate": (B, H, T, D)}),
    "bias and cap": ({"softcap": 2.0, "attn_mask": MASK}, {"bias": (1, H, T, S)}),
    "sinks": ({"attn_mask": MASK, "gate_activation": "softplus"}, {"sinks": (H,), "gate": (B, H, T)}),
    "offsets": ({}, {"offset_table": (H, 5)}),
    "dropout": ({"dropout_p": 0.3}, {}),
}


def made(operator: str, name: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The operator as a function of tensors, and the tensors."""
    options, beside = CALLS[name]
    if operator == SPARSE and "sinks" in beside:
        pytest.skip("entmax attention has no sinks")
    given = tensors(operator, B=B, H=H, Hk=1, T=T, S=S, D=D, Dv=D, grad=True)
    shapes = {**beside, **({"alpha": (H,)} if operator == SPARSE else {})}
    for key, shape in shapes.items():
        given[key] = torch.randn(shape, dtype=torch.float64)
    if operator == SPARSE:
        given["alpha"] = 1.2 + 0.6 * given["alpha"].sigmoid()
    leaves = [t.detach().requires_grad_() for t in given.values()]
    return function(operator, "eager", list(given), **options), leaves


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("operator", EVERY)
def test_second_derivatives(operator: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_seed(monkeypatch)
    run, leaves = made(operator, name)
    # Along random directions: whole Jacobians take up to twenty times as long.
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("operator", EVERY)
def test_forward_mode(operator: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The derivative along a direction is its product with the gradient, which `eager.backward` has in closed form."""
    fixed_seed(monkeypatch)
    run, leaves = made(operator, name)
    directions = tuple(torch.randn_like(leaf) for leaf in leaves)
    out = run(*leaves)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    found, along = torch.func.jvp(run, tuple(leaf.detach() for leaf in leaves), directions)
    assert_alike(found, out.detach())
    pairs = zip(grads, directions, strict=True)
    assert_alike((along * dout).sum(), sum((grad * direction).sum() for grad, direction in pairs))


@pytest.mark.parametrize("operator", EVERY)
def test_transforms(operator: str) -> None:
    run, leaves = made(operator, "gate of heads")
    values = [leaf.detach() for leaf in leaves]
    expected = torch.autograd.grad(run(*leaves).square().sum(), leaves)
    every = tuple(range(len(leaves)))
    assert_alike(torch.func.grad(lambda *x: run(*x).square().sum(), every)(*values), expected)
    hessian = torch.func.hessian(lambda value: run(*values[:2], value, *values[3:]).sum())
    assert not hessian(values[2]).any()  # linear in values


@pytest.mark.parametrize(("operator", "backend"), ATTENTION)
def test_several_gradients_at_once(operator: str, backend: str) -> None:
    """Eager has them; without a rule, PyTorch would name the op, or a kernel the memory that they do not have."""
    arguments = tensors(operator, dtype=torch.float32, grad=True)
    out, leaves = call(operator, backend, **arguments), list(arguments.values())
    starts = torch.randn(2, *out.shape)
    of = partial(torch.autograd.grad, out, leaves, retain_graph=True)
    for at_once in (partial(of, is_grads_batched=True), torch.vmap(of)):
        if backend == "eager":
            assert_alike(at_once(starts), [torch.stack(each) for each in zip(*map(of, starts), strict=True)])
        else:
            with pytest.raises(RuntimeError, match=f"{operator} has no batched gradients on backend '{backend}'"):
                at_once(starts)


@pytest.mark.parametrize("closed_grad", [True, False])
@pytest.mark.parametrize("operator", EVERY)
def test_closed_heads_and_hidden_nan(operator: str, closed_grad: bool) -> None:
    """First derivatives are those of `eager.backward`, to which create_graph=True gives way."""
    given = tensors(operator, B=B, H=H, Hk=H, T=T, S=S, D=D, Dv=D)
    for name in ("key", "value"):
        given[name][0, ..., 2:, :] = torch.nan  # which the mask hides
    given["query"][0, ..., -1, :] = torch.nan  # a row that sees nothing
    given["gate"] = torch.tensor([0.0, 0.7], dtype=torch.float64)
    leaves = [t.requires_grad_() for t in given.values()]
    out = getattr(hk, operator)(**given, attn_mask=MASK, closed_grad=closed_grad, backend="eager")
    assert not out[:, 0].any()
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert_alike(torch.autograd.grad(out, leaves, dout, create_graph=True), expected)
    assert bool(expected[-1][0] != 0) == closed_grad


@pytest.mark.parametrize("operator", EVERY)
def test_infinite_values_of_a_closed_head(operator: str) -> None:
    given = tensors(operator, B=B, H=H, Hk=H, T=T, S=S, D=D, Dv=D)
    given["value"][:, 0] = torch.inf
    run = function(operator, "eager", list(given), gate=torch.tensor([0.0, 1.0]))
    values = tuple(given.values())
    for found in torch.func.jvp(run, values, tuple(map(torch.ones_like, values))):
        assert not found[:, 0].any()
        assert found[:, 1].isfinite().all()


@pytest.mark.parametrize("activation", ["identity", "sigmoid", "softplus"])
def test_a_gate_that_is_nan_in_a_hidden_row(activation: str) -> None:
    given = tensors("gated_attention", B=B, H=H, Hk=H, T=T, S=S, D=D, Dv=D)
    gate = torch.randn(B, H, T, dtype=torch.float64)
    gate[0, :, -1] = torch.nan
    run = function("gated_attention", "eager", ["gate"], **given, attn_mask=MASK, gate_activation=activation)
    of_sum = torch.func.grad(lambda gate: run(gate).sum())
    grad = of_sum(gate)
    assert_alike(grad, of_sum(gate.nan_to_num(0.0)))
    assert not grad[0, :, -1].any()


def test_lse_has_them_too() -> None:
    given = tensors("gated_attention", B=B, H=H, Hk=H, T=S, S=S, D=D, Dv=D, grad=True)
    run = function("gated_attention", "eager", list(given), return_lse=True)
    assert torch.autograd.gradgradcheck(run, list(given.values()), fast_mode=True)
