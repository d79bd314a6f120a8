"""What the operator is given by transformers models beside queries, keys and values: biases, caps, sinks, output gates.

test_families.py has outputs and gradients of every family, test_generation.py decoding.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.heads.interface import NAME
from heads_kernels.integrations.transformers import release, use
from heads_kernels.integrations.transformers.output_gated import OutputGated
from tests.support.alike import assert_alike
from tests.support.refusals import assert_refused
from tests.support.tiny_models import build, documented, outputs, with_gradients

T5_LIKE = ("t5", "umt5", "longt5")
SINKS = ("flint", "gpt_oss", "mimo_v2_flash")


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
            offsets = bias.offsets(None, (T, S), expected.device)
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


def test_pruned_heads_keep_their_biases_without_use() -> None:
    model = build("t5", NAME)
    hk.heads.close(model, {0: [0], 1: [1, 2], 3: [0]})
    expected = outputs(model)
    hk.heads.prune(model, hk.heads.closed(model))
    assert_alike(outputs(model), expected)


@pytest.mark.parametrize("name", [*T5_LIKE, "bloom", "mpt", "mpnet", "gemma2", *SINKS])
def test_terms_stay_small(name: str, calls: list[Any]) -> None:
    """Padding is a mask; a bias is a table of offsets or `[B or 1, H, 1, S]`, but for the zeros of UMT5."""
    outputs(use(build(name)))
    for call in calls:
        assert isinstance(call.kwargs["attn_mask"], hk.Mask) or call.kwargs["attn_mask"].shape[1:3] == (1, 1)
    biases = [call.kwargs["bias"] for call in calls if call.kwargs["bias"] is not None]
    dense = [bias for bias in biases if isinstance(bias, Tensor)]
    if name in ("bloom", "mpt"):
        assert all(bias.shape[2] == 1 for bias in dense)
        assert len(dense) == len(calls)
    else:
        assert len(dense) == (2 if name == "umt5" else 0)
        offsets = {"t5": 4, "umt5": 4, "longt5": 2, "mpnet": 2}
        assert len(biases) - len(dense) == offsets.get(name, 0)
    for term, families in (("softcap", ("gemma2",)), ("sinks", SINKS)):
        assert any(call.kwargs[term] is not None for call in calls) == (name in families)


def test_a_pruned_layer_whose_sinks_are_all_there() -> None:
    """It takes those of the heads that pruning leaves, so that the model may be released."""
    model = use(build("gpt_oss"))
    layer = model.model.layers[0].self_attn
    sinks = layer.sinks
    hk.heads.prune(model, {0: [0, 5]})
    assert len(layer.sinks) == 6
    expected = outputs(model)
    layer.sinks = sinks
    assert_alike(outputs(model), expected)


def test_mask_that_is_shorter_than_the_keys() -> None:
    """A layer with keys of its own that the mask does not know."""

    def lengthen(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs["attention_mask"]
        longer = type(mask)(mask.mask, (*mask.shape[:3], 12), mask.device)
        return args, kwargs | {"attention_mask": longer}

    model = use(build("gemma2"))
    model.model.layers[0].self_attn.register_forward_pre_hook(lengthen, with_kwargs=True)
    assert_refused((lambda: outputs(model), "attention_mask covers 12 keys, but Gemma2Attention has "))


#: By family what the documentation says, such as "sigmoid, per element: fused".
OUTPUT_GATES = {name: gate for name, (_, _, gate, *_) in documented().items() if gate}
FUSED = [name for name, gate in OUTPUT_GATES.items() if gate.endswith(": fused")]
UNFUSED = [name for name, gate in OUTPUT_GATES.items() if gate.endswith(": not fused")]
assert {*FUSED, *UNFUSED} == OUTPUT_GATES.keys()


@pytest.mark.parametrize("name", FUSED)
def test_gate_and_attention_are_one_op(name: str, calls: list[Any]) -> None:
    """The logits reach the operator as the projection gave them: views, `[B, H, T]` or `[B, H, T, Dv]`."""
    model = use(build(name))
    projections = []
    for layer in (module for module in model.modules() if isinstance(module, OutputGated)):
        source = next(getattr(layer, p) for p in ("gate_proj", "g_proj", "q_proj") if hasattr(layer, p))
        source.register_forward_hook(lambda _, args, out: projections.append(out))
    outputs(model)
    kind, _, extent = OUTPUT_GATES[name].removesuffix(": fused").partition(", ")
    assert len(calls) == len(projections) > 0
    for call, projected in zip(calls, projections, strict=True):
        gate = call.kwargs["gate"]
        assert call.kwargs["gate_activation"] == kind
        assert gate.dim() == (4 if extent == "per element" else 3)
        if name != "beam":  # adds a bias to its logits
            assert gate.untyped_storage().data_ptr() == projected.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", UNFUSED)
def test_other_gates_run_beside_the_op(name: str, calls: list[Any]) -> None:
    model = use(build(name))
    assert not any(isinstance(module, OutputGated) for module in model.modules())
    outputs(model)
    assert calls
    assert all((call.kwargs["gate_activation"], call.kwargs["gate"]) == ("identity", None) for call in calls)
