"""Factors put into the package's own attention modules, wherever a model holds them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.heads import projected_layers
from heads_kernels.nn import CollaborativeMultiheadAttention, GatedMultiheadAttention
from tests.convert.converted_models import convert
from tests.support.alike import assert_alike
from tests.support.nn_layers import PADDED, E, Gates, H, backward, layer_of, spread
from tests.support.refusals import assert_refused


class Model(nn.Module):
    """A decoder layer: causal self-attention, and cross-attention to a memory of another width."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        sizes = {"embed_dim": E, "num_heads": H, "dtype": torch.float64, **options}
        self.self_attn = spread(GatedMultiheadAttention(**sizes))
        self.cross_attn = spread(GatedMultiheadAttention(**sizes, kdim=10, vdim=12))

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        x = x + self.self_attn(x, key_padding_mask=PADDED, is_causal=True)[0]
        out: Tensor = self.cross_attn(x, y, z, mask=hk.Mask(query_mask=~PADDED))[0]
        return out


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 7, E), (2, 5, 10), (2, 5, 12))
    x, y, z = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, y, z


OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "widths": {"head_dim": 5, "value_dim": 7, "scale": 0.7},
    "grouped": {"num_key_heads": 2},
    "output gate by head": {"output_gate": "head"},
    "output gate by element": {"output_gate": "element"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_with_all_features_nothing_changes(options: dict[str, Any]) -> None:
    """Mixed by all heads."""
    model = Model(**options)
    kept = {n: p for n, p in model.named_parameters() if "q_proj" not in n and "k_proj" not in n}
    expected = backward(model, model(*inputs()))
    convert(model, method="dense")
    assert isinstance(model.self_attn, CollaborativeMultiheadAttention)
    found = backward(model, model(*inputs()))
    assert_alike(found["outputs"], expected["outputs"])
    for name, parameter in kept.items():
        assert model.get_parameter(name) is parameter
        assert_alike(found[name], expected[name])


def test_what_the_module_was_it_stays() -> None:
    model = nn.Sequential(layer_of(scale=0.3, dropout=0.1, output_gate="head", batch_first=False, dtype=torch.float32))
    old = model.train()[0]
    old.head_gate = gate = Gates([1.0, 0.0, 0.5, 1.0])
    old.q_proj.requires_grad_(False)
    old.context = context = lambda operator, *arguments, **options: operator(*arguments, **options)
    old.register_buffer("steps", torch.ones(3))
    old.register_buffer("seen", torch.ones(2), persistent=False)
    old.register_parameter("bound", nn.Parameter(torch.ones(2)))
    old.forward = old.forward
    replaced = (lambda: hk.convert.collaborate(model, 10, progress=False), "has a replaced forward")
    assert_refused(replaced, unchanged=[model])
    del old.forward
    convert(model, 10)
    new = model[0]
    assert {"steps"} == new.state_dict().keys() - {name for name, _ in new.named_parameters()}
    assert new.seen is old.seen
    assert new.context is context
    assert (new.steps, new.bound) == (old.steps, old.bound)
    assert (new.scale, new.dropout, new.output_gate, new.training) == (0.3, 0.1, "head", True)
    assert (new.batch_first, new.ragged) == (False, True)
    assert new.head_gate is gate
    assert new.gate_proj is old.gate_proj
    asked = {n: p.requires_grad for n, p in new.named_parameters() if "_proj.b" not in n}
    assert [n for n in asked if not asked[n]] == ["mixing", "q_proj.weight"]
    assert {p.dtype for p in new.parameters()} == {torch.float32}
    assert new.mixing.shape == (4, 10)


def test_a_module_of_several_names_is_replaced_under_each() -> None:
    shared = layer_of()
    model = nn.ModuleDict({"first": nn.Sequential(shared), "second": shared})
    assert len(projected_layers(model)) == 1
    convert(model)
    assert model["first"][0] is model["second"]
    assert isinstance(model["second"], CollaborativeMultiheadAttention)


@pytest.mark.parametrize("left", [1, 2])
def test_pruned_then_converted_and_converted_then_pruned(left: int) -> None:
    whole = Model(num_key_heads=2)
    gone = {0: [1, 3][:left], 1: [0]}
    found = []
    for steps in ((hk.heads.prune, convert), (convert, hk.heads.prune)):
        model = Model(num_key_heads=2)
        model.load_state_dict(whole.state_dict())
        for step in steps:
            step(model, gone) if step is hk.heads.prune else step(model)
        found.append(model(*inputs()))
        kept = [head for head in range(H) if head not in gone[0]]
        assert model.self_attn.kept_heads.tolist() == kept
        assert model.self_attn.heads_before == H
    assert_alike(*found)


def test_save_and_load(tmp_path: Path) -> None:
    """Into a model that is whole, one that is converted already and not pruned, and not into one of other features."""
    path = tmp_path / "model.safetensors"
    saved, loaded, again, other = (Model(num_key_heads=2) for _ in range(4))
    hk.heads.prune(convert(saved, 11), {0: [2], 1: range(H)})
    hk.heads.save(saved, path)
    for each in (loaded, convert(again, 11)):
        hk.heads.load(each, path)
        assert each.state_dict().keys() == saved.state_dict().keys()
        assert_alike(each(*inputs()), saved(*inputs()))
        assert each.self_attn.ragged
        assert each.self_attn.kept_heads.tolist() == [0, 1, 3]
    convert(other, 10)
    words = r"'head_dim': 11, .*; the model has .*'head_dim': 10"
    assert_refused((lambda: hk.heads.load(other, path), words), unchanged=[other])
