"""Families whose heads are not known in their weights: gates, closed heads and analysis of their attention alone."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import heads_kernels as hk
from heads_kernels.heads.layers import AttentionLayer
from heads_kernels.heads.layouts import class_calls_interface
from heads_kernels.integrations.transformers import use
from tests.support.alike import assert_alike
from tests.support.families import ATTENTION_ALONE
from tests.support.tiny_models import (
    TINY,
    batch,
    build,
    outputs,
    small,
    unpooled,
    with_gradients,
)

#: Families whose stock classes may compute attention themselves: the projections of heads, by the end of their name.
ITSELF = {
    "bloom": "self_attention.dense",
    "mpnet": "attn.o",
    "mpt": "attn.out_proj",
    "swinv2": "attention.output.dense",
}
#: Those that `make test` runs.
FEW = {"bloom", "gpt_neox", "olmo2", "phi3"}
NAMES = [*(name for name in TINY if not TINY[name].attention), *ATTENTION_ALONE]
families = pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.check) for name in NAMES]
)


def computes_itself(stock: Any, layers: list[AttentionLayer]) -> bool:
    return not class_calls_interface(type(stock.get_submodule(layers[0].name)))


def stock_of(name: str) -> Any:
    return unpooled(build(name) if name in TINY else small(name))


# ---------------------------------------------------------------------- stock attention with gates
Heads = Callable[[nn.Module, Tensor, Tensor | None], Tensor]


@contextmanager
def through(stock: Any, look: Heads) -> Iterator[None]:
    """In this block `look(module, heads, maps)` replaces the heads `[B, T, H, Dv]` of stock eager attention."""

    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        heads, maps = eager(module, *args, **kwargs)
        return look(module, heads, maps), maps

    AttentionInterface.register("observed_eager", attend)
    AttentionMaskInterface.register("observed_eager", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    stock.set_attn_implementation("observed_eager")
    try:
        yield
    finally:
        stock.set_attn_implementation("eager")


def gated(stock: Any, layers: list[AttentionLayer], gates: list[Tensor], name: str) -> Any:
    """`with_gradients` of a stock model whose heads are multiplied by gates."""
    if computes_itself(stock, layers):
        projections = [part for path, part in stock.named_modules() if path.endswith(ITSELF[name])]
        hooks = []
        for part, gate in zip(projections, gates, strict=True):

            def multiply(_: Any, inputs: Any, gate: Tensor = gate) -> Any:
                heads = inputs[0].unflatten(-1, (len(gate), -1)) * gate[:, None]
                return (heads.flatten(-2), *inputs[1:])

            hooks.append(part.register_forward_pre_hook(multiply))
        found = with_gradients(stock)
        for hook in hooks:
            hook.remove()
        return found
    by_module = {
        stock.get_submodule(layer.name): gate for layer, gate in zip(layers, gates, strict=True)
    }
    with through(stock, lambda module, heads, _: heads * by_module[module][:, None]):
        return with_gradients(stock)


@families
def test_gates_and_closed_heads(name: str) -> None:
    """They give what stock attention gives with its heads multiplied by hand; pruning is refused by name."""
    stock = stock_of(name)
    model = use(copy.deepcopy(stock))
    layers = hk.heads.attention_layers(model)
    expected = with_gradients(stock)
    assert_alike(with_gradients(model), expected)

    values = {layer.num_heads: torch.linspace(-0.5, 1.5, layer.num_heads) for layer in layers}
    gates = [values[layer.num_heads] for layer in layers]
    hk.heads.gate(model, lambda H: hk.nn.FixedGate(values[H]))
    found = with_gradients(model)
    assert_alike(found, gated(stock, layers, gates, name))
    assert (found["outputs"] - expected["outputs"]).abs().max() > 1e-4
    hk.heads.ungate(model)

    open_heads = [layer.index % layer.num_heads for layer in layers]
    alone = [torch.eye(layer.num_heads)[h] for layer, h in zip(layers, open_heads, strict=True)]
    closed = {
        layer.name: [head for head in range(layer.num_heads) if head != h]
        for layer, h in zip(layers, open_heads, strict=True)
    }
    hk.heads.close(model, closed)
    assert hk.heads.closed(model) == closed
    assert_alike(with_gradients(model), gated(stock, layers, alone, name))
    if (
        name != "layoutlmv3"
    ):  # whose heads are known where transformers calls the attention function
        refusal = rf"layer 0 \('{layers[0].name}'\) is a \w+, wh(ich|ose) .*; close heads instead"
        with pytest.raises(ValueError, match=refusal):
            hk.heads.prune(model, closed)
    without = outputs(model)
    hk.heads.reopen(model)
    assert_alike(outputs(model), expected["outputs"])
    with hk.heads.patch(
        model, {name: dict.fromkeys(heads, "zero") for name, heads in closed.items()}
    ):
        assert_alike(outputs(model), without)


def maps_of(stock: Any, layers: list[AttentionLayer]) -> list[Tensor]:
    """`[B, H, T, S]` of every layer, from stock eager attention."""
    arguments = batch(stock)
    found: dict[nn.Module, Tensor] = {}
    if computes_itself(stock, layers):
        for layer in layers:
            module = stock.get_submodule(layer.name)
            module.register_forward_hook(lambda module, _, out: found.update({module: out[1]}))
        stock(**arguments, output_attentions=True)
        return list(found.values())

    def keep(module: nn.Module, heads: Tensor, maps: Tensor | None) -> Tensor:
        assert maps is not None
        found[module] = maps
        return heads

    with through(stock, keep):
        stock(**arguments)
    return [found[stock.get_submodule(layer.name)] for layer in layers]


@families
@torch.no_grad()
def test_analysis(name: str) -> None:
    """Calls and statistics, against the maps of stock attention; nothing is built to find the layers."""
    stock = stock_of(name)
    model, arguments = use(copy.deepcopy(stock)), batch(stock)
    maps = maps_of(stock, hk.heads.attention_layers(model))
    real: dict[int, Tensor] = {}

    def look(layer: AttentionLayer, call: hk.analysis.AttentionCall) -> None:
        rows = real[layer.index] = call.real_queries
        of_rows = (
            each.transpose(1, 2)[rows]
            for each in (call.probabilities(slice(0, call.T)), own[layer.index])
        )
        assert_alike(*of_rows)

    own = dict(enumerate(maps))
    with hk.analysis.observe(model, look) as layers:
        model(**arguments)
    assert real.keys() == {layer.index for layer in layers} == own.keys()
    found = hk.analysis.statistics(model, [arguments])
    for layer, each in zip(layers, maps, strict=True):
        of_rows = each.double().transpose(1, 2)[real[layer.index]]  # [rows, H, S]
        largest = of_rows.amax(-1).mean(0)
        assert_alike(found.confidence.scores[layer.index], largest, dtype=torch.float32)
        entropy = -torch.xlogy(of_rows, of_rows).sum(-1).mean(0)
        assert_alike(found.entropy.scores[layer.index], entropy, dtype=torch.float32)


def test_stock_attention_of_a_gated_model_is_refused() -> None:
    """A mask of pairs of tokens makes MPT run its stock attention, which ignores gates."""
    model = use(build("mpt"))
    ids = batch(model)["input_ids"]
    pairs = torch.zeros(len(ids), 1, 9, 9).masked_fill(torch.ones(9, 9).triu(1).bool(), -1e9)
    expected = model(ids).logits
    assert_alike(model(ids, attention_mask=pairs).logits, expected)
    hk.heads.close(model, {0: [1]})
    with pytest.raises(ValueError, match=r"attention_mask makes stock MptAttention run, .* gates"):
        model(ids, attention_mask=pairs)
