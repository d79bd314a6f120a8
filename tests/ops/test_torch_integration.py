"""The operators inside PyTorch: checks of ops and gradients, autocast, FLOPs, compile, export."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import heads_kernels as hk
from heads_kernels import functional
from heads_kernels.dispatch import choose
from heads_kernels.ops.attention_statistics import BACKENDS as STATISTICS
from heads_kernels.ops.attention_statistics import SIGNATURE, statistics_op
from heads_kernels.problem import Problem
from tests.ops.calls import DIFFERENTIABLE, EVERY, OPERATORS, assert_same_bits, call, serve, tensors
from tests.support.alike import assert_alike

B, H, T, S, D, Dv = 2, 4, 5, 7, 8, 6


def function(
    operator: str, backend: str, names: list[str], **options: Any
) -> Callable[..., Tensor]:
    """The operator as a function of the tensors `names`, in their order."""

    def run(*values: Tensor) -> Tensor:
        arguments = with_offsets(dict(zip(names, values, strict=True)))
        out: Tensor = getattr(hk, operator)(**arguments, backend=backend, **options)
        return out

    return run


def with_offsets(arguments: dict[str, Tensor]) -> dict[str, Any]:
    """Arguments of a call: of an `offset_table` an `OffsetBias` is made."""
    given: dict[str, Any] = dict(arguments)
    if "offset_table" in given:
        given["bias"] = hk.OffsetBias(given.pop("offset_table"))
    return given


def fixed_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "_seed", lambda problem: torch.tensor([2**40 + 1]))


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


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", OPCHECKS)
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_opcheck(operator: str, backend: str, case: str, transposed: bool) -> None:
    """Schema, fake (shapes, dtypes, strides) and symbolic tracing of forward and backward op."""
    sizes, gate_shape, options = OPCHECKS[case]
    arguments = tensors(operator, **{"dtype": torch.float32, **sizes})
    if transposed:
        for name in arguments:
            if arguments[name].dim() == 4:
                arguments[name] = arguments[name].transpose(1, 2).contiguous().transpose(1, 2)
    gate = None if gate_shape is None else torch.rand(gate_shape)
    serve(operator, backend, **arguments, gate=gate, **options)
    op = OPERATORS[operator]
    parse = Problem.gated if operator == "gated_attention" else Problem.collaborative
    problem = parse(**arguments, gate=gate, **options)
    inputs = op.pack(problem, torch.tensor([5]) if problem.dropout_p else None)
    torch.library.opcheck(op.forward_op, (*inputs, True, backend))
    torch.library.opcheck(op.forward_op, (*inputs, False, backend))
    out, attended, lse = op.forward_op(*inputs, True, backend)
    saved = (torch.randn_like(out), out if gate is None else attended, lse)
    every = [getattr(problem, name) is not None for name in op.operands]
    for needs in (every, [True, *[False] * (len(every) - 1)]):
        torch.library.opcheck(op.backward_op, (*saved, *inputs, False, needs, backend))


@pytest.mark.parametrize("form", OPERATORS)
@pytest.mark.parametrize(
    "backend", [b for operator, b in EVERY if operator == "attention_statistics"]
)
def test_opcheck_statistics(backend: str, form: str) -> None:
    arguments = tensors(form, dtype=torch.float32)
    del arguments["value"]
    serve("attention_statistics", backend, **arguments)
    excluded = torch.rand(B, S) > 0.5
    mixing, content_bias = arguments.get("mixing"), arguments.get("content_bias")
    problem = Problem.statistics(
        arguments["query"],
        arguments["key"],
        mixing=mixing,
        content_bias=content_bias,
        attn_mask=hk.Mask(window=(2, 3)),
        bias=torch.randn(H, T, 1),
        sinks=torch.randn(H),
        softcap=3.0,
    )
    if choose(STATISTICS, problem, backend).backend is None:
        pytest.skip(str(choose(STATISTICS, problem, backend)))
    torch.library.opcheck(statistics_op, (*SIGNATURE.pack(problem), excluded, backend))


# ---------------------------------------------------------------------- gradients
GRADCHECKS: dict[str, tuple[dict[str, int], tuple[int, ...] | None, dict[str, Any]]] = {
    "plain": ({}, None, {}),
    "head gate": ({}, (2,), {"is_causal": True}),
    "batch gate": ({"Dv": 3}, (2, 2), {"attn_mask": hk.Mask(key_lengths=[2, 4])}),
    "token sigmoid": ({}, (2, 2, 3), {"gate_activation": "sigmoid"}),
    "element softplus": ({}, (2, 2, 3, 2), {"gate_activation": "softplus"}),
    "broadcast gate": ({}, (2, 1, 3), {"attn_mask": hk.Mask(window=(1, 0))}),
    "shared heads": ({"Hk": 1}, (2,), {"attn_mask": hk.Mask(query_lengths=[3, 0])}),
    "dropout": ({}, (2,), {"dropout_p": 0.4, "is_causal": True}),
    "bias": ({}, (2,), {"bias": (1, 2, 3, 4), "sinks": (2,), "softcap": 1.5}),
    "bias of keys": ({}, (2,), {"bias": (2, 1, 1, 4), "is_causal": True}),
    "bias of rows": ({}, None, {"bias": (2, 3, 1), "sinks": (2,)}),
    "float mask": ({}, None, {"attn_mask": (3, 4), "dropout_p": 0.4}),
    "offsets": ({}, (2,), {"offset_table": (2, 3), "softcap": 1.5}),
    "shared offsets": ({}, None, {"offset_table": (1, 9), "sinks": (2,)}),
}


@pytest.mark.parametrize("case", GRADCHECKS)
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_gradcheck(operator: str, backend: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, gate_shape, options = GRADCHECKS[case]
    fixed_seed(monkeypatch)
    sizes = {"B": 2, "H": 2, "Hk": 2, "T": 3, "S": 4, "D": 2, "Dv": 2, **sizes}
    arguments = tensors(operator, **sizes, grad=True)
    if gate_shape is not None:
        gate = torch.randn(gate_shape, dtype=torch.float64)
        gate.view(-1)[1] = 0.0
        arguments["gate"] = gate.requires_grad_()
    for name, shape in options.items():
        if name in ("bias", "sinks", "offset_table", "attn_mask") and isinstance(shape, tuple):
            arguments[name] = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    options = {name: value for name, value in options.items() if name not in arguments}
    serve(operator, backend, **with_offsets(arguments), **options)
    run = function(operator, backend, list(arguments), **options)
    assert torch.autograd.gradcheck(run, tuple(arguments.values()))


@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_create_graph_and_second_order(operator: str, backend: str) -> None:
    arguments = tensors(operator, grad=True)
    arguments["gate"] = torch.rand(H, dtype=torch.float64, requires_grad=True)
    values = list(arguments.values())
    out = call(operator, backend, **arguments)
    dout = torch.randn_like(out)
    plain = torch.autograd.grad(out, values, dout, retain_graph=True)
    first = torch.autograd.grad(out, values, dout, create_graph=True)
    assert_same_bits(backend, first, plain)
    for b in first:
        with pytest.raises(
            RuntimeError, match=rf"{operator} has no second derivative.*plain PyTorch"
        ):
            torch.autograd.grad(b.sum(), values, retain_graph=True)


@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_no_graph_without_need(operator: str, backend: str) -> None:
    arguments = tensors(operator)
    assert not call(operator, backend, **arguments).requires_grad
    arguments["value"].requires_grad_()
    with torch.no_grad():
        assert not call(operator, backend, **arguments).requires_grad
    out = call(operator, backend, **arguments)
    out.sum().backward()
    assert arguments["value"].grad is not None
    assert arguments["query"].grad is None


# ---------------------------------------------------------------------- checkpointing and autocast
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_checkpoint_with_dropout(operator: str, backend: str) -> None:
    """The forward pass run again draws the dropout mask of the first."""
    arguments = tensors(operator, grad=True)
    serve(operator, backend, **arguments, dropout_p=0.5)
    run = function(operator, backend, list(arguments), dropout_p=0.5)
    values = list(arguments.values())
    results = []
    for through in (lambda *a: run(*a), lambda *a: checkpoint(run, *a, use_reentrant=False)):
        torch.manual_seed(11)
        out = through(*values)
        results.append([out, *torch.autograd.grad(out.square().sum(), values)])
    assert_same_bits(backend, *results)


@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_autocast(operator: str, backend: str) -> None:
    """The bits of a bfloat16 call with a float32 gate: arguments are cast, nothing inside is."""
    arguments = tensors(operator, dtype=torch.float32, grad=True)
    arguments["gate"] = torch.rand(H, requires_grad=True)
    dout = torch.randn(B, H, T, Dv, dtype=torch.bfloat16)
    narrow = {
        name: t.bfloat16() if name in ("query", "key", "value") else t
        for name, t in arguments.items()
    }
    serve(operator, backend, **narrow)
    direct = call(operator, backend, **narrow)
    with torch.autocast("cpu", torch.bfloat16):
        out = call(operator, backend, **arguments)
        inside = torch.autograd.grad(out, list(arguments.values()), dout, retain_graph=True)
    assert out.dtype == torch.bfloat16
    assert_same_bits(backend, out, direct)
    outside = torch.autograd.grad(out, list(arguments.values()), dout)
    wanted = torch.autograd.grad(direct, list(arguments.values()), dout)
    assert {grad.dtype for grad in inside} == {torch.float32}
    for grads in (inside, outside):
        assert_same_bits(backend, grads, wanted)


@pytest.mark.parametrize(
    "backend", [b for operator, b in EVERY if operator == "attention_statistics"]
)
def test_autocast_statistics(backend: str) -> None:
    arguments = tensors("attention_statistics", dtype=torch.float32)
    narrow = {name: t.bfloat16() for name, t in arguments.items()}
    want = call("attention_statistics", backend, **narrow)
    with torch.autocast("cpu", torch.bfloat16):
        got = call("attention_statistics", backend, **arguments)
    assert_same_bits(backend, got, want)


@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_autocast_leaves_float64_alone(operator: str, backend: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert call(operator, backend, **tensors(operator)).dtype == torch.float64


# ---------------------------------------------------------------------- FLOP counts
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_flop_counter(operator: str, backend: str) -> None:
    """The dense count, whatever the mask hides: scores and values, and five products backward."""
    arguments = tensors(operator, grad=True)
    serve(operator, backend, **arguments, is_causal=True)
    with FlopCounterMode(display=False) as forward:
        out = call(operator, backend, **arguments, is_causal=True)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == 2 * B * H * T * S * (D + Dv)
    assert backward.get_total_flops() == 2 * B * H * T * S * (3 * D + 2 * Dv)


@pytest.mark.parametrize("form", OPERATORS)
@pytest.mark.parametrize(
    "backend", [b for operator, b in EVERY if operator == "attention_statistics"]
)
def test_flop_counter_statistics(backend: str, form: str) -> None:
    arguments = tensors(form)
    del arguments["value"]
    with FlopCounterMode(display=False) as counted:
        call("attention_statistics", backend, **arguments)
    assert counted.get_total_flops() == 2 * B * H * T * S * D


# ---------------------------------------------------------------------- compile and export
def compare_compiled(
    run: Callable[..., Any], compiled: Callable[..., Any], values: list[Tensor]
) -> None:
    """Output and gradients of `compiled` are those of `run`."""
    torch.manual_seed(3)
    out = run(*values)
    torch.manual_seed(3)
    got = compiled(*values)
    assert_alike(got, out)
    assert got.stride() == out.stride()
    dout = torch.randn_like(out)
    leaves = [value for value in values if value.requires_grad]
    wanted = torch.autograd.grad(out, leaves, dout)
    for a, b in zip(torch.autograd.grad(got, leaves, dout), wanted, strict=True):
        assert_alike(a, b)


COMPILED: dict[str, tuple[str | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "gate, causal": ("head", {"is_causal": True, "closed_grad": False}),
    "sigmoid, window": (
        "token",
        {"gate_activation": "sigmoid", "attn_mask": hk.Mask(window=(3, 0))},
    ),
    "dropout": (None, {"dropout_p": 0.25, "attn_mask": hk.Mask(causal="lower_right")}),
    "bias": ("head", {"softcap": 2.0, "with": ("bias", "sinks")}),
    "offsets": (None, {"is_causal": True, "with": ("offset_table",)}),
}


def compiled_arguments(
    operator: str, gate: str | None, T: int, S: int, terms: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    arguments = tensors(operator, T=T, S=S, dtype=torch.float32, grad=True)
    if gate is not None:
        shape = {"head": (H,), "token": (B, H, T)}[gate]
        arguments["gate"] = torch.randn(shape, requires_grad=True)
    for name in terms:
        shape = {"bias": (1, H, T, S), "sinks": (H,), "offset_table": (H, 11)}[name]
        arguments[name] = torch.randn(shape, requires_grad=True)
    return arguments


@pytest.mark.parametrize("case", COMPILED)
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_compile_dynamic(operator: str, backend: str, case: str) -> None:
    """One graph, without a break, serves every length: the second call does not compile again."""
    gate, options = COMPILED[case]
    terms = options.get("with", ())
    options = {name: value for name, value in options.items() if name != "with"}
    torch.compiler.reset()
    arguments = compiled_arguments(operator, gate, T, S, terms)
    serve(operator, backend, **with_offsets(arguments), **options)
    run = function(operator, backend, list(arguments), **options)
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    compare_compiled(run, compiled, list(arguments.values()))
    with torch.compiler.set_stance("fail_on_recompile"):
        for t, s in ((9, 13), (12, 12), (33, 40)):
            values = list(compiled_arguments(operator, gate, t, s, terms).values())
            compare_compiled(run, compiled, values)


@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_compile_masks(operator: str, backend: str) -> None:
    """A mask made of tensors of the batch, in the graph: other lengths do not compile again."""
    torch.compiler.reset()
    arguments = compiled_arguments(operator, "head", T, S)
    names = list(arguments)

    def run(key_mask: Tensor, lengths: Tensor, *values: Tensor) -> Tensor:
        mask = hk.Mask(causal="lower_right", key_mask=key_mask, query_lengths=lengths)
        return function(operator, backend, names, attn_mask=mask)(*values)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for t, s in ((T, S), (16, 16)):
        values = list(compiled_arguments(operator, "head", t, s).values())
        key_mask = torch.rand(B, s) > 0.3
        stance = "default" if (t, s) == (T, S) else "fail_on_recompile"
        with torch.compiler.set_stance(stance):
            compare_compiled(run, compiled, [key_mask, torch.tensor([t, t - 3]), *values])


def test_compile_before_any_call() -> None:
    """The first call of a process is compiled: nothing on its way is made lazily in a way that is not traced."""
    code = """
import torch
import heads_kernels as hk

def both(x):
    mask = hk.Mask(causal=True, key_mask=x[:, 0, :, 0] > -1)
    gated = hk.gated_attention(x, 2 * x, x - 1, attn_mask=mask, gate=x[0, :, 0, 0], dropout_p=0.1)
    collaborative = hk.collaborative_attention(x[:, 0], x[:, 1], x, x[0, :, 0], is_causal=True)
    return gated.sum() + collaborative.sum() + hk.attention_statistics(x, x)[0].sum()

def layers(x):
    return sum(layer(x, x, x)[0].sum() for layer in (gated, collaborative))

gated = hk.nn.GatedMultiheadAttention(8, 2, output_gate="element")
gated.head_gate = hk.nn.HardConcrete(2)
collaborative = hk.nn.CollaborativeMultiheadAttention(8, 2, shared_dim=8)
for run, shape in ((both, (2, 2, 5, 8)), (layers, (2, 5, 8))):
    x = torch.randn(shape, requires_grad=True)
    torch.compile(run, fullgraph=True, backend="aot_eager")(x).backward()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.check
@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_compile_inductor(operator: str, backend: str, dynamic: bool) -> None:
    """Among other operations, as in a model, through inductor, forward and backward."""
    torch.compiler.reset()
    arguments = compiled_arguments(operator, "head", T, S)
    names = list(arguments)
    options: dict[str, Any] = {"is_causal": True}
    serve(operator, backend, **arguments, **options)

    def run(weight: Tensor, *values: Tensor) -> Tensor:
        out = function(operator, backend, names, **options)(*[v * 1.5 for v in values])
        return out.transpose(1, 2).flatten(2) @ weight

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic)
    weight = torch.randn(H * Dv, 3, requires_grad=True)
    for t, s in ((T, S), (9, 12)) if dynamic else ((T, S),):
        values = list(compiled_arguments(operator, "head", t, s).values())
        compare_compiled(run, compiled, [weight, *values])


@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_export(operator: str, backend: str) -> None:
    """An exported program holds the op itself, and serves other lengths and masks."""
    names = list(tensors(operator))

    class Model(torch.nn.Module):
        def forward(self, key_mask: Tensor, *values: Tensor) -> Tensor:
            mask = hk.Mask(causal=True, key_mask=key_mask)
            return function(operator, backend, names, attn_mask=mask, scale=0.5)(*values)

    def inputs(t: int, s: int) -> tuple[Tensor, ...]:
        values = tensors(operator, T=t, S=s, dtype=torch.float32).values()
        return (torch.rand(B, s) > 0.3, *values)

    serve(operator, backend, **tensors(operator), attn_mask=hk.Mask(causal=True))
    rows, keys = torch.export.Dim("rows", min=2), torch.export.Dim("keys", min=2)
    along = {
        "query": rows, "key": keys, "value": keys, "mixing": None, "content_bias": keys,
    }  # fmt: skip
    shapes = []
    for name, value in zip(names, inputs(T, S)[1:], strict=True):
        dimension = value.dim() - (1 if name == "content_bias" else 2)
        shapes.append(None if along[name] is None else {dimension: along[name]})
    program = torch.export.export(Model(), inputs(T, S), dynamic_shapes=({1: keys}, tuple(shapes)))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert f"heads_kernels.{operator}.default" in targets
    for t, s in ((T, S), (11, 6)):
        values = inputs(t, s)
        assert_same_bits(backend, program.module()(*values), Model()(*values))


@pytest.mark.parametrize(
    "backend", [b for operator, b in EVERY if operator == "attention_statistics"]
)
def test_compile_statistics(backend: str) -> None:
    torch.compiler.reset()
    arguments = tensors("attention_statistics", dtype=torch.float32)
    serve("attention_statistics", backend, **arguments)

    def run(query: Tensor, key: Tensor, exclude: Tensor) -> Any:
        return hk.attention_statistics(query, key, exclude_keys=exclude, backend=backend)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for s in (S, 12):
        values = tensors("attention_statistics", S=s, dtype=torch.float32).values()
        exclude = torch.arange(s) == 0
        got, want = compiled(*values, exclude), run(*values, exclude)
        assert type(got) is type(want)
        assert_same_bits(backend, got, want)


# ---------------------------------------------------------------------- other devices and derivatives
@pytest.mark.parametrize("operator", ["gated_attention", "collaborative_attention"])
def test_meta_tensors_give_shapes(operator: str) -> None:
    arguments = {name: t.to("meta") for name, t in tensors(operator, grad=True).items()}
    leaves = [t.requires_grad_() for t in arguments.values()]
    out = getattr(hk, operator)(**arguments, attn_mask=hk.Mask(key_lengths=[3, 7]))
    assert out.is_meta
    assert out.shape == (B, H, T, Dv)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert [g.shape for g in grads] == [t.shape for t in leaves]
    assert hk.explain(operator, **arguments).backend == "eager"


@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_derivatives_that_are_not_there_are_refused(operator: str, backend: str) -> None:
    arguments = tensors(operator, dtype=torch.float32)
    query = arguments.pop("query")

    def run(query: Tensor) -> Tensor:
        out: Tensor = getattr(hk, operator)(query, **arguments, backend=backend)
        return out.sum()

    with pytest.raises(RuntimeError, match="reverse-mode derivative only"):
        torch.func.jvp(run, (query,), (query,))
    with pytest.raises(RuntimeError, match=r"use torch\.autograd\.grad or backward"):
        torch.func.grad(run)(query)
    with torch.autograd.forward_ad.dual_level():
        run(query)  # nothing has a tangent
        dual = torch.autograd.forward_ad.make_dual(query, query)
        with pytest.raises(RuntimeError, match="reverse-mode derivative only"):
            run(dual)


@pytest.mark.parametrize("operator", ["gated_attention", "collaborative_attention"])
def test_the_op_itself_refuses_what_does_not_fit(operator: str) -> None:
    """The extension never walks out of its tensors, whoever calls the op."""
    arguments = tensors(operator, dtype=torch.float32)
    op = OPERATORS[operator]

    parse = Problem.gated if operator == "gated_attention" else Problem.collaborative
    packed = dict(zip(op.types, op.pack(parse(**arguments), None), strict=True))

    def run(**changed: Tensor) -> None:
        op.forward_op(*{**packed, **changed}.values(), True, "cpu")

    run()
    with pytest.raises(ValueError, match=r"^key .*does not fit"):
        run(key=arguments["key"][..., :4])
    with pytest.raises(ValueError, match=r"^value .*does not fit"):
        run(value=arguments["value"][..., :3, :])
