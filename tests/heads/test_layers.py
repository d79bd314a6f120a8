"""The table of attention layers: every family of it is found, its heads are where the table says."""

from __future__ import annotations

import pytest
from torch import nn

import heads_kernels as hk
from heads_kernels.heads.layers import find_layers
from heads_kernels.heads.layouts import LAYOUTS
from tests.support.tiny_models import TINY, WITH_HEADS, build

OWN = {"GatedMultiheadAttention", "CollaborativeMultiheadAttention"}


def test_every_class_of_the_table_has_a_model() -> None:
    assert set(LAYOUTS) <= OWN | {TINY[name].attention for name in WITH_HEADS}


def test_kinds_of_a_bert_decoder() -> None:
    model = build("bert", model="BertLMHeadModel", is_decoder=True, add_cross_attention=True)
    layers = hk.heads.attention_layers(model)
    assert [layer.kind for layer in layers] == ["decoder", "cross"] * 2
    assert layers[1].name == "bert.encoder.layer.0.crossattention.self"


def test_fused_projection_of_gpt2_and_its_cross_attention() -> None:
    model = build("gpt2", add_cross_attention=True)
    own, cross = hk.heads.projected_layers(model)[:2]
    assert (own.kind, cross.kind) == ("decoder", "cross")
    assert own.query.linear is own.key.linear is own.value.linear
    assert (own.query.start, own.key.start, own.value.start) == (0, 32, 64)
    assert own.value.features([3, 0]).tolist() == [*range(88, 96), *range(64, 72)]
    assert cross.query.linear is not cross.key.linear
    assert (cross.query.start, cross.key.start, cross.value.start) == (0, 0, 32)


def test_projections_beside_the_four() -> None:
    for name, width in (("afmoe", 4), ("step3p7_text", 1)):
        (beside,) = hk.heads.projected_layers(build(name))[0].beside
        assert (beside.heads, beside.width) == (8, width)


def test_layers_of_the_packages_own_modules() -> None:
    decoder = {
        "self_attn": hk.nn.CollaborativeMultiheadAttention(32, 4, 12),
        "multihead_attn": hk.nn.GatedMultiheadAttention(32, 4, output_gate="head"),
    }
    encoder = hk.nn.GatedMultiheadAttention(32, 4, num_key_heads=2, value_dim=3)
    model = nn.ModuleDict({"encoder": encoder, "decoder": nn.ModuleDict(decoder)})
    gated, collaborative, cross = layers = hk.heads.projected_layers(model)
    assert [layer.kind for layer in layers] == ["encoder", "decoder", "cross"]
    assert (gated.num_heads, gated.num_key_heads, gated.head_dim, gated.value_dim) == (4, 2, 8, 3)
    assert (collaborative.num_heads, collaborative.head_dim, collaborative.value_dim) == (4, 12, 8)
    assert collaborative.query.heads == collaborative.key.heads == 1
    assert [beside.linear for beside in collaborative.beside] == [collaborative.module.content_proj]
    assert [beside.width for beside in cross.beside] == [1]


def test_a_model_without_attention_of_the_table_is_refused() -> None:
    class OddAttention(nn.Module):
        pass

    message = r"but OddAttention; known are those of hk.nn, .*register_layout adds"
    with pytest.raises(ValueError, match=message):
        hk.heads.attention_layers(nn.Sequential(OddAttention()))
    with pytest.raises(ValueError, match=r"no attention layer that is known, but others; known"):
        hk.heads.attention_layers(nn.Linear(2, 2))
    assert find_layers(nn.Linear(2, 2)) == []


def test_another_class_of_a_known_name_is_refused() -> None:
    class BartAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(8, 8)

    message = r"module '0' is a BartAttention without 'k_proj' of the layout 'q_proj'; register"
    with pytest.raises(ValueError, match=message):
        hk.heads.attention_layers(nn.Sequential(BartAttention()))


def test_projections_that_hide_their_sizes_are_refused() -> None:
    model = build("bert")
    model.encoder.layer[1].attention.output.dense = nn.Sequential(nn.Linear(32, 32))
    message = r"module 'encoder.layer.1.attention' is projected by a Sequential at 'output.dense'"
    with pytest.raises(ValueError, match=message):
        hk.heads.projected_layers(model)
