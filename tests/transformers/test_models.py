"""How transformers models run on the operators: by name, forms, modes, dtypes, masks, compilation."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from heads_kernels.after_import import after_import
from heads_kernels.heads.interface import NAME
from heads_kernels.integrations.transformers import release, use
from tests.convert.converted_models import convert
from tests.support.alike import assert_alike
from tests.support.commands import python
from tests.support.refusals import assert_refused
from tests.support.tiny_models import build, of_class, outputs, packed_layers, padding, small, unpooled, with_gradients

#: Its layers are as those of Swin V2.
SWIN2SR = {
    "image_size": 16, "patch_size": 1, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4,
    "mlp_ratio": 1.0,
}  # fmt: skip
WHOLE_TARGET = {"decoder_attention_mask": None}
OWN, SHARED = "use_relative_position_bias", "use_shared_relative_position_bias"
#: A mask to be added, as callers prepare it.
ADDED = {"attention_mask": torch.arange(243.0).sin().view(3, 1, 9, 9)}
PACKED = {
    "input_ids": torch.arange(3, 12)[None], "attention_mask": None, "use_cache": False,
    "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]]),
}  # fmt: skip
PAIRS = {"attention_mask": torch.zeros(3, 1, 9, 9).masked_fill(torch.ones(9, 9).triu(1) > 0, -1e9)}
#: Forms of families that their config chooses, and of their inputs; the model and changes of its batch.
FORMS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "gates of heads": (lambda: build("laguna", gating="per-head"), {}),
    "gates of elements": (lambda: build("laguna", gating="per-element"), {}),
    "no gates": (lambda: build("lfm3", use_attention_gate=False), {}),
    "a bias that layers share": (lambda: build("beit", **{OWN: False, SHARED: True}), {}),
    "Swin2SR": (
        lambda: of_class("Swin2SRModel", **SWIN2SR),
        {"pixel_values": torch.arange(1536.0).sin().view(2, 3, 16, 16)},
    ),
    # Positions count real tokens, so that the bias is no function of the distance.
    "ALiBi with holes": (lambda: build("bloom"), {"attention_mask": padding("holes")}),
    "ALiBi, projected in slices": (lambda: build("bloom", pretraining_tp=2, slow_but_exact=True), {}),
    "ALiBi with a mask of pairs": (lambda: build("mpt"), PAIRS),
    "a float mask": (lambda: build("bert"), ADDED),
    "a float mask and a bias": (lambda: build("t5", model="T5EncoderModel"), ADDED),
    "packed by position": (lambda: build("llama"), PACKED),
    # Of these transformers says that SDPA does not serve them. Routers of NLLB-MoE compute with the mask, which they
    # take for one to be added.
    "Splinter": (lambda: of_class("SplinterModel"), {}),
    "NLLB-MoE": (lambda: of_class("NllbMoeModel"), WHOLE_TARGET),
    "Pegasus-X": (lambda: of_class("PegasusXModel", block_size=4, num_global_tokens=2), WHOLE_TARGET),
}


@pytest.mark.parametrize("name", FORMS)
def test_equals_stock(name: str) -> None:
    make, changes = FORMS[name]
    model = make()
    expected = with_gradients(model, **changes)
    assert_alike(with_gradients(use(model), **changes), expected)


NO_DROPOUT: dict[str, dict[str, float]] = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "t5": {"dropout_rate": 0.0},
}
#: Models that compile whole.
COMPILED: dict[str, Callable[[], Any]] = {
    "a gated output": lambda: use(build("afmoe")),
    "converted, grouped and rotated": lambda: convert(use(build("llama", num_hidden_layers=1)), 14),
    "converted, of fused projections": lambda: convert(use(build("gpt2", n_layer=1, **NO_DROPOUT["gpt2"])), 14),
    "one layer": lambda: use(build("llama", num_hidden_layers=1)),
    "hands no arguments on": lambda: use(small("stablelm")),
}
CHECKPOINTED = ("one layer", "hands no arguments on")


@pytest.mark.check
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize(
    ("name", "checkpointing"), [*((name, False) for name in COMPILED), *((name, True) for name in CHECKPOINTED)]
)
def test_compiles_whole(name: str, checkpointing: bool) -> None:
    """fullgraph: nothing breaks the graph, nor in the gradients; with and without padding and head masks."""
    model = COMPILED[name]().train()
    masks = torch.rand(2, model.config.num_hidden_layers, model.config.num_attention_heads)
    passes = [{}, {"attention_mask": None}, *({"head_mask": mask} for mask in masks)]
    expected = [with_gradients(model, **changes, use_cache=False) for changes in passes]
    if checkpointing:
        model.gradient_checkpointing_enable()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for changes, outcome in zip(passes, expected, strict=True):
        found = with_gradients(compiled, **changes, use_cache=False)
        assert_alike({key.removeprefix("_orig_mod."): each for key, each in found.items()}, outcome)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("name", "unpad"),
    [("qwen3_next", False), ("bert", True), *((n, u) for n in ("llama", "t5") for u in (False, True))],
)
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


BIG_BIRD = {"attention_type": "original_full"}
#: Models that compute attention themselves, of which the first three are served after `use`, and Pegasus in its
#: encoder; what their configs have of their own.
ITSELF: dict[str, dict[str, Any]] = {
    "MPNetModel": {}, "BloomModel": {}, "MptModel": {}, "RoFormerModel": {}, "DogeModel": {},
    "XGLMModel": {"attention_heads": 4}, "LongformerModel": {"attention_window": 4},
    "BigBirdModel": BIG_BIRD, "BigBirdPegasusModel": BIG_BIRD,
}  # fmt: skip
IDS = torch.arange(3, 21).view(2, 9)
REAL = {"attention_mask": torch.tensor([[1] * 9, [1] * 6 + [0] * 3])}


@pytest.mark.parametrize("name", ITSELF)
def test_models_that_compute_attention_themselves(name: str) -> None:
    """Their first pass with a mask, given or their own, is refused: they would add it to their scores, or drop it."""
    model = of_class(name, NAME, **ITSELF[name])
    given, words = REAL, r"attention_mask of .* is computed with \(\w+\)"
    if name == "DogeModel":
        given, words = {}, "attention_mask is given to DogeAttention, which makes"
    decoder = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    assert_refused((lambda: model(IDS, **given, **decoder), words))


@pytest.mark.check
@pytest.mark.parametrize("first", ["", ".modeling_layers"])
def test_package_before_transformers(first: str) -> None:
    """Parts import each other in an order that depends on which comes first; other parts begin as one of these two."""
    code = f"""
import sys, heads_kernels
assert "transformers" not in sys.modules
import transformers{first}
from transformers import AutoModel, BertConfig
config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
model = AutoModel.from_config(config, attn_implementation="heads_kernels")
from heads_kernels.after_import import _WAITING
assert "transformers.modeling_utils" not in _WAITING
"""
    python("-W", "error::RuntimeWarning", "-c", code)


def test_after_import_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a module that can be imported and has not been."""

    def register() -> None:
        raise RuntimeError("too old")

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "watched_module", raising=False)
    (tmp_path / "watched_module.py").write_text("VALUE = 1\n")
    after_import("watched_module", register)
    with pytest.warns(RuntimeWarning, match=r"not registered with watched_module: .*too old"):
        importlib.import_module("watched_module")
    assert "watched_module" in sys.modules
