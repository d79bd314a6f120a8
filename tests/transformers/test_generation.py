"""Decoding with every kind of cache gives the logits of stock, or of the same model without a cache."""

import copy
from typing import Any

import pytest
import torch
import transformers

import heads_kernels as hk
from heads_kernels.integrations.transformers import use
from tests.convert.converted_models import changed, convert
from tests.support.alike import assert_alike
from tests.support.refusals import assert_refused
from tests.support.tiny_models import batch, build, packed_layers, padding

#: Families that generate: what makes them, and the side of the padding of their prompts.
TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "bart": ({"model": "BartForConditionalGeneration"}, "right"),
    "bert": ({"model": "BertLMHeadModel", "is_decoder": True}, "left"),
    "gpt2": ({}, "left"),
    "llama": ({}, "left"),
    "t5": ({"model": "T5ForConditionalGeneration"}, "right"),
    "afmoe": ({}, "left"),  # a gated output
    "gemma2": ({}, "left"),  # a cap and windows
    "gpt_oss": ({}, "left"),  # sinks
    "bloom": ({}, "left"),
    "mpt": ({}, "left"),
    "umt5": ({"model": "UMT5ForConditionalGeneration"}, "right"),
    "longt5": ({"model": "LongT5ForConditionalGeneration"}, "right"),
}
#: `make test` runs two of them.
CHANGED = [
    pytest.param(name, change, marks=() if change == quick.get(name) else pytest.mark.check)
    for quick in [{"gpt2": "both", "t5": "pruned"}]
    for name in ("bart", "bert", "gpt2", "llama", "t5")
    for change in ("pruned", "converted", "both")
]
WAYS: dict[str, dict[str, Any]] = {
    "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 2},
}


def made(name: str) -> Any:
    return build(name, **TASKS[name][0])


def generated(model: Any, side: str, **options: Any) -> dict[str, Any]:
    """Tokens beyond the windows of 4, and their logits."""
    found = model.generate(
        torch.randint(3, 40, (3, 9), generator=torch.Generator().manual_seed(4)),
        attention_mask=padding(side),
        max_new_tokens=5,
        min_new_tokens=5,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return {"sequences": found.sequences, "logits": found.logits}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TASKS)
def test_generation_equals_stock(name: str, way: str) -> None:
    side = TASKS[name][1]
    model = made(name)
    expected = generated(model, side, **WAYS[way])
    for unpad in (False, True):
        found = generated(use(model, unpad=unpad), side, **WAYS[way])
        assert_alike(found, expected)
    assert any(packed_layers(model)) == (name not in ("bloom", "longt5", "mpt"))


@pytest.mark.parametrize(("name", "change"), CHANGED)
def test_generation_of_changed_models(name: str, change: str) -> None:
    """Unevenly pruned groups, a layer without heads, shared keys."""
    side = TASKS[name][1]
    model = use(made(name))
    layers = hk.heads.attention_layers(model)
    gone = {layer.index: [1, 2, layer.num_heads - 1] for layer in layers} | {0: range(layers[0].num_heads)}
    changed(model, change, gone, "cp")
    for way in WAYS.values():
        options = {"num_beams": way.get("num_beams", 1), "use_cache": False}
        expected = generated(use(model), side, **options)
        for unpad in (False, True):
            assert_alike(generated(use(model, unpad=unpad), side, **way), expected)


@pytest.mark.parametrize("kind", ["decoder", "cross"])
def test_generation_of_a_decoder_converted_in_part(kind: str) -> None:
    """Self-attention and encoder-decoder attention of a layer have caches of their own."""
    model = use(made("bart"))
    layers = [layer.index for layer in hk.heads.attention_layers(model) if layer.kind == kind]
    hk.convert.collaborate(model, 12, layers=layers, progress=False)
    expected = generated(model, "right", use_cache=False)
    for way in ("dynamic", "static"):
        assert_alike(generated(model, "right", **WAYS[way]), expected)


def test_stock_attention_generates_with_pruned_models() -> None:
    model = made("llama")
    hk.heads.prune(model, {0: [0], 1: [1, 2, 3, 7]})
    expected = generated(model, "left", use_cache=False)
    assert_alike(generated(model, "left"), expected)


# ---------------------------------------------------------------------- caches
@pytest.mark.parametrize("in_use", [False, True])
@pytest.mark.parametrize("cache", ["static", "sliding_window"])
def test_cache_made_for_all_heads_is_refused_by_a_pruned_model(cache: str, in_use: bool) -> None:
    """`prefill_chunk_size` makes a static cache by the config, before there are keys."""
    model = use(build("llama")) if in_use else build("llama")
    arguments = {
        "input_ids": torch.randint(3, 40, (2, 9)), "do_sample": False, "max_new_tokens": 3,
        "cache_implementation": cache, "pad_token_id": 0,
    }  # fmt: skip
    chunks = model.generate(**arguments, prefill_chunk_size=4)
    assert torch.equal(chunks, model.generate(**arguments))
    filled = transformers.DynamicCache(config=model.config)
    model(input_ids=arguments["input_ids"], past_key_values=filled)
    hk.heads.prune(model, {0: [0, 1, 2, 3]})
    refusal = r"has keys of 2 heads for layer 0, of which pruning left 1; .*prefill_chunk_size"
    assert_refused(
        (lambda: model.generate(**arguments, prefill_chunk_size=4), refusal),
        (lambda: model(input_ids=arguments["input_ids"], past_key_values=filled), refusal),
    )
    expected = model.generate(**arguments | {"cache_implementation": "dynamic"})
    assert torch.equal(model.generate(**arguments), expected)


def test_cache_of_separate_keys_is_refused_by_a_converted_model() -> None:
    model = use(build("gpt2"))
    ids = torch.randint(3, 40, (2, 6))
    past = model(ids).past_key_values
    convert(model, 12)
    words = r"cache has keys of 4 heads in layer 0; .*an empty"
    assert_refused((lambda: model(ids[:, :1], past_key_values=past), words))


@pytest.mark.parametrize("unpad", [False, True])
def test_cache_is_continued(unpad: bool) -> None:
    model = build("llama")
    ids, real = batch(model)["input_ids"], padding("left")
    rows = []
    for each in (model, use(copy.deepcopy(model), unpad=unpad)):
        past = each(ids[:, :6], attention_mask=real[:, :6]).past_key_values
        assert type(past) is transformers.DynamicCache
        rows.append(each(ids[:, 6:], attention_mask=real, past_key_values=past).logits)
    assert_alike(rows[1], rows[0])


def test_prompt_in_chunks_without_padding() -> None:
    """Layers with windows are packed; the others read a static cache, by a tensor of pairs."""
    model = made("gemma2")
    way = {"cache_implementation": "static", "prefill_chunk_size": 6}
    expected = generated(model, "left", **way)
    assert_alike(generated(use(model, unpad=True), "left", **way), expected)
    assert packed_layers(model) == [True, False]


# ---------------------------------------------------------------------- compiled decoding
@pytest.mark.check
@pytest.mark.parametrize(
    ("name", "change", "unpad", "backend"),
    [
        ("gpt2", "", True, "aot_eager"),
        ("gpt2", "both", False, "aot_eager"),
        ("gpt2", "converted", False, "inductor"),
        ("bart", "converted", True, "aot_eager"),
        ("t5", "pruned", False, "aot_eager"),
    ],
)
def test_compiled_decoding(name: str, change: str, unpad: bool, backend: str) -> None:
    """With a static cache a step is one graph, compiled once for all tokens and calls; the prompt runs packed."""
    side = TASKS[name][1]
    model = changed(use(made(name)), change, {0: [1, 3]})
    expected = generated(model, side)
    counters = torch._dynamo.utils.counters
    counters.clear()
    compile_config = transformers.CompileConfig(backend=backend, fullgraph=True, mode=None)
    compile_config._compile_all_devices = True  # not on GPUs alone
    use(model, unpad=unpad)
    for _ in range(2):
        found = generated(model, side, cache_implementation="static", compile_config=compile_config)
        assert_alike(found, expected)
    assert counters["stats"]["unique_graphs"] == 1
    assert any(packed_layers(model)) == unpad
