"""The operators inside PyTorch: checks of ops and gradients, autocast, FLOPs, compile, export."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import heads_kernels as hk
from heads_kernels.ops.attention import attention_op, backward_op
from heads_kernels.ops.statistics import statistics_op
from tests.ops import calls
from tests.ops.calls import FUSED, NAMES, OPERATORS, B, Dv, H, S, T, assert_same_bits, call, parsed, serve, tensors
from tests.support.alike import assert_alike

# ---------------------------------------------------------------------- opcheck
OPCHECKS = {
    "plain": ({}, None, {}),
    "gate": ({}, (H,), {"is_causal": True}),
    "element gate": ({}, (B, H, T, Dv), {"attn_mask": hk.Mask(key_lengths=[3, 7])}),
    "wide": ({"T": 33, "S": 20, "D": 40}, (1, H, 33), {"attn_mask": hk.Mask(window=(3, 2))}),
    "half": ({"dtype": torch.bfloat16}, (B, H), {"dropout_p": 0.3}),
    "empty": ({"B": 0}, (H,), {"is_causal": True}),
    "bias": ({}, (H,), {"bias": torch.randn(1, H, T, S), "softcap": 2.0}),
    "broadcast bias": ({}, None, {"bias": torch.randn(B, 1, 1, S), "sinks": torch.randn(H)}),
    "offsets": ({"dtype": torch.bfloat16}, None, {"bias": hk.OffsetBias(torch.randn(H, 5))}),
}


#: Of opcheck: whether results are what the schema and the fake say, and whether what AOTAutograd traces with symbolic
#: sizes gives them too. It traces the schema and the fake, which all backends share: for one of them that is enough.
OF_A_BACKEND = ("test_schema", "test_autograd_registration", "test_faketensor")
TRACED = (*OF_A_BACKEND, "test_aot_dispatch_dynamic")


#: The call whose opcheck is quick.
QUICK_OPCHECK = ("gated_attention", "cpu", "gate")


@pytest.mark.parametrize("transposed", [False, pytest.param(True, marks=pytest.mark.release)])
@pytest.mark.parametrize(
    ("operator", "backend", "case"),
    [
        pytest.param(*row, marks=() if row == QUICK_OPCHECK else pytest.mark.slow)
        for row in ((*pair, case) for pair in calls.ATTENTION for case in OPCHECKS)
        if row[0] != "entmax_attention" or row[2] == "gate"
    ],
)
def test_opcheck(operator: str, backend: str, case: str, transposed: bool) -> None:
    """Schema, fake (shapes, dtypes, strides) and symbolic tracing of forward and backward op, which has `dlse` too."""
    sizes, gate_shape, options = OPCHECKS[case]
    arguments = tensors(operator, **{"dtype": torch.float32, **sizes})
    if transposed:
        for name in arguments:
            if arguments[name].dim() == 4:
                arguments[name] = arguments[name].transpose(1, 2).contiguous().transpose(1, 2)
    if operator == "entmax_attention":
        arguments["alpha"] = torch.full((H,), 1.5)
    gate = None if gate_shape is None else torch.rand(gate_shape)
    serve(operator, backend, **arguments, gate=gate, **options)
    inputs = parsed(operator, **arguments, gate=gate, **options)._replace(closed_grad=False)
    inputs = inputs._replace(seed=torch.tensor([5, 0, 0, 0, 0]) if inputs.dropout_p else None)
    utils = TRACED if backend == "cpu" else OF_A_BACKEND
    torch.library.opcheck(attention_op, (*inputs, True, backend), test_utils=utils)
    torch.library.opcheck(attention_op, (*inputs, False, backend), test_utils=utils)
    out, attended, lse = attention_op(*inputs, True, backend)
    dlse = torch.randn_like(lse) if gate is None else None
    saved = (torch.randn_like(out), out if gate is None else attended, lse, dlse)
    every = [operand is not None for operand in inputs.operands]
    for needs in (every, [True, *[False] * (len(every) - 1)]):
        arguments_of_backward = (*saved, *inputs, needs, backend)
        torch.library.opcheck(backward_op, arguments_of_backward, test_utils=utils)


@pytest.mark.slow
@pytest.mark.parametrize("form", OPERATORS)
@pytest.mark.parametrize("backend", NAMES)
def test_opcheck_statistics(backend: str, form: str) -> None:
    arguments = tensors(form, dtype=torch.float32)
    del arguments["value"]
    terms = {"bias": torch.randn(H, T, 1), "sinks": torch.randn(H), "softcap": 3.0}
    given = {**arguments, **terms, "attn_mask": hk.Mask(window=(2, 3))}
    serve("attention_statistics", backend, **given)
    problem = parsed("attention_statistics", **given)
    for more in ({"exclude_keys": torch.rand(B, S) > 0.5}, {"row_weights": torch.rand(B, 1, T)}):
        torch.library.opcheck(statistics_op, (*problem._replace(**more), backend))


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize(
    ("name", "given", "has_value"),
    [
        ("exclude_keys", torch.zeros(1, S, dtype=torch.bool), True),
        ("row_weights", torch.ones(1, 1, 1), True),
        ("value", torch.zeros(B, H, S, Dv), False),
        ("gate", torch.ones(H), False),
        ("seed", torch.zeros(5, dtype=torch.int64), False),
    ],
)
def test_an_op_refuses_what_it_does_not_read(backend: str, name: str, given: Tensor, has_value: bool) -> None:
    arguments = tensors("gated_attention", dtype=torch.float32, Hk=H)
    serve("gated_attention", backend, **arguments)
    fields = parsed("gated_attention", **arguments)
    if not has_value:
        fields = fields._replace(value=None)
    fields = fields._replace(**{name: given.to(fields.query.device)})
    with pytest.raises(ValueError, match=f"^{name} is given"):
        attention_op(*fields, False, backend) if has_value else statistics_op(*fields, backend)


# ---------------------------------------------------------------------- gradients
@pytest.mark.parametrize(("operator", "backend"), FUSED)
def test_create_graph_and_second_order(operator: str, backend: str) -> None:
    """Those of eager are in tests/ops/test_derivatives.py."""
    arguments = tensors(operator, grad=True)
    arguments["gate"] = torch.rand(H, dtype=torch.float64, requires_grad=True)
    values = list(arguments.values())
    out = call(operator, backend, **arguments)
    dout = torch.randn_like(out)
    plain = torch.autograd.grad(out, values, dout, retain_graph=True)
    first = torch.autograd.grad(out, values, dout, create_graph=True)
    assert_same_bits(backend, first, plain)
    for grad in first:
        with pytest.raises(RuntimeError, match=f"{operator} has no second derivative"):
            torch.autograd.grad(grad.sum(), values, retain_graph=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("operator", "backend"), FUSED)
def test_jit_trace(operator: str, backend: str) -> None:
    """A trace reads the tensors that it is given; it has no gradient."""
    arguments = tensors(operator, grad=True)
    serve(operator, backend, **arguments)
    run = calls.function(operator, backend, list(arguments))
    trace = partial(torch.jit.trace, run, tuple(arguments.values()), check_trace=False)
    with pytest.raises(RuntimeError, match=f"{operator} has no gradient in torch.jit.trace; trace under"):
        trace()
    with torch.no_grad():
        others = [2 * each for each in arguments.values()]
        assert_alike(trace()(*others), run(*others))


# ---------------------------------------------------------------------- checkpointing and autocast
@pytest.mark.parametrize(("operator", "backend"), calls.DIFFERENTIABLE)
def test_checkpoint_with_dropout(operator: str, backend: str) -> None:
    """The forward pass run again draws the dropout mask of the first."""
    arguments = tensors(operator, grad=True)
    serve(operator, backend, **arguments, dropout_p=0.5)
    run = calls.function(operator, backend, list(arguments), dropout_p=0.5)
    values = list(arguments.values())
    results = []
    for through in (lambda *a: run(*a), lambda *a: checkpoint(run, *a, use_reentrant=False)):
        torch.manual_seed(11)
        out = through(*values)
        results.append([out, *torch.autograd.grad(out.square().sum(), values)])
    assert_same_bits(backend, *results)


@pytest.mark.parametrize(("operator", "backend"), calls.DIFFERENTIABLE)
def test_autocast(operator: str, backend: str) -> None:
    """The bits of a bfloat16 call with a float32 gate: arguments are cast, nothing inside is."""
    arguments = tensors(operator, dtype=torch.float32, grad=True)
    arguments["gate"] = torch.rand(H, requires_grad=True)
    dout = torch.randn(B, H, T, Dv, dtype=torch.bfloat16)
    narrow = {name: t.bfloat16() if name in ("query", "key", "value") else t for name, t in arguments.items()}
    serve(operator, backend, **narrow)
    direct = call(operator, backend, **narrow)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        out = call(operator, backend, **arguments)
        inside = torch.autograd.grad(out, list(arguments.values()), dout, retain_graph=True)
    assert out.dtype == torch.bfloat16
    assert_same_bits(backend, out, direct)
    outside = torch.autograd.grad(out, list(arguments.values()), dout)
    wanted = torch.autograd.grad(direct, list(arguments.values()), dout)
    assert {grad.dtype for grad in inside} == {torch.float32}
    for grads in (inside, outside):
        assert_same_bits(backend, grads, wanted)


@pytest.mark.parametrize("backend", NAMES)
def test_autocast_statistics(backend: str) -> None:
    arguments = tensors("attention_statistics", dtype=torch.float32)
    narrow = {name: t.bfloat16() for name, t in arguments.items()}
    want = call("attention_statistics", backend, **narrow, received=True)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        got = call("attention_statistics", backend, **arguments, received=True)
    assert_same_bits(backend, got, want)


# ---------------------------------------------------------------------- other devices and derivatives
@pytest.mark.parametrize("operator", OPERATORS)
def test_meta_tensors_give_shapes(operator: str) -> None:
    arguments = {name: t.to("meta") for name, t in tensors(operator, grad=True).items()}
    leaves = [t.requires_grad_() for t in arguments.values()]
    out = getattr(hk, operator)(**arguments, attn_mask=hk.Mask(key_lengths=[3, 7]))
    assert out.is_meta
    assert out.shape == (B, H, T, Dv)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert [g.shape for g in grads] == [t.shape for t in leaves]
    assert hk.explain(operator, **arguments).backend == "eager"


@pytest.mark.parametrize(("operator", "backend"), FUSED)
def test_vmap_and_dual_levels_without_a_derivative(operator: str, backend: str) -> None:
    """They serve; tests/ops/test_compile.py has derivatives that are refused."""
    arguments = tensors(operator, dtype=torch.float32)
    serve(operator, backend, **arguments)
    query = arguments.pop("query")
    run = partial(getattr(hk, operator), **arguments, backend=backend)
    rows = torch.stack([query, query])
    for each in (run, partial(run, gate=torch.ones(H), return_lse=True)):
        assert_alike(torch.vmap(each)(rows), tree_map(lambda one: torch.stack([one, one]), each(query)))
    with torch.autograd.forward_ad.dual_level():
        run(query)
    rows.requires_grad_()  # a leaf outside of vmap
    with pytest.raises(RuntimeError, match="reverse-mode derivative only"):
        torch.vmap(run)(rows)


@pytest.mark.parametrize(("over", "alpha"), [("query", 1.5), ("query", torch.tensor([1.2, 2.0])), ("alpha", None)])
def test_vmap_of_entmax_on_eager(over: str, alpha: float | Tensor | None) -> None:
    """Its search for thresholds cannot stop by what it finds."""
    query, key, value = torch.randn(3, 3, 2, 5, 4)
    given = {"query": query, "key": key, "value": value, "alpha": alpha, "backend": "eager"}
    rows = torch.stack([query, key]) if over == "query" else torch.tensor([[1.2, 2.0], [1.5, 1.5]])

    def run(row: Tensor) -> Tensor:
        return hk.entmax_attention(**given | {over: row})

    assert_alike(torch.vmap(run)(rows), torch.stack([run(row) for row in rows]))
