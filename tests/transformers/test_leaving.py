"""What was set on heads holds, or is refused by name, when a model leaves the operator."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import transformers

import heads_kernels as hk
from heads_kernels.integrations.transformers import use
from heads_kernels.integrations.transformers.attention import attention_forward
from heads_kernels.ops.statistics import AttentionStatistics
from tests.support.alike import assert_alike
from tests.support.refusals import assert_refused
from tests.support.tiny_models import batch, build, outputs, small, with_gradients

#: One of each kind: plain, made by name, grouped, encoder-decoders without and with a bias, a gated output, a layer
#: without a config.
FAMILIES = ("bert", "by name", "llama", "whisper", "t5", "qwen3_next", "bloom")


def made(name: str) -> Any:
    if name == "by name":
        return build("bert", "heads_kernels")
    return use(small(name) if name == "whisper" else build(name))


WAYS: dict[str, Callable[[Any], object]] = {
    "set_attn_implementation": lambda model: model.set_attn_implementation("eager"),
    "config": lambda model: setattr(model.config, "_attn_implementation", "eager"),
    "another model": lambda model: type(model)._from_config(model.config, attn_implementation="eager"),
}


def first_closed(model: Any, others: float) -> torch.Tensor:
    H = getattr(model.config, "num_attention_heads", None) or model.config.n_head
    return torch.tensor([0.0, *[others] * (H - 1)])


def kinds_of_attentions(model: Any) -> list[str]:
    found = model(**batch(model), output_attentions=True)
    rows = [each for name, rows in found.items() if "attentions" in name for each in rows]
    return [type(each).__name__ for each in rows if each is not None]


@contextmanager
def of(model: Any, setting: str) -> Iterator[Callable[[], Any]]:
    """What a model gives with this setting of its heads, in this block."""
    if setting == "close":
        layers = hk.heads.attention_layers(model)
        hk.heads.close(model, {layer.index: [0] for layer in layers})
        yield lambda: outputs(model)
    elif setting == "gate":
        hk.heads.gate(model, hk.nn.HardConcrete)
        yield lambda: with_gradients(model)
    elif setting == "attribute":
        for module in model.modules():
            if hasattr(module, "_head_mask_place"):
                module.head_gate = hk.nn.FixedGate(first_closed(model, 0.5))
        yield lambda: outputs(model)
    elif setting == "head_mask":
        yield lambda: outputs(model, head_mask=first_closed(model, 1.0))
    elif setting == "statistics":
        assert set(kinds_of_attentions(model)) == {AttentionStatistics.__name__}
        yield lambda: kinds_of_attentions(model)
    else:
        calls: list[int] = []

        def observed() -> list[int]:
            calls.clear()
            model(**batch(model))
            return calls.copy()

        with hk.analysis.observe(model, lambda layer, call: calls.append(layer.index)):
            yield observed


@pytest.mark.parametrize("setting", ["close", "gate", "attribute", "head_mask", "statistics", "observe"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_set_on_heads_holds_or_is_refused(name: str, setting: str) -> None:
    refused = r"runs? the attention function 'eager'"
    if name == "by name" and setting != "close":
        pytest.skip("needs use, or is as of a model in use")
    for leave in WAYS.values():
        model = made(name)
        with of(model, setting) as found:
            expected = found()
            leave(model)
            try:
                now = found()
            except ValueError as error:
                refusal = str(error)
            else:
                refusal = ""
            if refusal:
                assert re.search(refused, refusal)
            elif isinstance(expected, list):
                assert now == expected
            else:
                assert_alike(now, expected)


def test_sub_configs() -> None:
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        *(build(name).config for name in ("vit", "bert"))
    )
    model = use(transformers.VisionTextDualEncoderModel(config).eval())
    texts, images = batch(model.text_model), batch(model.vision_model)
    arguments = {**texts, "pixel_values": images["pixel_values"][[0, 1, 1]]}
    hk.heads.close(model, {"text_model.encoder.layer.0.attention.self": [0]})
    model.set_attn_implementation({"vision_config": "eager"})
    assert model(**arguments)
    model.set_attn_implementation({"text_config": "eager"})
    vision, layer = model.vision_model, model.text_model.encoder.layer[0]
    assert_refused(
        (lambda: vision(**images, head_mask=torch.ones(4)), "ViTModel, whose layers run the .* function 'eager'"),
        (lambda: model(**arguments), "'eager' in a BertSelfAttention, which ignores its gates"),
        (lambda: layer(torch.randn(1, 3, 32)), r"'eager' in a BertSelf.*its gates, .*; call .*use\(mod"),
    )
    assert_alike(outputs(use(model).text_model), outputs(model.text_model))


def whisper() -> Any:
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(small("whisper").config).eval()
    model.generation_config.alignment_heads = [[0, 1], [1, 3]]
    model.generation_config.no_timestamps_token_id = 30
    return model


def test_timestamps_of_whisper() -> None:
    """`generate` switches the model to eager attention, for good."""
    model = use(whisper())
    features = batch(model)["input_features"]
    hk.heads.close(model, {0: [0]})
    options = {"return_token_timestamps": True, "return_timestamps": True, "max_new_tokens": 3}
    words = "'eager' in a WhisperAttention, which ignores its gates"
    assert_refused((lambda: model.generate(features, **options), words))


def test_alignment_heads_are_renumbered() -> None:
    model = use(whisper())
    cross = [f"model.decoder.layers.{layer}.encoder_attn" for layer in range(2)]
    prune = partial(hk.heads.prune, model, {cross[0]: [0], cross[1]: [3]})
    assert_refused((prune, r"heads has head 3 of .*layers\.1\.enc.*alignment_heads"), unchanged=[model])
    hk.heads.prune(model, {cross[0]: [0, 2], cross[1]: [1]})
    assert model.generation_config.alignment_heads == [[0, 0], [1, 2]]


def test_arguments_that_no_operator_has() -> None:
    """A paged cache is that of `generate_batch`, which has no other function that keeps gates.

    `temperature` stands for code that is newer than the package.
    """
    module = build("bert").encoder.layer[0].attention.self
    query, given = torch.randn(1, 2, 3, 4), "is given to .* BertSelfAttention"
    assert_refused(
        ({"sinks": 1}, f"sinks {given} .*attn_implementation='sdpa' or 'eager'"),
        ({"indices": 1}, f"indices {given} .*attn_implementation='sdpa' or 'eager'"),
        ({"cache": 1}, f"cache {given} .*call generate, which keeps gates and head masks"),
        ({"temperature": 1}, f"temperature {given} .*and is not"),
        of=partial(attention_forward, module, query, query, query, None),
    )
