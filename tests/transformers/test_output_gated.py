"""Layers that gate their output: gate and attention are one op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.alike import assert_alike

pytest.importorskip("transformers", reason="needs the extra [transformers]")

from heads_kernels.integrations.transformers import TESTED, attention, use
from heads_kernels.integrations.transformers.output_gated import OutputGated
from tests.support.tiny_models import build, outputs, with_gradients

FUSED = [name for name, family in TESTED.items() if family.output_gate and family.fused]
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


def gated_layers(model: Any) -> list[Any]:
    return [m for m in model.modules() if isinstance(vars(m).get("forward"), OutputGated)]


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
