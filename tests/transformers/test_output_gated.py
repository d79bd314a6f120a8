"""Layers that gate their output: gate and attention are one op, in models that are there and in those made later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.alike import assert_alike

pytest.importorskip("transformers", reason="needs the extra [transformers]")

from transformers.monkey_patching import get_patch_mapping

from heads_kernels.integrations.transformers import (
    TESTED,
    attention,
    register_patches,
    release,
    unregister_patches,
    use,
)
from tests.support.tiny_models import batch, build, outputs, with_gradients

FUSED = [name for name, family in TESTED.items() if family.fused]
UNFUSED = [name for name, family in TESTED.items() if family.output_gate and not family.fused]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Tensor | None]]:
    """The activation and gate of every call of the operator."""
    seen: list[tuple[str, Tensor | None]] = []
    operator = attention.gated_attention

    def spy(**named: Any) -> Tensor:
        seen.append((named["gate_activation"], named["gate"]))
        return operator(**named)

    monkeypatch.setattr(attention, "gated_attention", spy)
    return seen


@pytest.fixture
def patches() -> Iterator[None]:
    register_patches()
    yield
    unregister_patches()


def gated_layers(model: Any) -> list[Any]:
    return [m for m in model.modules() if type(m).__name__.startswith("Fused")]


# ---------------------------------------------------------------------- models that are there
@pytest.mark.parametrize("name", FUSED)
def test_gate_and_attention_are_one_op(name: str, calls: list[tuple[str, Tensor | None]]) -> None:
    """The logits reach the operator as the projection gave them: views, `[B, H, T]` or `[B, H, T, Dv]`."""
    model = use(build(name))
    projections = []
    for layer in gated_layers(model):
        source = next(getattr(layer, p) for p in ("gate_proj", "g_proj", "q_proj") if hasattr(layer, p))  # fmt: skip
        source.register_forward_hook(lambda _, args, out: projections.append(out))
    outputs(model)
    kind, _, extent = TESTED[name].output_gate.partition(", ")
    assert len(calls) == len(projections) > 0
    for (activation, gate), projected in zip(calls, projections, strict=True):
        assert activation == kind
        assert gate is not None
        assert gate.dim() == (4 if extent == "per element" else 3)
        if name != "beam":  # adds a bias to its logits
            assert gate.untyped_storage().data_ptr() == projected.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", UNFUSED)
def test_other_gates_run_beside_the_op(name: str, calls: list[tuple[str, Tensor | None]]) -> None:
    model = use(build(name))
    assert not gated_layers(model)
    outputs(model)
    assert calls
    assert all(call == ("identity", None) for call in calls)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("laguna", {"gating": "per-head"}),
        ("laguna", {"gating": "per-element"}),
        ("lfm3", {"use_attention_gate": False}),
    ],
)
def test_forms_of_gates_by_config(name: str, changes: dict[str, Any]) -> None:
    model = build(name, **changes)
    expected = with_gradients(model)
    assert_alike(with_gradients(use(model)), expected)


@pytest.mark.check
def test_compiles_whole() -> None:
    model = use(build("afmoe"))
    expected = outputs(model, use_cache=False)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_alike(outputs(compiled, use_cache=False), expected)


# ---------------------------------------------------------------------- models made later
@pytest.mark.check
@pytest.mark.parametrize("name", ["afmoe", "bailing_hybrid", "qwen3_next"])
def test_models_made_under_patches_are_fused(name: str, patches: None) -> None:
    model = build(name, "heads_kernels")
    assert gated_layers(model)
    found = with_gradients(model)
    model.set_attn_implementation("eager")  # the fused class is its stock class then
    assert_alike(found, with_gradients(model))


def test_saved_models_are_loaded_fused(tmp_path: Any, request: pytest.FixtureRequest) -> None:
    stock = build("afmoe")
    stock.save_pretrained(tmp_path)
    request.getfixturevalue("patches")
    model = type(stock).from_pretrained(tmp_path, attn_implementation="heads_kernels")
    assert len(gated_layers(model)) == 2
    assert_alike(outputs(model), outputs(stock))


def test_patches_are_taken_back() -> None:
    before = get_patch_mapping()
    register_patches()
    with pytest.raises(ValueError, match="patches come from register_patches already"):
        register_patches()
    unregister_patches()
    assert get_patch_mapping() == before
    with pytest.raises(ValueError, match=r"patches are not registered; call register_patches\(\)"):
        unregister_patches()
    assert not gated_layers(build("afmoe", "heads_kernels"))


def test_outputs_are_recorded_of_stock_and_fused_layers() -> None:
    """transformers points its recorders at the fused class for good; stock models still have their maps."""
    register_patches()
    made = build("afmoe", "heads_kernels")
    unregister_patches()
    assert len(made(**batch(made), output_attentions=True).attentions) == 2
    stock = build("afmoe")
    maps = stock(**batch(stock), output_attentions=True).attentions
    assert [rows.shape for rows in maps] == [(3, 8, 9, 9)] * 2


def test_use_serves_models_made_under_patches(patches: None) -> None:
    model = build("qwen3_next", "heads_kernels")
    expected = outputs(model)
    assert_alike(outputs(use(model)), expected)
    outputs(model, head_mask=torch.ones(8))
    assert not gated_layers(release(model))
    assert_alike(outputs(model), expected)
