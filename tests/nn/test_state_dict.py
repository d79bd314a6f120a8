"""State dicts of `hk.nn.GatedMultiheadAttention` and of `torch.nn.MultiheadAttention`, and `from_torch`."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.nn_layers import WIDTHS, B, E, H, S, T, torch_attention


@pytest.mark.parametrize("options", WIDTHS.values(), ids=WIDTHS)
def test_state_dict_of_torch_loads(options: dict[str, Any]) -> None:
    """By itself, as a part of a model, and into a copy."""
    theirs = torch_attention(**options)
    x, key, value = (torch.randn(B, S, width) for width in (E, theirs.kdim, theirs.vdim))
    expected = theirs(x, key, value, need_weights=False)[0]
    ours = hk.nn.GatedMultiheadAttention(E, H, **options)
    for module, state in (
        (ours, theirs.state_dict()),
        (copy.deepcopy(ours), theirs.state_dict()),
        (pickle.loads(pickle.dumps(ours)), theirs.state_dict()),
    ):
        before = set(state)
        module.load_state_dict(state)
        assert set(state) == before
        assert_alike(module(x, key, value)[0], expected)
    model = nn.ModuleDict({"attention": hk.nn.GatedMultiheadAttention(E, H, **options)})
    model.load_state_dict(nn.ModuleDict({"attention": theirs}).state_dict())
    assert_alike(model["attention"](x, key, value)[0], expected)


def test_assigned_projections_share_no_storage() -> None:
    ours, theirs = hk.nn.GatedMultiheadAttention(E, H), torch_attention()
    ours.load_state_dict(theirs.state_dict(), assign=True)
    storages = {parameter.untyped_storage().data_ptr() for parameter in ours.parameters()}
    assert len(storages) == 8


def test_state_dict_that_does_not_fit() -> None:
    theirs = torch_attention().state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for k_proj.weight"):
        hk.nn.GatedMultiheadAttention(E, H, num_key_heads=2).load_state_dict(theirs)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*q_proj.bias"):
        hk.nn.GatedMultiheadAttention(E, H, bias=False).load_state_dict(theirs)
    with pytest.raises(RuntimeError, match=r"Missing key.*gate_proj.weight"):
        hk.nn.GatedMultiheadAttention(E, H, output_gate="head").load_state_dict(theirs)
    extra = torch_attention(add_bias_kv=True)
    model = nn.ModuleDict({"a": hk.nn.GatedMultiheadAttention(E, H)})
    with pytest.raises(ValueError, match=r"a\.bias_k is in the state dict"):
        model.load_state_dict(nn.ModuleDict({"a": extra}).state_dict())


def test_from_torch_keeps_what_the_module_was() -> None:
    theirs = torch_attention(dropout=0.1).double().train()
    theirs.in_proj_weight.requires_grad_(False)
    with torch.no_grad():
        ours = hk.nn.GatedMultiheadAttention.from_torch(theirs)
    assert ours.training
    assert ours.dropout == 0.1
    assert ours.q_proj.weight.dtype == torch.float64
    assert not any(part.weight.requires_grad for part in (ours.q_proj, ours.k_proj, ours.v_proj))
    assert ours.q_proj.bias.requires_grad
    assert ours.out_proj.weight.requires_grad
    ours.out_proj.weight.data.zero_()
    assert theirs.out_proj.weight.any()


def test_from_torch_keeps_the_layout_of_inputs() -> None:
    theirs = nn.MultiheadAttention(E, H).eval()
    ours = hk.nn.GatedMultiheadAttention.from_torch(theirs)
    assert not ours.batch_first
    x, y = torch.randn(T, B, E), torch.randn(S, B, E)
    for source in (x, y):
        expected = theirs(x, source, source, need_weights=False)[0]
        assert_alike(ours(x, source, source)[0], expected)
    with pytest.raises(ValueError, match=r"query has shape \[5, 24\]; pass \[T, B, 24\]"):
        ours(x[:, 0])
    with pytest.raises(ValueError, match="key has batch 3, but query has batch 2"):
        ours(x, torch.randn(S, 3, E))


@pytest.mark.parametrize(
    ("attention", "match"),
    [
        (nn.Linear(2, 2), "attention is a Linear; pass a torch.nn.MultiheadAttention"),
        (nn.MultiheadAttention(E, H, add_zero_attn=True, batch_first=True), "has add_zero_attn"),
        (nn.MultiheadAttention(E, H, add_bias_kv=True, batch_first=True), "bias_k is in the state"),
    ],
)
def test_from_torch_refuses(attention: Any, match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        hk.nn.GatedMultiheadAttention.from_torch(attention)
