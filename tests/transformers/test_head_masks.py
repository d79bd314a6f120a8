"""Head masks and gates of heads in transformers models, pruned ones too: outputs and gradients, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.alike import assert_alike

pytest.importorskip("transformers", reason="needs the extra [transformers]")

import transformers
from transformers.masking_utils import eager_mask

import heads_kernels as hk
from heads_kernels.integrations.transformers import TESTED, attention, release, use
from tests.support.tiny_models import (
    GROUPED,
    PLAIN,
    TINY,
    batch,
    build,
    outputs,
    with_gradients,
)

MASKED = (
    "albert", "bart", "bert", "deit", "distilbert", "gemma2", "gpt2", "gpt_oss", "llama", "qwen3", "roberta",
    "t5", "umt5", "vit",
)  # fmt: skip
KINDS = ("head_mask", "decoder_head_mask", "cross_attn_head_mask")


class Reference:
    """Eager attention in plain PyTorch, its probabilities times a head mask: layers take turns as they are called."""

    def __init__(self, masks: dict[str, Tensor]) -> None:
        self.masks = masks
        self.calls = dict.fromkeys(KINDS, 0)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        position_bias: Tensor | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        for bias in (attention_mask, position_bias):
            scores = scores if bias is None else scores + bias
        kind = self.kind(module, query.shape[2], key.shape[2])
        if s_aux is None:
            probabilities = scores.softmax(-1)
        else:
            sinks = s_aux[:, None, None].expand(*scores.shape[:3], 1)
            probabilities = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        if kind in self.masks:
            mask = self.masks[kind]
            row = mask if mask.dim() == 1 else mask[self.calls[kind]]
            probabilities = probabilities * row[:, None, None]
        self.calls[kind] += 1
        return (probabilities @ value).transpose(1, 2).contiguous(), None

    @staticmethod
    def kind(module: nn.Module, T: int, S: int) -> str:
        """By what the tiny batches are: the encoder reads 9 tokens, the decoder 5."""
        if T == S == 5 and S != 9:
            return "decoder_head_mask"
        return "head_mask" if T == S else "cross_attn_head_mask"


@pytest.fixture
def reference() -> Iterator[Reference]:
    """The reference as an attention implementation of transformers, "reference"."""
    function = Reference({})
    transformers.AttentionInterface.register("reference", function)
    transformers.AttentionMaskInterface.register("reference", eager_mask)
    yield function
    for table in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        del table._global_mapping["reference"]


@pytest.mark.parametrize("rows", [False, True], ids=["H", "LH"])
@pytest.mark.parametrize("name", MASKED)
def test_head_mask_is_honoured(name: str, rows: bool, reference: Reference) -> None:
    model = build(name)
    H = model.config.num_attention_heads
    shape = (2, H) if rows else (H,)
    masks = {kind: torch.rand(shape).round(decimals=1) for kind in TESTED[name].head_masks}
    for mask in masks.values():
        mask[..., 1] = 0.0
        mask.requires_grad_()
    reference.masks = masks
    model.set_attn_implementation("reference")
    expected = with_gradients(model)
    expected |= {kind: mask.grad for kind, mask in masks.items()}
    for mask in masks.values():
        mask.grad = None
    model.set_attn_implementation("eager")
    use(model)
    found = with_gradients(model, **masks)
    found |= {kind: mask.grad for kind, mask in masks.items()}
    assert_alike(found, expected)
    assert not torch.equal(found["outputs"], outputs(model))


def test_head_mask_and_gate_multiply() -> None:
    model = use(build("llama"))
    layer = model.model.layers[1].self_attn
    gates = torch.tensor([0.0, 1.0, 0.5, 1.0] * 2)
    layer.head_gate = hk.nn.FixedGate(gates)
    mask = torch.tensor([[1.0] * 8, [1.0, 0.0, 1.0, 0.5] * 2])
    found = outputs(model, head_mask=mask)
    del layer.head_gate
    mask[1] *= gates
    assert_alike(found, outputs(model, head_mask=mask))


def test_integer_head_mask() -> None:
    model = use(build("bert"))
    mask = torch.tensor([1, 0, 1, 1])
    assert_alike(outputs(model, head_mask=mask), outputs(model, head_mask=mask.float()))


def test_head_masks_that_do_not_fit() -> None:
    model = use(build("bert"))
    for shape in ((3,), (1, 4), (3, 4), (50, 4), (2, 3)):
        with pytest.raises(ValueError, match=r"head_mask has shape .* which has 4 heads; pass \[H"):
            outputs(model, head_mask=torch.ones(shape))
    for shape in ((), (2, 1, 4)):
        with pytest.raises(
            ValueError, match=r"head_mask has shape .*; pass a tensor \[H\], or \[L"
        ):
            outputs(model, head_mask=torch.ones(shape))
    for wrong in ([1.0, 0.0, 1.0, 1.0], [torch.ones(4), None], 1.0):
        with pytest.raises(
            TypeError, match=r"head_mask is a (list|float); pass a tensor \[H\], or"
        ):
            outputs(model, head_mask=wrong)
    with pytest.raises(ValueError, match=r"head_mask is torch.complex64; pass floats, integers or"):
        outputs(model, head_mask=torch.ones(4) + 0j)
    with pytest.raises(ValueError, match=r"head_mask has shape \[3, 4\], but the layer runs 2 tim"):
        outputs(use(build("albert")), head_mask=torch.ones(3, 4))


def test_head_masks_that_the_model_has_no_use_for() -> None:
    mask = torch.ones(4)
    for name in ("decoder_head_mask", "cross_attn_head_mask"):
        with pytest.raises(ValueError, match=rf"{name} is given to a Bert.*; pass head_mask"):
            outputs(use(build("bert")), **{name: mask})
    bart = use(build("bart"))
    with pytest.raises(ValueError, match=r"decoder_cross_attn_head_mask is .*; pass head_mask, d"):
        outputs(bart, decoder_cross_attn_head_mask=mask)
    with pytest.raises(ValueError, match=r"head_mask is given to a BartDecoder.*; pass decoder_h"):
        bart.decoder(torch.ones(1, 3, dtype=torch.long), head_mask=mask)


def test_head_masks_that_no_layer_reads() -> None:
    """The encoder does not run where its outputs are given."""
    model = use(build("bart"))
    arguments = batch(model)
    encoded = model.encoder(arguments["input_ids"], arguments["attention_mask"])
    mask = torch.ones(4)
    with pytest.raises(ValueError, match=r"head_mask was read by no layer of the BartModel; pass"):
        model(**arguments, encoder_outputs=encoded, head_mask=mask)
    assert model(**arguments, encoder_outputs=encoded, decoder_head_mask=mask)
    model = build("bert")
    model.config._attn_implementation = "heads_kernels"  # transformers has not seen it
    with pytest.raises(ValueError, match=r"head_mask is given to a BertSelfAttention not in use"):
        outputs(model, head_mask=mask)


def test_failed_passes_leave_no_head_mask() -> None:
    """An error in a layer, and an interrupt, which runs no hooks."""
    model = use(build("bert"))
    expected = outputs(model)

    def fail(*_: Any) -> None:
        raise error

    for error in (RuntimeError(), KeyboardInterrupt()):
        handle = model.encoder.layer[1].register_forward_hook(fail)
        with pytest.raises(type(error)):
            outputs(model, head_mask=torch.zeros(4))
        handle.remove()
        assert torch.equal(outputs(model), expected)


@pytest.mark.parametrize(
    ("encoder", "whole"),
    [("bert", "EncoderDecoderModel"), ("vit", "VisionEncoderDecoderModel")],
)
def test_head_masks_of_models_made_of_two(encoder: str, whole: str) -> None:
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
    with pytest.raises(ValueError, match=r"cross_attn_head_mask is .*; pass head_mask, decoder_h"):
        model(**arguments, cross_attn_head_mask=mask)


# ---------------------------------------------------------------------- models that hand no arguments on
IMAGES = {**TINY["vit"].arguments, "image_size": [12, 12], "num_detection_tokens": 2}
#: Models of transformers that drop `**kwargs` before they reach a layer.
DROPPING: dict[str, dict[str, Any]] = {
    "StableLmForCausalLM": GROUPED,
    "NemotronForCausalLM": GROUPED,
    "OPTForCausalLM": PLAIN | {"word_embed_proj_dim": 32, "ffn_dim": 24},
    "YolosModel": IMAGES,
}


def dropping(name: str, attention: str = "eager") -> Any:
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    config = model_class.config_class(**DROPPING[name])
    return model_class._from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize("rows", [False, True], ids=["H", "LH"])
@pytest.mark.parametrize("name", DROPPING)
def test_head_masks_reach_layers_that_are_handed_nothing(
    name: str, rows: bool, reference: Reference
) -> None:
    model = dropping(name, "reference")
    H = model.config.num_attention_heads
    mask = torch.rand((2, H) if rows else (H,)).requires_grad_()
    reference.masks = {"head_mask": mask}
    expected = with_gradients(model) | {"head_mask": mask.grad}
    mask.grad = None
    found = with_gradients(use(model), head_mask=mask) | {"head_mask": mask.grad}
    assert_alike(found, expected)
    assert not torch.equal(found["outputs"], outputs(model))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_that_run_again_read_the_head_mask_of_their_pass(use_reentrant: bool) -> None:
    """Two passes with masks of their own before one backward pass."""
    model = use(dropping("StableLmForCausalLM")).train()
    masks = torch.rand(2, 2, 8)
    gradients = []
    for _ in range(2):
        model.zero_grad()
        sum(outputs(model, head_mask=mask, use_cache=False).square().sum() for mask in masks).backward()  # fmt: skip
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        functions = [layer._gradient_checkpointing_func for layer in model.model.layers]
    assert_alike(gradients[1], gradients[0])
    release(model)
    assert functions == [layer._gradient_checkpointing_func for layer in model.model.layers]


def in_thread(run: Callable[[], Any]) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    found = pool.submit(run)
    pool.shutdown(wait=False)
    return found


def test_threads_do_not_share_head_masks() -> None:
    """A plain pass and one with another mask begin before a pass with a mask, and end within it."""
    model = use(dropping("StableLmForCausalLM"))
    masks = torch.rand(2, 2, 8)
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

    model.model.layers[0].register_forward_hook(wait)
    running = []
    for index in range(3):
        running.append(in_thread(partial(numbered, index)))
        assert inside[index].wait(60)
    for index in range(3):
        may_end[index].set()
        assert_alike(running[index].result(60), alone[index])


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_backward_in_another_thread_reads_the_head_mask_of_its_pass(use_reentrant: bool) -> None:
    model = use(dropping("StableLmForCausalLM")).train()
    changes = {"head_mask": torch.rand(2, 8), "use_cache": False}
    expected = with_gradients(model, **changes)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.zero_grad()
    values = outputs(model, **changes)
    weights = torch.linspace(-1.0, 1.0, values.numel()).view(values.shape)
    in_thread((values * weights).sum().backward).result(60)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_alike({"outputs": values.detach(), **found}, expected)


def test_head_masks_compile_whole_where_nothing_is_handed_on() -> None:
    model = use(dropping("StableLmForCausalLM"))
    masks = [None, *torch.rand(2, 2, 8)]
    expected = [outputs(model, head_mask=mask, use_cache=False) for mask in masks]
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for mask, outcome in zip(masks, expected, strict=True):
        assert_alike(outputs(compiled, head_mask=mask, use_cache=False), outcome)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("handed", [False, True])
def test_head_masks_compile_whole_with_checkpointing(handed: bool) -> None:
    model = use(build("llama") if handed else dropping("StableLmForCausalLM")).train()
    model.gradient_checkpointing_enable()
    changes = {"head_mask": torch.rand(2, 8), "use_cache": False}
    expected = with_gradients(model, **changes)
    torch.compiler.reset()
    found = with_gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), **changes)
    assert_alike({n.removeprefix("_orig_mod."): tensor for n, tensor in found.items()}, expected)


def test_layers_compiled_one_by_one_read_head_masks() -> None:
    model = use(build("bert"))
    masks = torch.rand(3, 2, 4)
    expected = [outputs(model), *(outputs(model, head_mask=mask) for mask in masks)]
    torch.compiler.reset()
    for layer in model.encoder.layer:
        layer.compile(fullgraph=True, backend="eager")
    assert_alike(outputs(model), expected[0])
    for mask, outcome in zip(masks, expected[1:], strict=True):
        assert_alike(outputs(model, head_mask=mask), outcome)


@pytest.mark.parametrize("name", DROPPING)
def test_statistics_come_back_from_layers_that_are_handed_nothing(name: str) -> None:
    model = dropping(name)
    by_argument, by_config = use(dropping(name)), dropping(name)
    by_config.config.output_attentions = True
    use(by_config)
    expected = model(**batch(model), output_attentions=True).attentions
    for found in (by_argument(**batch(model), output_attentions=True), by_config(**batch(model))):
        assert len(found.attentions) == len(expected) == 2
        for statistics, maps in zip(found.attentions, expected, strict=True):
            torch.testing.assert_close(statistics.max_prob[0], maps[0].amax(-1))  # not padded
    assert not by_argument(**batch(model)).attentions


def test_statistics_that_do_not_come_back() -> None:
    class Silent(transformers.BertModel):
        def forward(self, *args: Any, **arguments: Any) -> Any:
            return (super().forward(*args, **arguments).last_hidden_state,)

    model = use(Silent(build("bert").config).eval())
    with pytest.raises(ValueError, match=r"output_attentions .*, but a Silent does not return"):
        model(**batch(model), output_attentions=True)


def test_towers_read_the_head_masks_that_they_are_handed() -> None:
    """Layers of a tower for images and of one for texts are two stacks, which one mask need not fit."""
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        build("vit").config, build("bert", num_attention_heads=2).config
    )
    model = use(transformers.VisionTextDualEncoderModel(config).eval())
    texts, images = batch(model.text_model), batch(model.vision_model)
    closed = model.text_model(**texts, head_mask=torch.zeros(2))[0]
    assert not torch.equal(closed, model.text_model(**texts)[0])
    closed = model.vision_model(**images, head_mask=torch.zeros(4))[0]
    assert not torch.equal(closed, model.vision_model(**images)[0])
    with pytest.raises(ValueError, match=r"head_mask was read by no layer of the VisionText.*part"):
        model(**texts, pixel_values=images["pixel_values"][[0, 1, 1]], head_mask=torch.ones(4))


# ---------------------------------------------------------------------- gates
def test_gates_of_examples_and_their_gradient() -> None:
    """`head_gate` may give `[B, H]`; a closed head's gradient is left out where the gate says so."""

    class PerExample(hk.nn.HeadGate):
        closed_grad = False

        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 4
            self.gates = nn.Parameter(torch.tensor([[1.0, 0.0, 0.5, 1.0]] * 3))

        def forward(self, batch_size: int, length: int) -> Tensor:
            assert batch_size == 3
            return self.gates

        def export(self) -> Tensor:
            return self.gates[0].detach()

        def keep(self, heads: Any) -> None:
            raise AssertionError("not pruned here")

    model = use(build("bert"))
    model.encoder.layer[0].attention.self.head_gate = PerExample()
    gradient = with_gradients(model)["encoder.layer.0.attention.self.head_gate.gates"]
    assert gradient[:, 1].eq(0).all()
    assert gradient[:, [0, 2, 3]].ne(0).all()


def test_closed_grad_is_that_of_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a head mask too, unless the mask itself asks for gradients."""
    seen = []
    operator = attention.gated_attention

    def spy(*args: Any, **named: Any) -> Tensor:
        seen.append(named["closed_grad"])
        return operator(*args, **named)

    model = use(build("bert", num_hidden_layers=1))
    hk.heads.gate(model, hk.nn.HardConcrete)  # the first time a class of models is checked, it runs
    monkeypatch.setattr(attention, "gated_attention", spy)
    closed_grad = model.encoder.layer[0].attention.self.head_gate.closed_grad
    mask = torch.ones(4)
    outputs(model, head_mask=mask)
    outputs(model, head_mask=mask.requires_grad_())
    assert seen == [closed_grad, True]
    assert not closed_grad


# ---------------------------------------------------------------------- pruned models
PRUNED = ("bert", "gpt2", "llama", "t5", "laguna")


@pytest.mark.parametrize("name", PRUNED)
def test_layer_without_heads(name: str) -> None:
    """It adds the bias of its projection. Its parameters have gradients all the same."""
    model = use(build(name))
    heads = list(range(hk.heads.attention_layers(model)[0].num_heads))
    hk.heads.close(model, {0: heads})
    expected = outputs(model)
    hk.heads.prune(model, hk.heads.closed(model))
    assert_alike(outputs(model), expected)
    without = {n for n, p in model.named_parameters() if p.requires_grad} - set(
        with_gradients(model)
    )
    assert not [name for name in without if "pooler" not in name]


def test_layer_without_heads_has_statistics() -> None:
    """Those of the other layers keep their places."""
    model = use(build("bert"))
    expected = model(**batch(model), output_attentions=True).attentions
    hk.heads.prune(model, {1: range(4)})
    found = model(**batch(model), output_attentions=True).attentions
    assert_alike(found[0].entropy, expected[0].entropy)
    assert found[1].entropy.shape == (3, 0, 9)


@pytest.mark.parametrize("name", PRUNED)
def test_head_masks_of_pruned_layers(name: str) -> None:
    """They are numbered as before the pruning, as position biases are; one for the heads that are left does too."""
    model = use(build(name))
    H = hk.heads.attention_layers(model)[1].num_heads
    mask = torch.rand(2, H)
    mask[1, 1] = 0.0
    names = TESTED[name].head_masks
    expected = outputs(model, **dict.fromkeys(names, mask))
    hk.heads.prune(model, {1: [1]})
    assert_alike(outputs(model, **dict.fromkeys(names, mask)), expected)
    for wrong in (torch.ones(2, H + 1), torch.ones(H - 2)):
        with pytest.raises(ValueError, match="head_mask has shape"):
            outputs(model, head_mask=wrong)
    row = torch.rand(H - 1)
    others = {layer.index for layer in hk.heads.attention_layers(model)} - {1}
    hk.heads.prune(model, {index: [1] for index in others})
    whole = torch.cat((row[:1], torch.ones(1), row[1:]))
    expected = outputs(model, head_mask=whole)
    assert_alike(outputs(model, head_mask=row), expected)
