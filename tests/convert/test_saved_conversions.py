"""Converted transformers models, saved and loaded: save_pretrained, hk.heads.save, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import heads_kernels as hk
from heads_kernels.heads import attention_layers
from tests.convert.converted_models import (
    CONVERTIBLE,
    convert,
    in_use,
)
from tests.support.alike import assert_alike
from tests.support.tiny_models import (
    assert_same,
    assert_same_states,
    build,
    outputs,
    transformers,
)

load = hk.integrations.transformers.from_pretrained


def converted(name: str, *, prunes: bool = False, **changes: Any) -> Any:
    model = convert(in_use(name, **changes), 13)
    if prunes:
        gone = {layer.index: [layer.index % 4, 2] for layer in attention_layers(model)}
        hk.heads.prune(model, {**gone, 0: range(4)})
    return model


@pytest.mark.parametrize("prunes", [False, True])
@pytest.mark.parametrize("name", CONVERTIBLE)
def test_save_pretrained(name: str, prunes: bool, tmp_path: Path) -> None:
    model = converted(name, prunes=prunes)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, type(model))
    assert type(loaded) is type(model)
    assert loaded.config._attn_implementation == "heads_kernels"
    assert_same(loaded, model)
    for old, new in zip(*map(attention_layers, (model, loaded)), strict=True):
        assert (old.name, old.num_heads, old.head_dim) == (new.name, new.num_heads, new.head_dim)
        assert new.module.ragged
        assert getattr(new.module, "heads_before", 4) == 4
        assert (old.layout, old.beside[0].heads) == (new.layout, new.beside[0].heads)


def test_the_record_is_in_the_config(tmp_path: Path) -> None:
    model = in_use("bert", model="BertForSequenceClassification")
    other = transformers.BertModel(model.config)
    convert(model, 13)
    names = [f"encoder.layer.{n}.attention.self" for n in range(2)]
    shapes = {name: {"dim": 13, "ragged": True} for name in names}
    assert model.config.heads_kernels == {"converted": shapes}
    assert not hasattr(other.config, "heads_kernels")
    hk.heads.prune(model, {1: [0]})
    left = {"heads": [1, 2, 3], "key_heads": 1, "head_dim": 13, "value_dim": 8}
    assert model.config.heads_kernels == {"pruned": {names[1]: left}, "converted": shapes}
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert written["heads_kernels"] == model.config.heads_kernels


def test_pruned_first(tmp_path: Path) -> None:
    model = in_use("gpt2")
    hk.heads.prune(model, {0: [0, 2]})
    hk.heads.prune(model, {0: [1], 1: [3]})
    convert(model, 11)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, type(model))
    assert_same(loaded, model)
    assert [layer.module.kept_heads.tolist() for layer in attention_layers(loaded)] == [
        [1],
        [0, 1, 2],
    ]


def test_with_and_without_a_task_head(tmp_path: Path) -> None:
    model = converted("distilbert", model="DistilBertForSequenceClassification")
    model.save_pretrained(tmp_path)
    classify = load(tmp_path, transformers.AutoModelForSequenceClassification)
    assert type(classify) is type(model)
    assert_same(classify, model)
    base = load(tmp_path)
    assert type(base) is type(build("distilbert"))
    assert_same_states(base, model.base_model)


def test_shards_and_dtypes(tmp_path: Path) -> None:
    model = converted("t5", prunes=True)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load(tmp_path, type(model), dtype=torch.bfloat16)
    assert_same_states(loaded, model.bfloat16())


def test_a_loaded_model_trains_and_generates(tmp_path: Path) -> None:
    model = converted("bart", model="BartForConditionalGeneration")
    model.save_pretrained(tmp_path)
    loaded = hk.integrations.transformers.use(load(tmp_path, type(model)))
    ids = torch.randint(3, 40, (2, 6))
    arguments = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(ids, **arguments), loaded.generate(ids, **arguments))
    outputs(loaded.train()).sum().backward()
    assert all(layer.module.mixing.grad is not None for layer in attention_layers(loaded))
    hk.heads.close(loaded, {0: [1]})
    outputs(loaded)


def test_composite_models(tmp_path: Path) -> None:
    parts = [build("bert", model="BertLMHeadModel", **d).config for d in ({}, {"is_decoder": True})]
    parts[1].add_cross_attention = True
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    model = hk.integrations.transformers.use(transformers.EncoderDecoderModel(config).eval())
    convert(model, 13)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, transformers.EncoderDecoderModel)
    assert_same_states(loaded, model)
    assert loaded.decoder.config._attn_implementation == "heads_kernels"
    ids = torch.randint(3, 40, (2, 6))
    with torch.no_grad():
        found, expected = (
            each(input_ids=ids, decoder_input_ids=ids).logits for each in (loaded, model)
        )
    assert_alike(found, expected)


def test_stock_attention_is_refused(tmp_path: Path) -> None:
    converted("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="attn_implementation is 'sdpa' in a BertSelfAttention"):
        load(tmp_path, attn_implementation="sdpa")


# ---------------------------------------------------------------------- hk.heads.save, load
@pytest.mark.parametrize("prunes", [False, True])
@pytest.mark.parametrize("name", ["albert", "bart", "bert", "gpt2", "t5"])
def test_save_and_load(name: str, prunes: bool, tmp_path: Path) -> None:
    model = converted(name, prunes=prunes)
    path = tmp_path / "model.safetensors"
    hk.heads.save(model, path)
    loaded = in_use(name)
    hk.heads.load(loaded, path)
    assert_same(loaded, model)
    assert loaded.config.heads_kernels == model.config.heads_kernels
    hk.heads.load(convert(in_use(name), 13), path)


def test_with_learned_gates(tmp_path: Path) -> None:
    model = converted("bert", prunes=True)
    hk.heads.gate(model, hk.nn.HardConcrete, layers=[1])
    path = tmp_path / "model.safetensors"
    hk.heads.save(model, path)
    loaded = in_use("bert")
    with pytest.raises(ValueError, match=r"which has .*head_gate"):
        hk.heads.load(loaded, path)
    assert not attention_layers(loaded)[0].layout.shared
    hk.heads.gate(loaded, hk.nn.HardConcrete, layers=[1])
    hk.heads.load(loaded, path)
    assert_same(loaded, model)


def test_a_model_that_is_not_in_use_is_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    hk.heads.save(converted("bert"), path)
    model = build("bert", "sdpa")
    before = outputs(model)
    with pytest.raises(ValueError, match="attn_implementation is 'sdpa'"):
        hk.heads.load(model, path)
    assert_alike(outputs(model), before)
