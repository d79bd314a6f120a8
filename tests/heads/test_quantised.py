"""Projections quantised by torchao around the operators: what works, and what is refused by name."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from tests.support.nn_layers import B, E, Gates, H, Layers, S
from tests.support.refusals import assert_refused
from tests.support.tiny_models import build, outputs

quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")
pytestmark = [pytest.mark.check, pytest.mark.filterwarnings("ignore")]

WEIGHTS = "Int8WeightOnlyConfig"
DYNAMIC = "Int8DynamicActivationInt8WeightConfig"
BOTH = pytest.mark.parametrize("kind", [WEIGHTS, DYNAMIC])
#: Of the norm of the outputs of a float model, in int8: 8 bits have 1 % of the largest number. Heuristic.
FAR = 0.1


def quantised(model: nn.Module, kind: str) -> Any:
    """A copy with int8 projections."""
    made = copy.deepcopy(model)
    quantization.quantize_(made, getattr(quantization, kind)())
    return made


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).norm() < FAR * expected.norm()


def modules() -> Layers:
    gated = hk.nn.GatedMultiheadAttention(E, H, num_key_heads=2, output_gate="head")
    return Layers(gated, hk.nn.CollaborativeMultiheadAttention(E, H, 16))


def run(model: nn.Module, x: Tensor) -> Tensor:
    """What the layers add to x."""
    return model(x, is_causal=True) - x


@BOTH
def test_modules(kind: str) -> None:
    """Pruned before, closed and compiled after."""
    model, x = modules().eval(), torch.randn(B, S, E)
    hk.heads.prune(model, {0: [1]})
    made = quantised(model, kind)
    with torch.no_grad():
        assert_near(run(made, x), run(model, x))
        for each in (model, made):
            hk.heads.close(each, {0: [0], 1: [2, 3]})
        out = run(made, x)
        assert_near(out, run(model, x))
        if kind == DYNAMIC:  # to a graph of the package either kind is a projection
            compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
            assert_near(run(compiled, x), out)


@BOTH
def test_a_model_of_transformers(kind: str) -> None:
    """Run by the package, with head masks; quantised first."""
    stock = build("bert")
    made = hk.integrations.transformers.use(quantised(stock, kind))
    mask = torch.tensor([[1.0, 0, 1, 1], [0, 0, 1, 0.5]])
    with torch.no_grad():
        assert_near(outputs(made), outputs(stock))
        hk.integrations.transformers.use(stock)
        assert_near(outputs(made, head_mask=mask), outputs(stock, head_mask=mask))


@BOTH
def test_what_needs_the_weights_is_refused(kind: str) -> None:
    made, data = quantised(modules(), kind), [torch.randn(B, S, E)]
    first = r"query projection has .*Int8Tensor.* as its weight; {} the model before it is quan"
    relevance = partial(hk.analysis.relevance, made, data, lambda m, x: m(x).mean(1))
    assert_refused(
        (lambda: hk.heads.prune(made, {0: [1]}), first.format("prune")),
        (lambda: hk.convert.collaborate(made, 8), first.format("convert")),
        (relevance, r"computes linear, whose weight is quantised \(Int8Tens"),
        unchanged=[made],
    )


def test_gates_learn_through_quantised_weights_where_there_is_a_gradient() -> None:
    made = quantised(modules(), WEIGHTS)
    hk.heads.gate(made, lambda heads: Gates([1.0] * heads))
    made(torch.randn(B, S, E)).square().mean().backward()
    for layer in made.layers:
        assert layer.head_gate.gates.grad.all()
    made = quantised(modules(), DYNAMIC)
    words = r"projection 'q_proj' passes no gradient .*Int8Tensor\); train gates before the model is"
    assert_refused((lambda: hk.heads.gate(made, hk.nn.HardConcrete), words), unchanged=[made])
    hk.heads.gate(made, lambda heads: hk.nn.FixedGate(torch.ones(heads)))


def test_gates_whose_output_projection_passes_no_gradient_are_refused() -> None:
    """Also one outside of the module that calls the operator."""
    model = hk.integrations.transformers.use(build("bert"))
    config = getattr(quantization, DYNAMIC)()
    quantization.quantize_(model.encoder.layer[1].attention.output, config)
    words = r"layer 1 .* projection 'output.dense' passes no gradient"
    assert_refused((lambda: hk.heads.gate(model, hk.nn.HardConcrete), words), unchanged=[model])
