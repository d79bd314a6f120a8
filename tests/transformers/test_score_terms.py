"""Biases, caps and sinks of transformers models on the operators: caches, float masks, pruned heads, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.alike import assert_alike

pytest.importorskip("transformers", reason="needs the extra [transformers]")

import transformers

import heads_kernels as hk
from heads_kernels.heads.configs import NAME
from heads_kernels.integrations.transformers import attention, release, use
from heads_kernels.integrations.transformers.relative_bias import RelativeBias
from tests.support.tiny_models import build, outputs, randomised, with_gradients

T5_LIKE = ("t5", "mt5", "umt5", "longt5", "switch_transformers")
#: Families that compute attention themselves.
THEMSELVES = ("bloom", "data2vec-vision", "layoutlmv3", "mpnet", "mpt", "swinv2")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every call of `gated_attention`."""
    seen = []
    operator = attention.gated_attention

    def spy(**named: Any) -> Tensor:
        seen.append(named)
        return operator(**named)

    monkeypatch.setattr(attention, "gated_attention", spy)
    return seen


# ---------------------------------------------------------------------- relative positions of T5
@pytest.mark.parametrize("far", [20, 128])
@pytest.mark.parametrize("name", T5_LIKE)
def test_offsets_are_the_stock_bias(name: str, far: int) -> None:
    """Of encoder and decoder, beyond `max_distance`, and of rows that follow a cache."""
    model = build(name, relative_attention_max_distance=far)
    decoder = model.decoder.block[0].layer[0].SelfAttention
    encoder = getattr(model.encoder.block[0].layer[0], "SelfAttention", decoder)
    for module in (encoder, decoder):
        for T, S, start in ((70, 70, 0), (300, 200, 0), (3, 200, 197), (1, 9, 8)):
            expected = module.compute_bias(T, S, past_seen_tokens=start)
            use(model)
            bias = module.compute_bias(T, S, past_seen_tokens=start)
            assert isinstance(bias, RelativeBias)
            offsets = bias.offsets(None, (T, S), expected.device)
            assert offsets is not None
            assert torch.equal(offsets.to_dense(T, S), expected[0])
            release(model)


def test_offsets_are_worked_out_once_for_a_pass_without_gradients() -> None:
    """For the sizes of the call; with gradients every layer has to look them up again."""
    module: Any = use(build("t5")).decoder.block[0].layer[0].SelfAttention
    bias = module.compute_bias(1, 9, past_seen_tokens=8)
    cpu = torch.device("cpu")
    with torch.no_grad():
        first = bias.offsets(None, (1, 9), cpu)
        assert bias.offsets(None, (1, 9), cpu) is first
        assert first.table(1, 9) is first.values
        assert torch.equal(bias.offsets(torch.tensor([1]), (1, 9), cpu).values, first.values[1:2])
        assert bias.offsets(None, (1, 10), cpu).values.shape[1] == 10
    found = bias.offsets(None, (1, 10), cpu)
    assert found.values.requires_grad
    assert bias.offsets(None, (1, 10), cpu) is not found
    with torch.no_grad():
        assert not bias.offsets(None, (1, 10), cpu).values.requires_grad


@pytest.mark.parametrize("name", T5_LIKE)
def test_no_bias_of_relative_positions_is_dense(name: str, calls: list[dict[str, Any]]) -> None:
    """UMT5 alone makes the zeros of cross-attention. Padding is a mask."""
    outputs(use(build(name)))
    masks = [call["attn_mask"] for call in calls]
    assert all(isinstance(mask, hk.Mask) or mask.shape[1:3] == (1, 1) for mask in masks)
    dense = [call["bias"] for call in calls if isinstance(call["bias"], Tensor)]
    offsets = [call["bias"] for call in calls if isinstance(call["bias"], hk.OffsetBias)]
    assert len(dense) == (2 if name == "umt5" else 0)
    assert len(offsets) == (2 if name == "longt5" else 4)


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_relative_positions_by_name(name: str) -> None:
    """Without `use` the model adds its dense bias."""
    model = build(name)
    expected = with_gradients(model)
    model.set_attn_implementation(NAME)
    assert_alike(with_gradients(model), expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", T5_LIKE)
def test_generate_with_relative_positions(name: str, cache: str) -> None:
    model = build(name, model=f"{type(build(name)).__name__[:-5]}ForConditionalGeneration")
    real = torch.ones(3, 9, dtype=torch.long)
    real[1, 6:] = 0
    arguments = {
        "input_ids": torch.randint(3, 40, (3, 9)), "attention_mask": real, "do_sample": False,
        "max_new_tokens": 12, "min_new_tokens": 12, "cache_implementation": cache,
        "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    expected = model.generate(**arguments)
    found = use(model).generate(**arguments)
    assert torch.equal(found.sequences, expected.sequences)
    assert_alike(found.logits, expected.logits)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_embedding_gets_its_gradient_through_checkpoints(use_reentrant: bool) -> None:
    model = build("t5", dropout_rate=0.0).train()
    expected = with_gradients(model, use_cache=False)
    use(model).gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    found = with_gradients(model, use_cache=False)
    assert_alike(found, expected)


def test_mask_of_floats_beside_relative_positions() -> None:
    model = build("t5", model="T5EncoderModel")
    mask = torch.randn(3, 1, 9, 9)
    expected = with_gradients(model, attention_mask=mask)
    assert_alike(with_gradients(use(model), attention_mask=mask), expected)


@pytest.mark.parametrize("implementation", [NAME, "use"])
def test_pruned_heads_keep_their_biases(implementation: str) -> None:
    model = build("t5")
    use(model) if implementation == "use" else model.set_attn_implementation(NAME)
    hk.heads.close(model, {0: [0], 1: [1, 2], 3: [0]})
    expected = outputs(model)
    hk.heads.prune(model, hk.heads.closed(model))
    assert_alike(outputs(model), expected)


def test_other_attention_while_in_use_is_stock() -> None:
    model = build("t5")
    expected = with_gradients(model)
    use(model).config._attn_implementation_internal = "eager"
    for part in (model.encoder, model.decoder):
        part.config._attn_implementation_internal = "eager"
    assert_alike(with_gradients(model), expected)


def test_statistics_have_the_bias() -> None:
    """Largest probabilities are those of the maps."""
    arguments = {
        "input_ids": torch.arange(3, 30).view(3, 9),
        "decoder_input_ids": torch.arange(3, 18).view(3, 5),
        "output_attentions": True,
    }
    model = build("t5")
    expected = model(**arguments)
    found = use(model)(**arguments)
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        for statistics, maps in zip(found[name], expected[name], strict=True):
            assert_alike(statistics.max_prob, maps.amax(-1))


# ---------------------------------------------------------------------- caps and sinks
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    "name", ["gemma2", "gpt_oss", "granite_swa", "mimo_v2_flash", "bloom", "mpt"]
)
def test_generate_with_terms(name: str, cache: str) -> None:
    """Longer than the window of 4, with padding."""
    model = build(name)
    real = torch.ones(3, 6, dtype=torch.long)
    real[1, :2] = 0
    arguments = {
        "input_ids": torch.randint(3, 40, (3, 6)), "attention_mask": real, "do_sample": False,
        "max_new_tokens": 8, "min_new_tokens": 8, "cache_implementation": cache,
        "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    expected = model.generate(**arguments)
    found = use(model).generate(**arguments)
    assert torch.equal(found.sequences, expected.sequences)
    assert_alike(found.logits, expected.logits)


@pytest.mark.parametrize(("name", "term"), [("gemma2", "softcap"), ("gpt_oss", "sinks")])
def test_terms_reach_the_operator(name: str, term: str, calls: list[dict[str, Any]]) -> None:
    """Beside windows, without a mask too."""
    model = build(name)
    expected = outputs(model, attention_mask=None)
    assert_alike(outputs(use(model), attention_mask=None), expected)
    assert [call[term] is not None for call in calls] == [True, True]


def test_statistics_have_the_cap_and_the_sinks() -> None:
    for name in ("gemma2", "gpt_oss"):
        model = build(name)
        arguments = {"input_ids": torch.arange(3, 30).view(3, 9), "output_attentions": True}
        expected = model(**arguments).attentions
        for statistics, maps in zip(use(model)(**arguments).attentions, expected, strict=True):
            assert_alike(statistics.max_prob, maps.amax(-1))
            assert_alike(statistics.entropy, -torch.xlogy(maps, maps).sum(-1))


def test_pruned_sinks_are_those_of_the_heads_that_are_left() -> None:
    """So that a pruned model may be released; one whose sinks are all there takes theirs."""
    model = use(build("gpt_oss"))
    hk.heads.close(model, {0: [0, 5]})
    expected = outputs(model)
    sinks = model.model.layers[0].self_attn.sinks
    hk.heads.prune(model, hk.heads.closed(model))
    pruned = model.model.layers[0].self_attn
    assert len(pruned.sinks) == 6
    assert_alike(outputs(model), expected)
    pruned.sinks = sinks
    assert_alike(outputs(model), expected)


def test_mask_that_is_shorter_than_the_keys() -> None:
    """A layer with keys of its own that the mask does not know."""
    model = use(build("gemma2"))
    layer = model.model.layers[0].self_attn
    layer.register_forward_pre_hook(lengthen, with_kwargs=True)
    with pytest.raises(
        ValueError, match=r"attention_mask covers 12 keys, but Gemma2Attention has 9"
    ):
        outputs(model)


def lengthen(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    mask = kwargs["attention_mask"]
    longer = type(mask)(mask.mask, (*mask.shape[:3], 12), mask.device)
    return args, kwargs | {"attention_mask": longer}


# ---------------------------------------------------------------------- stock classes that compute attention themselves
@pytest.mark.parametrize("name", [*THEMSELVES, "beit", "swin"])
def test_closed_heads_are_zero(name: str) -> None:
    """What the operator gives of each head, with one closed."""
    model = use(build(name))
    seen = []
    operator = attention.gated_attention

    def spy(**named: Any) -> Tensor:
        seen.append(operator(**named))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "gated_attention", spy)
        whole = outputs(model)
        closed = outputs(model, head_mask=torch.tensor([1.0, 0.0, 1.0, 0.5]))
    assert not torch.equal(closed, whole)
    first, closed_first = seen[0], seen[len(seen) // 2]
    assert closed_first[:, 1].eq(0).all()
    assert_alike(closed_first[:, 0], first[:, 0])
    assert_alike(closed_first[:, 3], first[:, 3] / 2)


@pytest.mark.parametrize("name", [*THEMSELVES, "beit", "swin"])
def test_statistics_are_those_of_biased_maps(name: str) -> None:
    model = build(name)
    arguments: dict[str, Any] = {"output_attentions": True}
    if model.main_input_name == "input_ids":
        arguments["input_ids"] = torch.arange(3, 30).view(3, 9)
    else:
        arguments["pixel_values"] = torch.randn(2, 3, 12, 12)
    expected = model(**arguments).attentions
    found = use(model)(**arguments).attentions
    assert len(found) == len(expected) > 0
    for statistics, maps in zip(found, expected, strict=True):
        assert_alike(statistics.max_prob, maps.amax(-1))


@pytest.mark.parametrize("name", THEMSELVES)
def test_another_attention_while_in_use(name: str) -> None:
    model = build(name)
    expected = outputs(model)
    use(model).config._attn_implementation_internal = "eager"
    assert_alike(outputs(model), expected)


@pytest.mark.parametrize("name", ["bloom", "mpt", "mpnet"])
def test_biases_stay_small(name: str, calls: list[dict[str, Any]]) -> None:
    """Those by the key's position are `[B or 1, H, 1, S]`, those by distance a table."""
    outputs(use(build(name)))
    assert all(isinstance(call["attn_mask"], hk.Mask) for call in calls)
    for bias in (call["bias"] for call in calls):
        assert isinstance(bias, hk.OffsetBias) if name == "mpnet" else bias.shape[2] == 1


@pytest.mark.parametrize("name", ["beit", "data2vec-vision"])
def test_bias_that_layers_share(name: str) -> None:
    changes = {"use_relative_position_bias": False, "use_shared_relative_position_bias": True}
    model = build(name, **changes)
    expected = with_gradients(model)
    assert any("relative_position_bias_table" in each for each in expected)
    assert_alike(with_gradients(use(model)), expected)


def test_swin2sr_is_as_swin_v2() -> None:
    config = transformers.Swin2SRConfig(
        image_size=16, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4, mlp_ratio=1.0
    )
    model = randomised(transformers.Swin2SRModel, config, "eager")
    image = torch.randn(2, 3, 16, 16)
    expected = with_gradients(model, pixel_values=image)
    assert_alike(with_gradients(use(model), pixel_values=image), expected)


@pytest.mark.parametrize("name", ["bloom", "mpnet"])
def test_dropout_of_probabilities(name: str) -> None:
    none = {"hidden_dropout": 0.0, "hidden_dropout_prob": 0.0}
    some = {"attention_dropout": 0.5, "attention_probs_dropout_prob": 0.5}
    model = use(build(name, **none, **some))
    whole = outputs(model)
    assert_alike(outputs(model), whole)
    assert not torch.equal(outputs(model.train()), whole)


def test_bloom_with_holes_in_its_padding() -> None:
    """Positions count real tokens, so that this is no function of the distance."""
    model = build("bloom")
    real = torch.ones(3, 9, dtype=torch.long)
    real[1, 3:5] = real[2, :2] = 0
    expected = with_gradients(model, attention_mask=real)
    assert_alike(with_gradients(use(model), attention_mask=real), expected)
