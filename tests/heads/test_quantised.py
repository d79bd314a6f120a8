"""Projections quantised by torchao around the operators: what works, and what is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.nn_layers import B, E, Gates, H, S, formula, layer_of

quantization = pytest.importorskip("torchao.quantization")
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


class Modules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gated = hk.nn.GatedMultiheadAttention(E, H, num_key_heads=2, output_gate="head")
        self.shared = hk.nn.CollaborativeMultiheadAttention(E, H, 16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x, is_causal=True)[0]
        return x


@BOTH
def test_heads_are_those_of_the_formula(kind: str) -> None:
    """Of what the quantised projections give; that of the output rounds the heads, so it is left out."""
    layer, x = quantised(layer_of(dtype=torch.float32), kind), torch.randn(B, S, E)
    layer.out_proj = nn.Identity()
    assert type(layer.q_proj.weight) is not nn.Parameter
    gates = torch.tensor([1.0, 0.0, 0.5, 2.0])
    layer.head_gate = hk.nn.FixedGate(gates)
    with torch.no_grad():
        assert_alike(layer(x)[0], formula(layer, x, x, gates=gates[:, None, None]))


@BOTH
def test_modules(kind: str) -> None:
    """Pruned before, closed and compiled after."""
    model, x = Modules().eval(), torch.randn(B, S, E)
    hk.heads.prune(model, {0: [1]})
    made = quantised(model, kind)
    with torch.no_grad():
        assert_near(made(x), model(x))
        for each in (model, made):
            hk.heads.close(each, {0: [0], 1: [2, 3]})
        out = made(x)
        assert_near(out, model(x))
        if kind == DYNAMIC:  # to a graph of the package either kind is a projection
            compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
            assert_near(compiled(x), out)


@BOTH
def test_a_model_of_transformers(kind: str) -> None:
    """Run by the package, with head masks; quantised first."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=50, num_hidden_layers=2, **sizes)
    stock = transformers.BertForSequenceClassification(config).eval()
    made = quantised(stock, kind)
    hk.integrations.transformers.use(made)
    ids = torch.randint(50, (3, 9))
    padded = torch.tensor([[1] * 9, [1] * 9, [1] * 4 + [0] * 5])
    with torch.no_grad():
        expected = stock(ids, attention_mask=padded).logits
        assert_near(made(ids, attention_mask=padded).logits, expected)
        hk.integrations.transformers.use(stock)
        mask = torch.tensor([[1.0, 0, 1, 1], [0, 0, 1, 0.5]])
        expected = stock(ids, head_mask=mask).logits
        assert_near(made(ids, head_mask=mask).logits, expected)


# ---------------------------------------------------------------------- refusals


FIRST = r"query projection has .*Int8Tensor.* as its weight; {} the model before it is quan"
REFUSED: list[tuple[Callable[[nn.Module], object], str]] = [
    (lambda model: hk.heads.prune(model, {0: [1]}), FIRST.format("prune")),
    (lambda model: hk.convert.collaborate(model, 8), FIRST.format("convert")),
    (
        lambda model: hk.analysis.relevance(
            model, [torch.randn(B, S, E)], lambda m, x: m(x).mean(1)
        ),
        r"computes linear, whose weight is quantised \(Int8Tens",
    ),
]


@BOTH
def test_what_needs_the_weights_is_refused(kind: str) -> None:
    made = quantised(Modules(), kind)
    for change, refusal in REFUSED:
        with pytest.raises(ValueError, match=refusal):
            change(made)


def test_gates_learn_through_quantised_weights_where_there_is_a_gradient() -> None:
    made = quantised(Modules(), WEIGHTS)
    hk.heads.gate(made, lambda heads: Gates([1.0] * heads))
    made(torch.randn(B, S, E)).square().mean().backward()
    for layer in made.children():
        assert layer.head_gate.gates.grad.all()
    made = quantised(Modules(), DYNAMIC)
    text = r"projection 'q_proj' passes no gradient .*Int8Tensor\); train gates before the model is"
    with pytest.raises(ValueError, match=text):
        hk.heads.gate(made, hk.nn.HardConcrete)
    assert all(layer.head_gate is None for layer in made.children())
    hk.heads.gate(made, lambda heads: hk.nn.FixedGate(torch.ones(heads)))
