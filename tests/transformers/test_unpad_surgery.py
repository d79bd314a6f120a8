"""`use(model, unpad=True)` after surgery: layers that were converted, or lost heads, give what they give padded."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.alike import assert_alike

pytest.importorskip("transformers", reason="needs the extra [transformers]")

import heads_kernels as hk
from heads_kernels.integrations.transformers import use
from tests.convert.converted_models import in_use, mixed
from tests.support.tiny_models import unpooled, with_gradients
from tests.transformers.test_unpad import COUNTING, packed_layers, padding

HEADS = {"": {0: [1, 3]}, "llama": {0: [0, 1, 2, 3]}}
#: Those that generate: the class, how it is made to, and the side of the padding of its prompts.
GENERATING: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": ({}, "left"),
    "bert": ({"model": "BertLMHeadModel", "is_decoder": True}, "left"),
    "bart": ({"model": "BartForConditionalGeneration"}, "right"),
    "t5": ({"model": "T5ForConditionalGeneration"}, "right"),
}


def changed(name: str, kind: str, **changes: Any) -> Any:
    """A model in use, padded, with layers that were converted or pruned."""
    model = in_use(name, **changes) if kind == "pruned" else mixed(name, ragged=True, **changes)
    if kind != "converted":
        hk.heads.prune(model, HEADS.get(name, HEADS[""]))
    return unpooled(model)


@pytest.mark.parametrize("side", ["left", "right", "holes"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("albert", "both"), ("bert", "converted"), ("bert", "pruned"), ("gpt2", "both"),
        ("t5", "converted"), ("t5", "pruned"), ("bart", "both"), ("llama", "pruned"),
    ],
)  # fmt: skip
def test_training_step(name: str, kind: str, side: str) -> None:
    """All gradients, before and after an optimiser changes the weights in place."""
    model = changed(name, kind)
    found = use(copy.deepcopy(model), unpad=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*it counts positions between tokens")
        for _ in range(2):
            expected = with_gradients(model, attention_mask=padding(side))
            assert_alike(with_gradients(found, attention_mask=padding(side)), expected)
            torch.optim.SGD(found.parameters(), lr=1e-3).step()
            model.load_state_dict(found.state_dict())
    assert all(packed_layers(found)) != (side == "holes" and name in COUNTING)


def generated(model: Any, side: str, **changes: Any) -> dict[str, Any]:
    found = model.generate(
        torch.randint(3, 40, (3, 9), generator=torch.Generator().manual_seed(4)),
        attention_mask=padding(side),
        max_new_tokens=5,
        min_new_tokens=5,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **changes,
    )
    return {"sequences": found.sequences, "logits": found.logits}


@pytest.mark.parametrize(
    "how",
    [{"cache_implementation": "dynamic"}, {"cache_implementation": "static"}, {"num_beams": 2}],
    ids=["dynamic", "static", "beams"],
)
@pytest.mark.parametrize(
    ("name", "kind"),
    [("gpt2", "pruned"), ("gpt2", "both"), ("bert", "converted"), ("bart", "both"), ("t5", "both")],
)
def test_generate(name: str, kind: str, how: dict[str, Any]) -> None:
    changes, side = GENERATING[name]
    model = changed(name, kind, **changes)
    expected = generated(model, side, **how)
    assert_alike(generated(use(model, unpad=True), side, **how), expected)
    assert any(packed_layers(model))


# ---------------------------------------------------------------------- compiled decoding
@pytest.mark.check
@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("gpt2", "in use"), ("gpt2", "both"), ("bart", "converted"), ("t5", "pruned")],
)
def test_compiled_decoding(name: str, kind: str, unpad: bool) -> None:
    """With a static cache a step is one graph, compiled once for all tokens and calls; the prompt runs packed."""
    import transformers

    changes, side = GENERATING[name]
    model = in_use(name, **changes) if kind == "in use" else changed(name, kind, **changes)
    expected = generated(model, side)
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compile_config = transformers.CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    compile_config._compile_all_devices = True  # not on GPUs alone
    use(model, unpad=unpad)
    for _ in range(2):
        found = generated(model, side, cache_implementation="static", compile_config=compile_config)
        assert_alike(found, expected)
    assert counters["stats"]["unique_graphs"] == 1
    assert any(packed_layers(model)) == unpad


@pytest.mark.check
def test_inductor_decodes() -> None:
    """A step that is compiled to code, with a static cache of a shared key; its cache is a stock one from outside."""
    import transformers

    model = mixed("gpt2", n_layer=1)
    ids = torch.randint(3, 40, (2, 8), generator=torch.Generator().manual_seed(4))

    @torch.no_grad()
    def decoded(step: Any) -> list[Tensor]:
        cache = transformers.StaticCache(config=model.config, max_cache_len=8)
        model(ids[:, :4], past_key_values=cache)
        return [step(ids[:, t : t + 1], past_key_values=cache).logits.clone() for t in range(4, 8)]

    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    expected = decoded(model)
    assert_alike(decoded(torch.compile(model, fullgraph=True)), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
