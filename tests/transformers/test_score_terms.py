"""Biases, caps and sinks of transformers models on the operators: what the operator is given, statistics, pruned heads.

test_families.py has outputs and gradients of every family, test_generation.py decoding.
"""

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
from heads_kernels.integrations.transformers.masks import RelativeBias
from tests.support.tiny_models import build, outputs, randomised, with_gradients

T5_LIKE = ("t5", "umt5", "longt5")
SINKS = ("flint", "gpt_oss", "mimo_v2_flash")


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


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_relative_positions_without_use(name: str) -> None:
    """The model adds its dense bias; other attention while in use is stock."""
    model = build(name)
    expected = with_gradients(model)
    model.set_attn_implementation(NAME)
    assert_alike(with_gradients(model), expected)
    for part in (use(model), model.encoder, model.decoder):
        part.config._attn_implementation_internal = "eager"
    assert_alike(with_gradients(model), expected)


@pytest.mark.parametrize("implementation", [NAME, "use"])
def test_pruned_heads_keep_their_biases(implementation: str) -> None:
    model = build("t5")
    use(model) if implementation == "use" else model.set_attn_implementation(NAME)
    hk.heads.close(model, {0: [0], 1: [1, 2], 3: [0]})
    expected = outputs(model)
    hk.heads.prune(model, hk.heads.closed(model))
    assert_alike(outputs(model), expected)


# ---------------------------------------------------------------------- what the operator is given
@pytest.mark.parametrize("name", [*T5_LIKE, "bloom", "mpt", "mpnet", "gemma2", *SINKS])
def test_terms_stay_small(name: str, calls: list[dict[str, Any]]) -> None:
    """Padding is a mask; a bias is a table of offsets or `[B or 1, H, 1, S]`, but for the zeros of UMT5."""
    outputs(use(build(name)))
    for call in calls:
        assert isinstance(call["attn_mask"], hk.Mask) or call["attn_mask"].shape[1:3] == (1, 1)
    biases = [call["bias"] for call in calls if call["bias"] is not None]
    dense = [bias for bias in biases if isinstance(bias, Tensor)]
    if name in ("bloom", "mpt"):
        assert all(bias.shape[2] == 1 for bias in dense)
        assert len(dense) == len(calls)
    else:
        assert len(dense) == (2 if name == "umt5" else 0)
        offsets = {"t5": 4, "umt5": 4, "longt5": 2, "mpnet": 2}
        assert len(biases) - len(dense) == offsets.get(name, 0)
    for term, families in (("softcap", ("gemma2",)), ("sinks", SINKS)):
        assert any(call[term] is not None for call in calls) == (name in families)


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

    def lengthen(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs["attention_mask"]
        longer = type(mask)(mask.mask, (*mask.shape[:3], 12), mask.device)
        return args, kwargs | {"attention_mask": longer}

    model = use(build("gemma2"))
    model.model.layers[0].self_attn.register_forward_pre_hook(lengthen, with_kwargs=True)
    with pytest.raises(ValueError, match="attention_mask covers 12 keys, but Gemma2Attention has "):
        outputs(model)


# ---------------------------------------------------------------------- other forms of stock classes
def test_bias_that_layers_share() -> None:
    changes = {"use_relative_position_bias": False, "use_shared_relative_position_bias": True}
    model = build("beit", **changes)
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


def test_bloom_with_holes_in_its_padding() -> None:
    """Positions count real tokens, so that this is no function of the distance."""
    model = build("bloom")
    real = torch.ones(3, 9, dtype=torch.long)
    real[1, 3:5] = real[2, :2] = 0
    expected = with_gradients(model, attention_mask=real)
    assert_alike(with_gradients(use(model), attention_mask=real), expected)
