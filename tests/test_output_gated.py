"""Layers that gate their output: gate and attention are one op, in models that are there and in those made later."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra [transformers]")

import transformers
from transformers.monkey_patching import get_patch_mapping

import heads_kernels as hk
from heads_kernels.integrations.transformers import (
    FAMILIES,
    attention,
    register_patches,
    release,
    unregister_patches,
    use,
)
from heads_kernels.integrations.transformers.output_gated import fused_class
from tests.tiny_models import TINY, assert_alike, batch, build, outputs, with_gradients

FUSED = [name for name, family in FAMILIES.items() if family.fused]
UNFUSED = [name for name, family in FAMILIES.items() if family.output_gate and not family.fused]

transformers.logging.set_verbosity_error()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Tensor | None]]:
    """The activation and gate of every call of the operator."""
    seen: list[tuple[str, Tensor | None]] = []
    operator = attention.gated_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None, **named: Any) -> Tensor:
        seen.append((named["gate_activation"], gate))
        return operator(query, key, value, gate, **named)

    monkeypatch.setattr(attention, "gated_attention", spy)
    return seen


@pytest.fixture
def patches() -> Iterator[None]:
    register_patches()
    yield
    unregister_patches()


def gated_layers(model: Any) -> list[Any]:
    return [m for m in model.modules() if type(m).__name__.startswith("Fused")]


def from_config(name: str, implementation: str) -> Any:
    """A model by `from_config`, with the weights of `build` under the same seed."""
    tiny = TINY[name]
    config = getattr(transformers, tiny.config)(**tiny.arguments)
    model = getattr(transformers, tiny.model)._from_config(
        config, attn_implementation=implementation
    )
    return model.eval()


# ---------------------------------------------------------------------- models that are there
@pytest.mark.parametrize("name", FUSED)
def test_gate_and_attention_are_one_op(name: str, calls: list[tuple[str, Tensor | None]]) -> None:
    """The logits reach the operator as the projection gave them: views, `[B, H, T]` or `[B, H, T, Dv]`."""
    model = use(build(name))
    arguments, real = batch(name)
    layers = gated_layers(model)
    assert layers
    projections = []
    for layer in layers:
        source = next(getattr(layer, p) for p in ("gate_proj", "g_proj", "q_proj") if hasattr(layer, p))  # fmt: skip
        source.register_forward_hook(lambda _, args, out: projections.append(out))
    outputs(model, arguments, real)
    kind, _, extent = FAMILIES[name].output_gate.partition(", ")
    assert len(calls) == len(projections) > 0
    for (activation, gate), projected in zip(calls, projections, strict=True):
        assert activation == kind
        assert gate is not None
        assert gate.dim() == (4 if extent == "by element" else 3)
        if name != "beam":  # adds a bias to its logits
            assert gate.untyped_storage().data_ptr() == projected.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", UNFUSED)
def test_other_gates_run_beside_the_op(name: str, calls: list[tuple[str, Tensor | None]]) -> None:
    model = use(build(name))
    assert not gated_layers(model)
    arguments, real = batch(name)
    outputs(model, arguments, real)
    assert calls
    assert all(call == ("identity", None) for call in calls)


@pytest.mark.parametrize("name", FUSED)
def test_gates_of_heads_close_heads_beside_the_output_gate(name: str) -> None:
    """Against a stock model whose output projection reads nothing of the closed head."""
    model = build(name)
    arguments, real = batch(name)
    reference = copy.deepcopy(model)
    use(model)
    layer = gated_layers(model)[0]
    path = next(n for n, m in model.named_modules() if m is layer)
    layer.head_gate = hk.nn.FixedGate(torch.tensor([1.0, 0.0, 1.0, 0.5]))
    found = with_gradients(model, arguments, real)
    projection = reference.get_submodule(path).o_proj
    width = projection.weight.shape[1] // 4
    with torch.no_grad():
        projection.weight *= torch.tensor([1.0, 0.0, 1.0, 0.5]).repeat_interleave(width)
    assert_alike(found[0], outputs(reference, arguments, real))
    del layer.head_gate
    mask = torch.ones(max(2, layer.layer_idx + 1), 4)
    row = getattr(layer, attention.PLACE).layer
    mask[row] = torch.tensor([1.0, 0.0, 1.0, 0.5])
    if name != "hrm_text":  # both of its stacks read the row
        assert_alike(outputs(model, arguments | {"head_mask": mask}, real), found[0])


@pytest.mark.parametrize("gating", ["per-head", "per-element"])
def test_laguna_gates_by_head_or_by_element(gating: str) -> None:
    model = build("laguna", gating=gating)
    arguments, real = batch("laguna")
    expected = with_gradients(model, arguments, real)
    found = with_gradients(use(model), arguments, real)
    assert_alike(found[0], expected[0])
    assert_alike(found[1], expected[1])


def test_lfm3_without_a_gate() -> None:
    model = build("lfm3", use_attention_gate=False)
    arguments, real = batch("lfm3")
    expected = outputs(model, arguments, real)
    assert_alike(outputs(use(model), arguments, real), expected)


def test_compiles_whole() -> None:
    model = use(build("afmoe"))
    arguments, real = batch("afmoe")
    arguments["use_cache"] = False
    expected = outputs(model, arguments, real)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_alike(outputs(compiled, arguments, real), expected)


def test_fused_layers_are_pickled() -> None:
    model = use(build("laguna"))
    arguments, real = batch("laguna")
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(outputs(loaded, arguments, real), outputs(model, arguments, real))
    assert type(release(loaded).model.layers[0].self_attn).__name__ == "LagunaAttention"


# ---------------------------------------------------------------------- models made later
@pytest.mark.parametrize("name", ["afmoe", "bailing_hybrid", "qwen3_next"])
def test_models_made_under_patches_are_fused(name: str, patches: None) -> None:
    torch.manual_seed(1)
    model = from_config(name, "heads_kernels")
    assert gated_layers(model)
    arguments, real = batch(name)
    found = with_gradients(model, arguments, real)
    model.set_attn_implementation("eager")  # the fused class is its stock class then
    expected = with_gradients(model, arguments, real)
    assert_alike(found[0], expected[0])
    assert_alike(found[1], expected[1])


def test_saved_models_are_loaded_fused(tmp_path: Any, patches: None) -> None:
    stock = build("afmoe")
    stock.save_pretrained(tmp_path)
    model = type(stock).from_pretrained(tmp_path, attn_implementation="heads_kernels").eval()
    assert len(gated_layers(model)) == 2
    arguments, real = batch("afmoe")
    assert_alike(outputs(model, arguments, real), outputs(stock, arguments, real))


def test_patches_are_taken_back() -> None:
    before = get_patch_mapping()
    register_patches()
    with pytest.raises(ValueError, match="patches come from register_patches already"):
        register_patches()
    unregister_patches()
    assert get_patch_mapping() == before
    with pytest.raises(ValueError, match=r"patches are not registered; call register_patches\(\)"):
        unregister_patches()
    assert not gated_layers(from_config("afmoe", "heads_kernels"))


def test_outputs_are_recorded_of_stock_and_fused_layers() -> None:
    """transformers points its recorders at the fused class for good; stock models still have their maps."""
    register_patches()
    made = from_config("afmoe", "heads_kernels")
    unregister_patches()
    arguments, _ = batch("afmoe")
    assert len(made(**arguments, output_attentions=True).attentions) == 2
    maps = build("afmoe")(**arguments, output_attentions=True).attentions
    assert [rows.shape for rows in maps] == [(3, 4, 9, 9)] * 2


def test_use_serves_models_made_under_patches(patches: None) -> None:
    model = from_config("qwen3_next", "heads_kernels")
    classes = [type(layer) for layer in gated_layers(model)]
    arguments, real = batch("qwen3_next")
    expected = outputs(model, arguments, real)
    assert torch.equal(outputs(use(model), arguments, real), expected)
    outputs(model, arguments | {"head_mask": torch.ones(4)}, real)
    assert [type(layer) for layer in gated_layers(release(model))] == classes


def test_only_classes_of_transformers_are_fused() -> None:
    class AfmoeAttention(torch.nn.Module):
        pass

    assert fused_class(AfmoeAttention) is None
