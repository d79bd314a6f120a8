"""Modules under `torch.export`: one program for any number and length of sequences, with the outputs of the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.nn_layers import E, H, spread

GATES = torch.tensor([1.0, 0.0, 0.5, -1.0])
OPERATORS = ("gated_attention", "collaborative_attention")

KINDS: dict[str, Callable[..., Any]] = {
    "gated": lambda **options: hk.nn.GatedMultiheadAttention(E, H, num_key_heads=2, **options),
    "collaborative": lambda **options: hk.nn.CollaborativeMultiheadAttention(
        E, H, 16, ragged=True, **options
    ),
}


class Block(nn.Module):
    """A layer with what is constant in its calls; `call` makes the rest from the lengths."""

    def __init__(self, layer: nn.Module, call: Callable[[Tensor, Tensor], dict[str, Any]]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out: Tensor = self.layer(x, **self.call(x, lengths))[0]
        return out


def hidden(x: Tensor, lengths: Tensor) -> Tensor:
    return torch.arange(x.shape[1]) >= lengths[:, None]


CALLS: dict[str, Callable[[Tensor, Tensor], dict[str, Any]]] = {
    "plain": lambda x, lengths: {},
    "causal": lambda x, lengths: {"is_causal": True},
    "padding": lambda x, lengths: {"key_padding_mask": hidden(x, lengths), "is_causal": True},
    "lengths": lambda x, lengths: {"mask": hk.Mask(causal=True, key_lengths=lengths)},
    "window": lambda x, lengths: {"mask": hk.Mask(window=(3, 1), key_lengths=lengths)},
    "dense": lambda x, lengths: {"attn_mask": x[0, :, :1] > x[0, :, 0]},
    "bias": lambda x, lengths: {"bias": -(x[..., 0, None] - x[:, None, :, 0]).abs()[:, None]},
}


def assert_exports(layer: nn.Module, call: str, *, strict: bool = False) -> None:
    """The program of one call serves others, and contains one op of this package."""
    block = Block(layer, CALLS[call]).eval()
    B, T = Dim("B", min=1, max=64), Dim("T", min=2, max=512)
    shapes = {"x": {0: B, 1: T}, "lengths": {0: B}}
    with torch.no_grad():
        example = torch.randn(3, 7, E), torch.tensor([7, 2, 4])
        program = torch.export.export(block, example, dynamic_shapes=shapes, strict=strict)
        called = [str(node.target).split(".") for node in program.graph.nodes]
        assert sum(words[0] == "heads_kernels" for words in called) == 1
        assert any(words[:1] == ["heads_kernels"] and words[1] in OPERATORS for words in called)
        for b, t in ((3, 7), (1, 2), (5, 33)):
            x, lengths = torch.randn(b, t, E), torch.randint(1, t + 1, (b,))
            assert_alike(program.module()(x, lengths), block(x, lengths))


@pytest.mark.check
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_masks(kind: str, call: str) -> None:
    assert_exports(spread(KINDS[kind]()), call)


@pytest.mark.check
@pytest.mark.parametrize("kind", KINDS)
def test_strict(kind: str) -> None:
    assert_exports(spread(KINDS[kind]()), "padding", strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_closed_heads(kind: str) -> None:
    layer = spread(KINDS[kind]())
    layer.head_gate = hk.nn.FixedGate(GATES)
    assert_exports(layer, "padding")


@pytest.mark.check
@pytest.mark.parametrize("output_gate", ["head", "element"])
def test_output_gates(output_gate: str) -> None:
    assert_exports(spread(KINDS["gated"](output_gate=output_gate)), "padding")


@pytest.mark.check
@pytest.mark.parametrize("kind", KINDS)
def test_learned_gates_at_inference(kind: str) -> None:
    layer = spread(KINDS[kind]())
    layer.head_gate = hk.nn.HardConcrete(H)
    with torch.no_grad():
        layer.head_gate.log_alpha.copy_(torch.tensor([-3.0, 0.1, 3.0, 0.5]))
    assert_exports(layer, "causal")


@pytest.mark.check
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pruned", [[1], [0, 2, 3], [0, 1, 2, 3]])
def test_pruned(kind: str, pruned: list[int]) -> None:
    layer = spread(KINDS[kind]())
    hk.heads.prune(nn.ModuleList([layer]), {0: pruned})
    assert layer.num_heads == H - len(pruned)
    assert_exports(layer, "padding")


@pytest.mark.check
def test_converted() -> None:
    model = nn.ModuleList([spread(KINDS["gated"]())])
    hk.convert.collaborate(model, 16)
    assert isinstance(model[0], hk.nn.CollaborativeMultiheadAttention)
    assert_exports(model[0], "padding")


@pytest.mark.check
@pytest.mark.parametrize("kind", KINDS)
def test_cross_attention(kind: str) -> None:
    """Both lengths are free."""
    layer = spread(KINDS[kind]())
    B, T, S = Dim("B", min=1, max=64), Dim("T", min=2, max=512), Dim("S", min=2, max=512)
    shapes = ({0: B, 1: T}, {0: B, 1: S})
    with torch.no_grad():
        example = torch.randn(3, 7, E), torch.randn(3, 5, E)
        program = torch.export.export(
            layer, example, dynamic_shapes={"query": shapes[0], "key": shapes[1]}
        )
        for b, t, s in ((3, 7, 5), (1, 2, 30), (4, 30, 2)):
            x, memory = torch.randn(b, t, E), torch.randn(b, s, E)
            assert_alike(program.module()(x, memory)[0], layer(x, memory)[0])


@pytest.mark.check
def test_statistics() -> None:
    layer, x = spread(KINDS["gated"]()), torch.randn(3, 7, E)
    shapes = {
        "query": {0: Dim("B", min=1, max=64), 1: Dim("T", min=2, max=512)},
        "need_statistics": None,
    }
    with torch.no_grad():
        options = {"need_statistics": True}
        program = torch.export.export(layer, (x,), options, dynamic_shapes=shapes)
        other = torch.randn(2, 11, E)
        assert_alike(list(program.module()(other, **options)[1]), list(layer(other, **options)[1]))
