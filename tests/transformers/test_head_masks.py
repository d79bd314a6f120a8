"""Head masks in transformers models: pruned layers, gates beside them, passes, what is refused.

test_families.py has what they compute in every family.
"""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.integrations.transformers import use
from tests.support.alike import assert_alike
from tests.support.refusals import assert_refused
from tests.support.tiny_models import batch, build, outputs, small


# ---------------------------------------------------------------------- rows
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_rows_of_pruned_layers(name: str) -> None:
    """They are numbered as before the pruning; a mask for the heads that are left is one too."""
    model = use(build(name))
    H = hk.heads.attention_layers(model)[1].num_heads
    mask = torch.rand(2, H)
    mask[1, 1] = 0.0
    names = ["head_mask"]
    if name == "t5":
        names += ["decoder_head_mask", "cross_attn_head_mask"]
    expected = outputs(model, **dict.fromkeys(names, mask))
    hk.heads.prune(model, {1: [1]})
    assert_alike(outputs(model, **dict.fromkeys(names, mask)), expected)
    wrong = (torch.ones(2, H + 1), torch.ones(H - 2))
    assert_refused(*((partial(outputs, model, head_mask=each), "head_mask has shape") for each in wrong))
    row = torch.rand(H - 1)
    others = {layer.index for layer in hk.heads.attention_layers(model)} - {1}
    hk.heads.prune(model, {index: [1] for index in others})
    whole = torch.cat((row[:1], torch.ones(1), row[1:]))
    expected = outputs(model, head_mask=whole)
    assert_alike(outputs(model, head_mask=row), expected)


@pytest.mark.parametrize(
    ("order", "compiled"),
    [
        *((order, False) for order in ([1, 0], [1], [0, 1, 2], [2, 1])),
        *(pytest.param(order, True, marks=pytest.mark.check) for order in ([1, 0], [0, 1, 2])),
    ],
)
def test_layers_that_changed_places(order: list[int], compiled: bool) -> None:
    """The rows of a mask and the statistics are those of the order that `use` found, which `use` finds again."""
    model = use(build("bert"))
    layers = [*model.encoder.layer, copy.deepcopy(model.encoder.layer[0])]
    run_model = partial(outputs, torch.compile(model, backend="eager") if compiled else model)
    run_model(head_mask=torch.rand(2, 4))
    model.encoder.layer = nn.ModuleList(layers[index] for index in order)
    expected = outputs(use(copy.deepcopy(model)))
    assert_alike(run_model(), expected)
    for asked in ({"head_mask": torch.rand(2, 4)}, {"output_attentions": True}):
        refusal = rf"{next(iter(asked))} is given to a BertModel, .*; call .*use\(model\) again"
        assert_refused((partial(run_model, **asked), refusal))
    use(model)
    layers = hk.heads.attention_layers(model)
    mask = torch.rand(len(layers), 4)
    found = run_model(head_mask=mask)
    hk.heads.gate(model, lambda H: hk.nn.FixedGate(torch.ones(H)))
    for layer, row in zip(layers, mask, strict=True):
        layer.module.head_gate.gates.copy_(row)
    assert_alike(found, outputs(model))


def test_gates_multiply_masks(calls: list[Any]) -> None:
    """In the dtype of either; a closed head gets no gradient from a gate that says so, unless the mask asks for one."""
    model = use(build("bert"))
    gates, mask = torch.tensor([0.0, 1.0, 0.5, 1.0]), torch.tensor([1, 0, 1, 1])
    both = outputs(model, head_mask=gates * mask)
    hk.heads.gate(model, lambda _: hk.nn.FixedGate(gates))
    assert_alike(outputs(model, head_mask=mask), both)
    hk.heads.ungate(model)
    hk.heads.gate(model, hk.nn.HardConcrete)
    calls.clear()
    outputs(model, head_mask=mask)
    outputs(model, head_mask=mask.float().requires_grad_())
    assert [call.kwargs["closed_grad"] for call in calls] == [False, False, True, True]


# ---------------------------------------------------------------------- what is refused
def test_refused() -> None:
    bert, bart, mask = use(build("bert")), use(build("bart")), torch.ones(4)
    sizes = ((3,), (1, 4), (3, 4), (2, 3), (), (2, 1, 4))
    assert_refused(
        *(({"head_mask": torch.ones(each)}, "head_mask has shape .*; pass ") for each in sizes),
        ({"head_mask": [1.0, 0.0, 1.0, 1.0]}, TypeError, "head_mask is a list; pass a tensor"),
        ({"head_mask": 1.0}, TypeError, "head_mask is a float; pass a tensor"),
        ({"head_mask": mask + 0j}, "head_mask is torch.complex64; pass floats"),
        ({"decoder_head_mask": mask}, "decoder_head_mask is given to a Bert.*; pass head_mask"),
        of=partial(outputs, bert),
        unchanged=[bert],
    )
    albert, arguments, unseen = use(build("albert")), batch(bart), build("bert")
    encoded = bart.encoder(arguments["input_ids"], arguments["attention_mask"])
    run_decoder = partial(bart, **arguments, encoder_outputs=encoded)
    unseen.config._attn_implementation = "heads_kernels"  # transformers has not seen it
    assert_refused(
        (partial(outputs, albert, head_mask=torch.ones(2, 4)), r"head_mask has shape .*; pass \[H\] = \[4\]\."),
        (partial(outputs, bart, decoder_cross_attn_head_mask=mask), "; pass head_mask, decoder_h"),
        (partial(bart.decoder, torch.ones(1, 3).long(), head_mask=mask), "is given to a BartDecoder.*decoder_head"),
        (partial(run_decoder, head_mask=mask), "was read by no layer of the BartModel; pass"),
        (partial(outputs, unseen, head_mask=mask), "is given to a BertSelfAttention not in use"),
    )
    assert run_decoder(decoder_head_mask=mask)


def test_failed_passes_leave_no_head_mask() -> None:
    """An error in a layer, and an interrupt, which runs no hooks."""
    model = use(build("bert"))
    expected = outputs(model)
    for error in (RuntimeError, KeyboardInterrupt):
        handle = model.encoder.layer[1].register_forward_hook(mock.Mock(side_effect=error))
        with pytest.raises(error):
            outputs(model, head_mask=torch.zeros(4))
        handle.remove()
        # Compiled passes without masks have no state of their own.
        assert_alike(outputs(torch.compile(model, fullgraph=True, backend="eager")), expected)
        assert torch.equal(outputs(model), expected)


# ---------------------------------------------------------------------- models made of two
@pytest.mark.parametrize(("encoder", "whole"), [("bert", "EncoderDecoderModel"), ("vit", "VisionEncoderDecoderModel")])
def test_models_made_of_two(encoder: str, whole: str) -> None:
    """The model strips `decoder_` from what it hands its decoder."""
    decoder = build("bert", model="BertLMHeadModel", is_decoder=True, add_cross_attention=True)
    model = use(getattr(transformers, whole)(encoder=build(encoder), decoder=decoder).eval())
    arguments = {**batch(model.encoder), "decoder_input_ids": torch.arange(3, 18).view(3, 5)}
    if encoder == "vit":
        arguments["decoder_input_ids"] = arguments["decoder_input_ids"][:2]
    layers = {layer.name: layer.index for layer in hk.heads.attention_layers(model)}
    first = {
        "head_mask": next(name for name in layers if name.startswith("encoder.")),
        "decoder_head_mask": "decoder.bert.encoder.layer.0.attention.self",
        "decoder_cross_attn_head_mask": "decoder.bert.encoder.layer.0.crossattention.self",
    }
    mask = torch.ones(2, 4)
    mask[0, 1] = 0.0
    for name, layer in first.items():
        found = model(**arguments, **{name: mask}).logits
        hk.heads.close(model, {layer: [1]})
        assert_alike(found, model(**arguments).logits)
        hk.heads.reopen(model)
        assert not torch.equal(found, model(**arguments).logits)
    words = r"cross_attn_head_mask is .*; pass head_mask, decoder_h"
    assert_refused((lambda: model(**arguments, cross_attn_head_mask=mask), words))


def test_towers_read_the_head_masks_that_they_are_handed() -> None:
    """Layers of a tower for images and of one for texts are two stacks, which one mask need not fit."""
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        build("vit").config, build("bert", num_attention_heads=2).config
    )
    model = use(transformers.VisionTextDualEncoderModel(config).eval())
    texts, images = batch(model.text_model), batch(model.vision_model)
    for part, arguments, H in ((model.text_model, texts, 2), (model.vision_model, images, 4)):
        closed = part(**arguments, head_mask=torch.zeros(H))[0]
        assert not torch.equal(closed, part(**arguments)[0])
    whole = {**texts, "pixel_values": images["pixel_values"][[0, 1, 1]], "head_mask": torch.ones(4)}
    assert_refused((lambda: model(**whole), r"head_mask was read by no layer of the VisionText.*part"))


# ---------------------------------------------------------------------- models that hand no arguments on
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_that_run_again_would_lose_the_mask(use_reentrant: bool) -> None:
    """StableLM drops `**kwargs` before they reach a layer, as Nemotron, OPT and YOLOS do."""
    model = use(small("stablelm")).train()
    mask = torch.rand(2, model.config.num_attention_heads)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    words = r"head_mask reaches no .* gradient checkpointing runs"
    assert_refused((lambda: outputs(model, head_mask=mask, use_cache=False), words))
    assert torch.isfinite(outputs(model, use_cache=False)).all()


def test_threads_do_not_share_head_masks() -> None:
    """A plain pass and one with another mask begin before a pass with a mask, and end within it."""
    model = use(small("stablelm"))
    masks = torch.rand(2, 2, model.config.num_attention_heads)
    passes = [lambda: outputs(model), *(partial(outputs, model, head_mask=mask) for mask in masks)]
    alone = [run() for run in passes]
    inside, may_end = [threading.Event() for _ in passes], [threading.Event() for _ in passes]
    number = threading.local()

    def wait(*_: Any) -> None:
        inside[number.value].set()
        assert may_end[number.value].wait(60)

    def numbered(index: int) -> Tensor:
        number.value = index
        return passes[index]()

    model.layers[0].register_forward_hook(wait)
    running = []
    for index in range(3):
        running.append(ThreadPoolExecutor(1).submit(numbered, index))
        assert inside[index].wait(60)
    for index in range(3):
        may_end[index].set()
        assert_alike(running[index].result(60), alone[index])


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.check)])
def test_a_model_is_compiled_beside_an_eager_pass(whole: bool) -> None:
    """Another thread begins a pass while this one compiles a model, whole or layer by layer; then other masks."""
    model, compiled = use(build("bert")), use(build("bert"))
    masks = torch.rand(2, 2, 4)
    expected = [outputs(model, head_mask=mask) for mask in masks]
    inside, may_end = threading.Event(), threading.Event()
    running = []

    def wait(*_: Any) -> None:
        inside.set()
        assert may_end.wait(60)

    def backend(graph: Any, inputs: Any) -> Any:
        running.append(ThreadPoolExecutor(1).submit(outputs, model, head_mask=masks[1]))
        assert inside.wait(60)
        return graph.forward

    model.embeddings.register_forward_hook(wait)
    for part in [compiled] if whole else compiled.encoder.layer:
        part.compile(fullgraph=True, backend=backend)
    assert_alike(outputs(compiled, head_mask=masks[0]), expected[0])
    may_end.set()
    for each in running:
        assert_alike(each.result(60), expected[1])
    for mask in (masks[1], None):
        assert_alike(outputs(compiled, head_mask=mask), outputs(model, head_mask=mask))


# ---------------------------------------------------------------------- statistics
def test_statistics_by_config_are_those_asked_for() -> None:
    """Of a model that hands no arguments on; test_families.py has their values."""
    asked, by_config = small("stablelm"), small("stablelm")
    by_config.config.output_attentions = True
    expected = use(asked)(**batch(asked), output_attentions=True).attentions
    found = use(by_config)(**batch(by_config)).attentions
    assert len(found) == 2
    assert_alike([each.entropy for each in found], [each.entropy for each in expected])


def test_statistics_that_do_not_come_back() -> None:
    class Silent(transformers.BertModel):
        def forward(self, *args: Any, **arguments: Any) -> Any:
            return (super().forward(*args, **arguments).last_hidden_state,)

    model = use(Silent(build("bert").config).eval())
    words = r"output_attentions .*, but a Silent does not return"
    assert_refused((lambda: model(**batch(model), output_attentions=True), words))
