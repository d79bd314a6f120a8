"""The operators under torch.compile and torch.export."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from tests.ops import calls
from tests.ops.calls import FUSED, NAMES, OPERATORS, B, Dv, H, S, T, assert_same_bits, function, serve, tensors
from tests.support.alike import assert_alike
from tests.support.commands import python


def compare_compiled(run: Callable[..., Any], compiled: Callable[..., Any], values: list[Tensor]) -> None:
    """Results and gradients of `compiled` are those of `run`."""
    found = []
    for each in (run, compiled):
        torch.manual_seed(3)
        results = each(*values)
        found.append(results if isinstance(results, tuple) else (results,))
    assert_alike(found[1], found[0])
    assert [got.stride() for got in found[1]] == [want.stride() for want in found[0]]
    starts = [torch.randn_like(out) for out in found[0]]
    leaves = [value for value in values if value.requires_grad]
    want, got = (torch.autograd.grad(results, leaves, starts) for results in found)
    assert_alike(got, want)


#: Sizes of tensors beside the operands, and options.
COMPILED: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "plain": ({}, {}),
    "gate, causal": ({"gate": "H"}, {"is_causal": True, "closed_grad": False}),
    "sigmoid, window": ({"gate": "BHT"}, {"gate_activation": "sigmoid", "attn_mask": hk.Mask(window=(3, 0))}),
    "dropout": ({}, {"dropout_p": 0.25, "attn_mask": hk.Mask(causal="lower_right")}),
    "bias": ({"gate": "H", "bias": "HTS", "sinks": "H"}, {"softcap": 2.0}),
    "offsets": ({"offset_table": "HD"}, {"is_causal": True}),
}


def compiled_arguments(operator: str, T: int, S: int, **beside: str) -> dict[str, Tensor]:
    arguments = tensors(operator, T=T, S=S, dtype=torch.float32, grad=True)
    if operator == "entmax_attention":
        arguments["alpha"] = torch.full((H,), 1.5, requires_grad=True)
    sizes = {"B": B, "H": H, "T": T, "S": S, "D": 11}
    for name, letters in beside.items():
        arguments[name] = torch.randn([sizes[letter] for letter in letters], requires_grad=True)
    return arguments


def tangent(run: Callable[[Tensor], Tensor], query: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, query)
        return torch.autograd.forward_ad.unpack_dual(run(dual)).tangent.clone()


#: A derivative of `run` at `query`, where the second is compiled and the first is not.
DERIVATIVES: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {
    "grad": lambda run, compiled, query: compiled(torch.func.grad(run))(query),
    "jvp": lambda run, compiled, query: compiled(lambda query: torch.func.jvp(run, (query,), (query,))[1])(query),
    "vmap of grad": lambda run, compiled, query: compiled(torch.func.vmap(torch.func.grad(run)))(query[None]),
    "dual numbers": lambda run, compiled, query: tangent(compiled(run), query),
}


@pytest.mark.parametrize("kind", DERIVATIVES)
@pytest.mark.parametrize(
    ("operator", "backend", "is_compiled"),  # test_derivatives.py has those of eager that are not compiled
    [
        *((*row, False) for row in FUSED),
        *(
            pytest.param(*row, True, marks=pytest.mark.check if row[0] != "gated_attention" else ())
            for row in calls.DIFFERENTIABLE
        ),
    ],
)
def test_derivatives_of_functions(operator: str, backend: str, kind: str, is_compiled: bool) -> None:
    """Fused kernels refuse them. Tensors of compiled code do not show that they are differentiated: the op alone would
    give zeros. Operators have one op, so that `make test` compiles one of them."""
    arguments = tensors(operator, dtype=torch.float32)
    serve(operator, backend, **arguments)
    query = arguments.pop("query")

    def run(query: Tensor) -> Tensor:
        out: Tensor = getattr(hk, operator)(query, **arguments, backend=backend)
        return out.square().sum()

    def compiled(function: Any) -> Any:
        return torch.compile(function, backend="aot_eager") if is_compiled else function

    derivative = DERIVATIVES[kind]
    if backend == "eager":
        assert_alike(derivative(run, compiled, query), derivative(run, lambda each: each, query))
    else:
        with pytest.raises(RuntimeError, match=r"reverse-mode derivative only|use torch\.autograd\.grad or backward"):
            derivative(run, compiled, query)


EAGER = ("gated_attention", "eager")

#: Each case with one operator, and at a release with the other.
DYNAMIC = [
    pytest.param(*row, case, marks=[] if row[0] == operator else pytest.mark.release)
    for case, operator in zip(COMPILED, itertools.cycle(OPERATORS), strict=False)
    for row in FUSED
]


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "backend", "case"), DYNAMIC)
def test_compile_dynamic(operator: str, backend: str, case: str) -> None:
    """One graph, without a break, serves every length: the second call does not compile again."""
    beside, options = COMPILED[case]
    arguments = compiled_arguments(operator, T, S, **beside)
    serve(operator, backend, **arguments, **options)
    run = function(operator, backend, list(arguments), **options)
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    compare_compiled(run, compiled, list(arguments.values()))
    with torch.compiler.set_stance("fail_on_recompile"):
        for t, s in ((9, 13), (12, 12), (33, 40)):
            compare_compiled(run, compiled, list(compiled_arguments(operator, t, s, **beside).values()))


@pytest.mark.parametrize(
    ("operator", "backend"),
    [*FUSED, *(pytest.param(*row, marks=pytest.mark.check) for row in (EAGER, ("entmax_attention", "cpu")))],
)
def test_compile_masks(operator: str, backend: str) -> None:
    """A mask made of tensors of the batch, in the graph: other lengths do not compile again. With lse, or a gate."""
    beside, options = ({"gate": "H"}, {}) if operator == "entmax_attention" else ({}, {"return_lse": True})
    arguments = compiled_arguments(operator, T, S, **beside)
    serve(operator, backend, **arguments)
    names = list(arguments)

    def run(key_mask: Tensor, lengths: Tensor, *values: Tensor) -> Tensor:
        mask = hk.Mask(causal="lower_right", key_mask=key_mask)
        mask &= hk.Mask(query_lengths=lengths)
        return function(operator, backend, names, attn_mask=mask, **options)(*values)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for t, s in ((T, S), (16, 16)):
        values = list(compiled_arguments(operator, t, s, **beside).values())
        key_mask = torch.rand(B, s) > 0.3
        stance = "default" if (t, s) == (T, S) else "fail_on_recompile"
        with torch.compiler.set_stance(stance):
            compare_compiled(run, compiled, [key_mask, torch.tensor([t, t - 3]), *values])


def test_one_tensor_as_several_operands() -> None:
    """Dynamo itself refuses an autograd function that gets a tensor twice."""
    x, mixing = torch.randn(2, H, T, 8, requires_grad=True), torch.randn(H, 8)

    def run(x: Tensor) -> Tensor:
        shared = x[:, 0]
        return hk.gated_attention(x, x, x) + hk.collaborative_attention(shared, shared, x, mixing)

    compare_compiled(run, torch.compile(run, fullgraph=True, backend="aot_eager"), [x])


MASK = hk.Mask(causal=True, key_mask=torch.ones(B, S).bool(), key_lengths=[S, S - 1])
MADE_OUTSIDE: dict[str, dict[str, Any]] = {
    "mask": {"attn_mask": MASK & hk.Mask(window=(3, 0))},
    "snapshot": {"attn_mask": MASK.snapshot()},
    "table": {"bias": hk.OffsetBias(torch.ones(H, 5))},
    "alibi": {"bias": hk.OffsetBias.alibi(torch.ones(H)).starting_at(2)},
}


@pytest.mark.parametrize("name", MADE_OUTSIDE)
def test_compile_with_what_was_made_outside(name: str) -> None:
    """A mask or bias is constant in the graph, or one of its arguments."""
    made = MADE_OUTSIDE[name]
    values = list(tensors("gated_attention", dtype=torch.float32).values())

    def run(query: Tensor, key: Tensor, value: Tensor, given: Any) -> Tensor:
        return hk.gated_attention(query, key, value, **given) + hk.gated_attention(query, key, value, **made)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_alike(compiled(*values, made), run(*values, made))


@pytest.mark.check
def test_first_calls_of_a_process() -> None:
    """They are compiled: nothing on their way is made lazily in a way that is not traced. Then they are counted, by a
    counter that was imported before the package."""
    code = """
import torch
from torch.utils.flop_counter import FlopCounterMode
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

x = torch.ones(1, 2, 4, 8)
for call, operands in (
    (hk.gated_attention, (x, x, x)),
    (hk.collaborative_attention, (x[:, 0], x[:, 0], x, x[0, :, 0])),
    (hk.attention_statistics, (x, x)),
):
    with FlopCounterMode(display=False) as counter:
        call(*operands)
    assert counter.get_total_flops() > 0, call
"""
    python("-c", code)


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "backend"), FUSED)
def test_compile_inductor(operator: str, backend: str) -> None:
    """Among other operations, as in a model, through inductor, forward and backward."""
    arguments = compiled_arguments(operator, T, S, gate="H")
    names = list(arguments)
    options: dict[str, Any] = {"is_causal": True}
    serve(operator, backend, **arguments, **options)

    def run(weight: Tensor, *values: Tensor) -> Tensor:
        out = function(operator, backend, names, **options)(*[v * 1.5 for v in values])
        return out.transpose(1, 2).flatten(2) @ weight

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    weight = torch.randn(H * Dv, 3, requires_grad=True)
    for t, s in ((T, S), (9, 12)):
        values = list(compiled_arguments(operator, t, s, gate="H").values())
        compare_compiled(run, compiled, [weight, *values])


@pytest.mark.parametrize(("operator", "backend"), [*FUSED, EAGER])
def test_export(operator: str, backend: str) -> None:
    """An exported program holds the op itself, and serves other lengths and masks."""
    names = list(tensors(operator))
    bias = hk.OffsetBias(torch.randn(H, T + S - 1), 1 - T)  # that of the first lengths

    class Model(torch.nn.Module):
        def forward(self, key_mask: Tensor, *values: Tensor) -> Tensor:
            mask = hk.Mask(causal=True, key_mask=key_mask)
            options = {"attn_mask": mask, "bias": bias, "scale": 0.5}
            return function(operator, backend, names, **options)(*values)

    def inputs(t: int, s: int) -> tuple[Tensor, ...]:
        values = tensors(operator, T=t, S=s, dtype=torch.float32).values()
        return (torch.rand(B, s) > 0.3, *values)

    serve(operator, backend, **tensors(operator), attn_mask=hk.Mask(causal=True))
    rows, keys = torch.export.Dim("rows", min=2), torch.export.Dim("keys", min=2)
    along = {"query": rows, "key": keys, "value": keys, "mixing": None, "content_bias": keys}
    shapes = []
    for name, value in zip(names, inputs(T, S)[1:], strict=True):
        dimension = value.dim() - (1 if name == "content_bias" else 2)
        shapes.append(None if along[name] is None else {dimension: along[name]})
    program = torch.export.export(Model(), inputs(T, S), dynamic_shapes=({1: keys}, tuple(shapes)))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "heads_kernels.attention.default" in targets
    for t, s in ((T, S), (11, 6)):
        values = inputs(t, s)
        assert_same_bits(backend, program.module()(*values), Model()(*values))


def test_export_with_a_mask_as_input(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, query: Tensor, mask: hk.Mask) -> Tensor:
            return hk.gated_attention(query, query, query, mask)

    def mask(*lengths: int) -> hk.Mask:
        return hk.Mask(causal=True, key_lengths=torch.tensor(lengths), window=[(2, 0), (4, 1)])

    query = torch.randn(2, 2, 6, 4)
    torch.export.save(torch.export.export(Model(), (query, mask(3, 6))), tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    assert_alike(loaded(query, mask(5, 1)), Model()(query, mask(5, 1)))


@pytest.mark.parametrize("backend", NAMES)
def test_compile_statistics(backend: str) -> None:
    arguments = tensors("attention_statistics", dtype=torch.float32)
    serve("attention_statistics", backend, **arguments)

    def run(query: Tensor, key: Tensor, exclude: Tensor) -> Any:
        options: dict[str, Any] = {"exclude_keys": exclude, "received": True, "backend": backend}
        return hk.attention_statistics(query, key, **options)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for s in (S, 12):
        values = tensors("attention_statistics", S=s, dtype=torch.float32).values()
        exclude = torch.arange(s) == 0
        got, want = compiled(*values, exclude), run(*values, exclude)
        assert type(got) is type(want)
        assert_same_bits(backend, got, want)
