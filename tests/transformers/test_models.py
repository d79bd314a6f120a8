"""How transformers models are run on the operators: forms, modes, dtypes, masks, compilation, a pretrained model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from heads_kernels.integrations.transformers import release, use
from tests.support.alike import assert_alike
from tests.support.tiny_models import (
    PLAIN,
    SEQ2SEQ,
    build,
    of_class,
    outputs,
    packed_layers,
    padding,
    unpooled,
    with_gradients,
)

#: Its layers are as those of Swin V2.
SWIN2SR = {
    "image_size": 16, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "mlp_ratio": 1.0,
}  # fmt: skip
PEGASUS_X = SEQ2SEQ | {"block_size": 4, "num_global_tokens": 2}
WHOLE_TARGET = {"decoder_attention_mask": None}
OWN, SHARED = "use_relative_position_bias", "use_shared_relative_position_bias"
#: A mask to be added, as callers prepare it.
ADDED = {"attention_mask": torch.arange(243.0).sin().view(3, 1, 9, 9)}
PACKED = {
    "input_ids": torch.arange(3, 12)[None], "attention_mask": None, "use_cache": False,
    "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]]),
}  # fmt: skip
#: Forms of families that their config chooses, and of their inputs; the model and changes of its batch.
FORMS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "gates of heads": (lambda: build("laguna", gating="per-head"), {}),
    "gates of elements": (lambda: build("laguna", gating="per-element"), {}),
    "no gates": (lambda: build("lfm3", use_attention_gate=False), {}),
    "a bias that layers share": (lambda: build("beit", **{OWN: False, SHARED: True}), {}),
    "Swin2SR": (
        lambda: of_class("Swin2SRModel", SWIN2SR),
        {"pixel_values": torch.arange(1536.0).sin().view(2, 3, 16, 16)},
    ),
    # Positions count real tokens, so that the bias is no function of the distance.
    "ALiBi with holes": (lambda: build("bloom"), {"attention_mask": padding("holes")}),
    "a float mask": (lambda: build("bert"), ADDED),
    "a float mask and a bias": (lambda: build("t5", model="T5EncoderModel"), ADDED),
    "packed by position": (lambda: build("llama"), PACKED),
    # Of these transformers says that SDPA does not serve them. Routers of NLLB-MoE compute with the mask, which they
    # take for one to be added.
    "Splinter": (lambda: of_class("SplinterModel", PLAIN), {}),
    "NLLB-MoE": (lambda: of_class("NllbMoeModel", SEQ2SEQ), WHOLE_TARGET),
    "Pegasus-X": (lambda: of_class("PegasusXModel", PEGASUS_X), WHOLE_TARGET),
}


@pytest.mark.parametrize("name", FORMS)
def test_equals_stock(name: str) -> None:
    make, changes = FORMS[name]
    model = make()
    expected = with_gradients(model, **changes)
    assert_alike(with_gradients(use(model), **changes), expected)


@pytest.mark.check
@pytest.mark.parametrize(
    ("name", "options", "changes"),
    [
        ("llama", {"num_hidden_layers": 1}, {"attention_mask": None}),  # positions tell of packing
        ("afmoe", {}, {}),  # a gated output
    ],
)
def test_compiles_whole(name: str, options: dict[str, Any], changes: dict[str, Any]) -> None:
    """fullgraph: nothing in the attention or the masks breaks the graph."""
    model = use(build(name, **options))
    expected = outputs(model, use_cache=False, **changes)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_alike(outputs(compiled, use_cache=False, **changes), expected)


NO_DROPOUT: dict[str, dict[str, float]] = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": {"dropout_rate": 0.0},
}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("name", "unpad"),
    [("qwen3_next", False), ("bert", True), *((n, u) for n in ("llama", "t5") for u in (False, True))],
)  # fmt: skip
def test_gradient_checkpointing(name: str, unpad: bool, reentrant: bool) -> None:
    """With the gradient of the embedding of T5's bias, which a layer that runs again looks up again."""
    model = unpooled(build(name, **NO_DROPOUT.get(name, {}))).train()
    expected = with_gradients(model, use_cache=False)
    use(model, unpad=unpad).gradient_checkpointing_enable({"use_reentrant": reentrant})
    if unpad and reentrant:
        model.enable_input_require_grads()
    assert_alike(with_gradients(model, use_cache=False), expected)
    assert all(packed_layers(model))
    assert bool(packed_layers(model)) == unpad


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "afmoe"])
def test_bfloat16(name: str) -> None:
    """No further from the model in float32 than twice what stock bfloat16 is."""
    model = build(name).to(torch.bfloat16)
    with torch.no_grad():
        stock = outputs(model).float()
        used = outputs(use(model))
        assert used.dtype == torch.bfloat16
        exact = outputs(release(model).float())
    assert (used.float() - exact).square().mean() < 4 * (stock - exact).square().mean() + 1e-6


@pytest.mark.parametrize("name", ["bert", "bloom", "mpnet"])
def test_dropout_reaches_the_operator(name: str) -> None:
    none = {"hidden_dropout": 0.0, "hidden_dropout_prob": 0.0}
    some = {"attention_dropout": 0.5, "attention_probs_dropout_prob": 0.5}
    model = use(build(name, **none, **some))
    whole = outputs(model)
    assert_alike(outputs(model), whole)
    assert not torch.equal(outputs(model.train()), whole)


@pytest.mark.check
def test_pretrained_model_on_padded_text() -> None:
    minilm = pytest.importorskip("benchmarks.minilm")
    try:
        model = minilm.load(attn_implementation="eager")
        ids, lengths = minilm.tokens(8)
    except minilm.Unavailable as reason:
        pytest.skip(str(reason))
    real = torch.arange(ids.shape[1]) < lengths[:, None]
    arguments = {"input_ids": ids, "attention_mask": real.long()}
    assert not real.all()
    expected = with_gradients(model, **arguments)
    found = with_gradients(use(model), **arguments)
    assert_alike(found["outputs"], expected["outputs"])
    assert_alike(found, expected, dtype=torch.float32)
