"""Exported models and operators: standard ONNX operators, and the same numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.testing import CASES, Case
from tests.ops.calls import with_offsets
from tests.support.alike import assert_alike
from tests.support.refusals import assert_refused

onnx = pytest.importorskip("onnx", reason="needs the extra [onnx]")
pytest.importorskip("onnxscript", reason="needs the extra [onnx]")
runtime = pytest.importorskip("onnxruntime", reason="runs what was exported")
pytestmark = [pytest.mark.check, pytest.mark.filterwarnings("ignore")]

#: One for each part of a call; masks and score terms are the same code for both operators.
NAMES = {
    "gated_attention": (
        "gate_bht_sigmoid", "gate_broadcast_tokens", "padded_causal", "window_lower_right", "packed_causal", "offsets",
        "sinks",
    ),
    "collaborative_attention": (
        "holes", "dense_heads", "bias_hides", "softcap", "ragged_bias", "grouped_padded",
    ),
}  # fmt: skip
SMALL = [case for case in CASES if case.name in NAMES.get(case.operator, ())]


def run(path: Path, inputs: dict[str, Tensor]) -> Tensor:
    """The first output of a file in ONNX Runtime; only standard operators are in it."""
    model = onnx.load(path)
    onnx.checker.check_model(model)
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
    session = runtime.InferenceSession(path)
    names = {each.name for each in session.get_inputs()}
    given = {name: each.numpy() for name, each in inputs.items() if name in names}
    return torch.from_numpy(session.run(None, given)[0])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gated = hk.nn.GatedMultiheadAttention(16, 4, num_key_heads=2, output_gate="head")
        self.shared = hk.nn.CollaborativeMultiheadAttention(16, 4, 12)
        hk.heads.gate(self, lambda H: hk.nn.FixedGate(torch.tensor([1.0, 0.0, 0.5, -1.0])))

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        x = x + self.gated(x, key_padding_mask=hidden)[0]
        return x + self.shared(x, is_causal=True)[0]


def test_a_model_of_any_size(tmp_path: Path) -> None:
    model = Model().eval()
    B, T = torch.export.Dim("B"), torch.export.Dim("T")
    sizes = {"x": {0: B, 1: T}, "hidden": {0: B, 1: T}}
    example = torch.randn(2, 7, 16), torch.zeros(2, 7, dtype=torch.bool)
    program = torch.export.export(model, example, dynamic_shapes=sizes)
    hk.integrations.onnx.export(program, tmp_path / "model.onnx", verbose=False)
    for b, t in ((2, 7), (3, 11)):
        x, hidden = torch.randn(b, t, 16), torch.zeros(b, t, dtype=torch.bool)
        hidden[0, 5:] = True
        found = run(tmp_path / "model.onnx", {"x": x, "hidden": hidden})
        assert_alike(found, model(x, hidden).detach())


class Call(nn.Module):
    """A call of an operator; what is not a floating tensor is constant."""

    def __init__(self, operator: Any, constants: dict[str, Any]) -> None:
        super().__init__()
        self.operator, self.constants = operator, constants

    def forward(self, tensors: dict[str, Tensor]) -> Tensor:
        return self.operator(**with_offsets(tensors | self.constants))


def exported(call: Call, tensors: dict[str, Tensor], path: Path) -> Tensor:
    """What ONNX Runtime makes of the call."""
    with torch.no_grad():
        program = torch.export.export(call, (tensors,))
    hk.integrations.onnx.export(program, path, verbose=False)
    return run(path, {f"tensors_{name}": tensor for name, tensor in tensors.items()})


@pytest.mark.parametrize("case", SMALL)
def test_operators(case: Case, tmp_path: Path) -> None:
    inputs = case.make(torch.float32)
    call = Call(getattr(hk, case.operator), inputs.options)
    found = exported(call, inputs.tensors, tmp_path / "call.onnx")
    assert_alike(found, inputs.call("eager"))


@pytest.mark.parametrize("case", [case for case in SMALL if case.name in ("padded_causal", "grouped_padded")], ids=str)
def test_statistics(case: Case, tmp_path: Path) -> None:
    inputs = case.make(torch.float32)
    left_out = "value", "gate", "gate_activation", "closed_grad", "dropout_p"
    tensors = {name: t for name, t in inputs.tensors.items() if name not in left_out}
    options = {name: option for name, option in inputs.options.items() if name not in left_out}
    call = Call(hk.attention_statistics, options)
    assert_alike(exported(call, tensors, tmp_path / "call.onnx"), call(tensors)[0].detach())

    def received(**arguments: Any) -> Tensor:
        return hk.attention_statistics(**arguments, received=True).received

    call = Call(received, options)
    assert_alike(exported(call, tensors, tmp_path / "received.onnx"), call(tensors).detach())


def test_refusals() -> None:
    operands = dict.fromkeys(("query", "key", "value"), torch.randn(1, 2, 4, 8))
    assert_refused(
        ((hk.entmax_attention, {"alpha": 1.5}), "program calls entmax_attention"),
        ((hk.gated_attention, {"dropout_p": 0.5}), "gated_attention has dropout; export .* in eval"),
        of=lambda *call: hk.integrations.onnx.export(torch.export.export(Call(*call), (operands,))),
    )
