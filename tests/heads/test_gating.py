"""Gates on the heads of models: attached, taken off, closed for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.model_state import state
from tests.support.nn_layers import model_and_run
from tests.support.tiny_models import build, outputs


def bert() -> tuple[Any, Callable[[], Tensor]]:
    model = hk.integrations.transformers.use(build("bert"))
    return model, lambda: outputs(model)


def test_close_adds_heads_and_reopen_takes_them_back() -> None:
    """What closed heads compute is in tests/nn/test_modules.py and tests/transformers/test_families.py."""
    model, run = model_and_run()
    whole, names = run(), model.state_dict().keys()
    hk.heads.close(model, {0: [1], "layers.1": [3]})
    hk.heads.close(model, {1: [0]})
    assert hk.heads.closed(model) == {"layers.0": [1], "layers.1": [0, 3]}
    assert (run() - whole).abs().max() > 1e-3
    assert model.state_dict().keys() == names  # nothing to save
    hk.heads.reopen(model)
    assert hk.heads.closed(model) == {}
    assert_alike(run(), whole)


# ---------------------------------------------------------------------- learned gates
@pytest.mark.parametrize("model_of", [model_and_run, bert])
def test_gate_and_ungate(model_of: Callable[[], Any]) -> None:
    model, run = model_of()
    whole = run()
    before = {name for name, _ in model.named_parameters()}
    hk.heads.gate(model, hk.nn.HardConcrete)
    layers = hk.heads.attention_layers(model)
    after = {name for name, _ in model.named_parameters()}
    assert after - before == {f"{layer.name}.head_gate.log_alpha" for layer in layers}
    model.train()
    run().square().mean().backward()
    for layer in layers:
        assert layer.module.head_gate.num_heads == layer.num_heads
        assert layer.module.head_gate.log_alpha.grad is not None
    model.eval()
    hk.heads.reopen(model)  # which removes only what `close` made
    assert hk.heads.closed(model) == {layer.name: [] for layer in layers}
    hk.heads.ungate(model)
    assert {name for name, _ in model.named_parameters()} == before
    assert_alike(run(), whole)


def test_gate_takes_the_layers_that_are_asked_for() -> None:
    model, _ = bert()
    name = "encoder.layer.1.attention.self"
    hk.heads.gate(model, hk.nn.HardConcrete, layers=[name])
    assert list(hk.heads.closed(model)) == [name]
    model.get_submodule(name).head_gate.log_alpha.data[2] = -9.0
    assert hk.heads.closed(model) == {name: [2]}


def test_gates_take_the_mode_of_their_layer_and_leave_out_empty_ones() -> None:
    model, run = model_and_run()
    hk.heads.prune(model, {1: range(4)})
    hk.heads.gate(model.train(), hk.nn.HardConcrete)
    assert model.layers[0].head_gate.training
    assert model.layers[1].head_gate is None
    run()


# ---------------------------------------------------------------------- bad input
def stock() -> Any:
    return build("bert", "sdpa")


def with_gates() -> Any:
    model, _ = model_and_run()
    hk.heads.gate(model, hk.nn.HardConcrete, layers=[1])
    hk.heads.gate(model, lambda H: hk.nn.FixedGate(torch.full((H,), 0.5)), layers=[0])
    return model


def plain() -> Any:
    return model_and_run()[0]


def one_for_all() -> Callable[[int], hk.nn.HeadGate]:
    one = hk.nn.HardConcrete(4)
    return lambda H: one


USE = r"runs the attention function 'sdpa' in layer 0.*transformers\.use\(model\) first"
MAKE = r"make is a \w+; pass hk.nn.HardConcrete"
BAD: list[tuple[Callable[[], Any], str, tuple[Any, ...], str]] = [
    (stock, "close", ({0: [1]},), USE),
    (stock, "gate", (hk.nn.HardConcrete,), USE),
    (plain, "close", ({0: [0], 2: [0]},), "names layer 2; this model has layers 0 to 1: 'layers.0'"),
    (plain, "close", ({0: [0], "layers.1": [4]},), "has head 4; it has heads 0 to 3, 4 in all"),
    (plain, "gate", (hk.nn.HardConcrete, [0, "x"]), "layers names layer 'x'"),
    *((plain, "gate", (hk.nn.HardConcrete, one), "pass a list of layers") for one in (0, "layers.0")),
    *((plain, "gate", (make,), MAKE) for make in (hk.nn.HardConcrete(4), 4, None)),
    (plain, "gate", (lambda H: nn.Linear(H, H),), "make returned a Linear"),
    (plain, "gate", (lambda H: hk.nn.HardConcrete(H - 1),), "make returned 3 gates for layer 0"),
    (plain, "gate", (one_for_all(),), "returned the same gate for layer 1 .* as for layer 0"),
    (with_gates, "close", ({1: [0]},), "layer 1 .*has a HardConcrete that close would overwrite"),
    (with_gates, "close", ({0: [0]},), "layer 0 .*has a FixedGate that close would overwrite"),
    (with_gates, "gate", (hk.nn.HardConcrete,), "layer 0 .*has a FixedGate already.*ungate"),
]  # fmt: skip


@pytest.mark.parametrize("make", [stock, plain, with_gates])
def test_bad_input(make: Callable[[], Any]) -> None:
    model = make()
    before = state(model)
    for made, operation, arguments, refusal in BAD:
        if made is make:
            with pytest.raises((TypeError, ValueError), match=refusal):
                getattr(hk.heads, operation)(model, *arguments)
            assert state(model) == before


def test_inference_mode_leaves_models_that_train() -> None:
    model, run = model_and_run()
    with torch.inference_mode():
        hk.heads.close(model, {0: [0], 1: [1]})
        hk.heads.prune(model, {0: [0]})
        hk.heads.gate(model, hk.nn.HardConcrete, layers=[0])
    hk.heads.close(model, {1: [2]})
    model.train()
    run().square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
