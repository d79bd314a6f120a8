"""The table of attention layers: every family of it is found, its heads lie where the table says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import heads_kernels as hk
from heads_kernels.heads.families import FAMILIES, family_of
from heads_kernels.heads.layers import find_layers
from tests.attention_models import GROUPED, MODELS, PLAIN, make, output_of

OWN = {"GatedMultiheadAttention", "CollaborativeMultiheadAttention"}
#: Model classes with an encoder, and a decoder that crosses over to it.
SEQUENCE_TO_SEQUENCE = {"T5Attention", "MT5Attention"} | {
    name for name, (_, arguments) in MODELS.items() if "encoder_layers" in arguments
}


def test_every_class_of_the_table_has_a_model() -> None:
    assert set(FAMILIES) == OWN | set(MODELS)


@pytest.mark.parametrize("attention", MODELS)
def test_layers_of_every_family(attention: str) -> None:
    model = make(attention)
    layers = hk.heads.attention_layers(model)
    assert [layer.index for layer in layers] == list(range(len(layers)))
    arguments = MODELS[attention][1]
    heads = next(arguments[n] for n in ("num_attention_heads", "num_heads", "n_heads", "n_head",
                                        "encoder_attention_heads") if n in arguments)  # fmt: skip
    key_heads = arguments.get("num_key_value_heads", heads)
    if attention in SEQUENCE_TO_SEQUENCE:
        assert [layer.kind for layer in layers] == ["encoder"] * 2 + ["decoder", "cross"] * 2
    else:
        assert len({layer.kind for layer in layers}) == 1
    for layer in layers:
        assert model.get_submodule(layer.name) is layer.module
        assert (layer.num_heads, layer.num_key_heads) == (heads, key_heads)
        assert layer.head_dim == layer.value_dim == (4 if heads == 8 else 8)
        width = layer.query.width
        gates_in_query = attention.startswith(("Qwen3Next", "Qwen3_5"))
        assert width == layer.head_dim * (2 if gates_in_query else 1)


@pytest.mark.parametrize("attention", MODELS)
def test_heads_lie_where_the_projections_are_read(attention: str) -> None:
    """A head whose value is 0 (its rows of W_V and b_V) leaves its input features of W_O at 0, and no others."""
    model = make(attention)
    layer = hk.heads.attention_layers(model)[-1]
    seen = {}
    layer.output.linear.register_forward_pre_hook(lambda _, inputs: seen.update(heads=inputs[0]))
    features = layer.value.features([1])
    with torch.no_grad():
        by_feature = (
            layer.value.linear.weight.T
            if type(layer.value.linear).__name__ == "Conv1D"
            else layer.value.linear.weight
        )
        by_feature[features] = 0.0
        if layer.value.linear.bias is not None:
            layer.value.linear.bias[features] = 0.0

    output_of(model)
    by_head = seen["heads"].reshape(-1, layer.num_heads, layer.value_dim)
    group = layer.num_heads // layer.num_key_heads
    zero = (by_head == 0).all(dim=(0, 2)).nonzero().flatten().tolist()
    assert zero == list(range(group, 2 * group))


def test_kinds_of_a_bert_decoder() -> None:
    import transformers

    config = transformers.BertConfig(**PLAIN, is_decoder=True, add_cross_attention=True)
    layers = hk.heads.attention_layers(transformers.BertLMHeadModel(config))
    assert [layer.kind for layer in layers] == ["decoder", "cross"] * 2
    assert layers[1].name == "bert.encoder.layer.0.crossattention.self"


def test_fused_projection_of_gpt2_and_its_cross_attention() -> None:
    model = make("GPT2Attention", add_cross_attention=True)
    own, cross = hk.heads.attention_layers(model)[:2]
    assert (own.kind, cross.kind) == ("decoder", "cross")
    assert own.query.linear is own.key.linear is own.value.linear
    assert (own.query.start, own.key.start, own.value.start) == (0, 32, 64)
    assert own.value.features([3, 0]).tolist() == [*range(88, 96), *range(64, 72)]
    assert cross.query.linear is not cross.key.linear
    assert (cross.query.start, cross.key.start, cross.value.start) == (0, 0, 32)


def test_a_shared_module_counts_once() -> None:
    model = make("AlbertAttention")
    assert model.config.num_hidden_layers == 2
    assert len(hk.heads.attention_layers(model)) == 1


def test_projections_beside_the_four() -> None:
    for attention, widths in (("AfmoeAttention", [4]), ("Step3p7Attention", [1])):
        (beside,) = hk.heads.attention_layers(make(attention))[0].beside
        assert [beside.width] == widths
        assert beside.heads == GROUPED["num_attention_heads"]


# ---------------------------------------------------------------------- the package's own modules
def test_layers_of_the_packages_own_modules() -> None:
    model = nn.ModuleDict(
        {
            "encoder": hk.nn.GatedMultiheadAttention(32, 4, num_key_heads=2, value_dim=3),
            "decoder": nn.ModuleDict(
                {
                    "self_attn": hk.nn.CollaborativeMultiheadAttention(32, 4, 12),
                    "multihead_attn": hk.nn.GatedMultiheadAttention(32, 4, output_gate="head"),
                }
            ),
        }
    )
    gated, collaborative, cross = hk.heads.attention_layers(model)
    assert [layer.kind for layer in (gated, collaborative, cross)] == [
        "encoder",
        "decoder",
        "cross",
    ]
    assert (gated.num_heads, gated.num_key_heads, gated.head_dim, gated.value_dim) == (4, 2, 8, 3)
    assert (collaborative.num_heads, collaborative.head_dim, collaborative.value_dim) == (4, 12, 8)
    assert collaborative.query.heads == collaborative.key.heads == 1
    assert [beside.linear for beside in collaborative.beside] == [collaborative.module.content_proj]
    assert [beside.width for beside in cross.beside] == [1]


# ---------------------------------------------------------------------- models that the table doesn't know
def test_subclasses_are_served() -> None:
    class Special(hk.nn.GatedMultiheadAttention):
        pass

    assert [layer.num_heads for layer in hk.heads.attention_layers(Special(16, 4))] == [4]


def test_a_model_without_attention_of_the_table_is_refused() -> None:
    class OddAttention(nn.Module):
        pass

    with pytest.raises(
        ValueError, match=r"OddAttention; known are .*BertAttention.*LlamaAttention"
    ):
        hk.heads.attention_layers(nn.Sequential(OddAttention()))
    with pytest.raises(ValueError, match="no attention at all"):
        hk.heads.attention_layers(nn.Linear(2, 2))
    assert find_layers(nn.Linear(2, 2)) == []


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    class HouseAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.width = 4
            for name in ("q", "k", "v", "out"):
                setattr(self, name, nn.Linear(8, 8))

    monkeypatch.setattr("heads_kernels.heads.families.FAMILIES", dict(FAMILIES))
    assert family_of(HouseAttention()) is None
    hk.heads.register(
        "HouseAttention", hk.heads.Family("house", "q", "k", "v", "out", head_dim="width")
    )
    (layer,) = hk.heads.attention_layers(nn.Sequential(HouseAttention()))
    assert (layer.name, layer.num_heads, layer.family.name) == ("0", 2, "house")
