"""`use(model, unpad=True)`: layers on real tokens alone give what stock gives on the padded batch."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.alike import assert_alike

pytest.importorskip("transformers", reason="needs the extra [transformers]")

import transformers

import heads_kernels as hk
from heads_kernels.integrations.transformers import TESTED, release, use
from heads_kernels.integrations.transformers.tested import OF_A_FORM
from heads_kernels.integrations.transformers.unpadding import UNPADDED
from tests.support import tiny_models
from tests.support.tiny_models import batch, outputs, unpooled, with_gradients

B, T = 3, 9


def padding(kind: str) -> Tensor:
    """A row whole, the others padded on the left, the right, or between real tokens."""
    real = torch.ones(B, T, dtype=torch.long)
    if kind == "left":
        real[1, :5] = real[2, :2] = 0
    elif kind == "right":
        real[1, 2:] = real[2, 7:] = 0
    elif kind == "holes":
        real[1, 3:5] = real[2, 0] = real[2, 6] = 0
    return real


def packed_layers(model: nn.Module) -> list[bool]:
    """Of each layer whether it has run packed."""
    found = (vars(module).get(UNPADDED) for module in model.modules())
    return [bool(own.probed) for own in found if own is not None]


def build(*args: Any, **changes: Any) -> Any:
    return unpooled(tiny_models.build(*args, **changes))


def small(name: str) -> Any:
    return unpooled(tiny_models.small(name))


def unpadded(model: Any) -> Any:
    return use(copy.deepcopy(model), unpad=True)


# ---------------------------------------------------------------------- every family
#: Families of which no layer runs packed, and what is said of them.
NEVER = {
    "bloom": "alibi has shape",
    "gemma3n_text": "hidden_states has shape",
    "layoutlmv3": "has shape [3, 4, 9, 9]",  # rel_pos, since transformers 5.24 position_bias
    "mpt": "position_bias has shape",
}
IMAGES = {"beit", "data2vec-vision", "deit", "swin", "swinv2", "vit"}


@pytest.mark.parametrize("name", [name for name in TESTED if name not in IMAGES])
def test_family_equals_stock(name: str) -> None:
    """Outputs of real tokens and gradients of all weights, of rows padded on the right and on the left."""
    model = build(name)
    expected = with_gradients(model)
    found = unpadded(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert_alike(with_gradients(found), expected)
    assert any(packed_layers(found)) == (name not in NEVER)
    assert not said or NEVER.get(name, "") in str(said[0].message)


#: Of the families of a form: images all of whose patches are real, and sounds of one length.
NO_PADDING = {
    "aimv2_vision_model", "chinese_clip_vision_model", "clip_vision_model", "dinov3_vit", "dpt",
    "glmasr_encoder", "owlv2_vision_model", "pixtral", "sapiens2", "siglip_vision_model",
}  # fmt: skip
#: Those that take, or make, a mask of all pairs of tokens: none of their layers runs packed.
PAIRS = {"layoutlm", "qwen2_audio_encoder", "voxtral_encoder"}


def with_padding(name: str, model: Any) -> dict[str, Tensor]:
    """A padding mask for the batch of a model, if that has none: half of the second row."""
    arguments = batch(model)
    if "attention_mask" in arguments:
        return {}
    if "decoder_input_ids" in arguments:  # sounds of one length
        return {"decoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])}
    if "input_values" in arguments:
        length = arguments["input_values"].shape[1]
    elif name in PAIRS:
        length = arguments["input_features"].shape[2] // 2
    else:
        length = model(**arguments)[0].shape[1]
    real = torch.arange(length) < torch.tensor([[length], [length // 2]])
    if name in PAIRS:
        hidden = ~real[:, None, None].expand(2, 1, length, length)
        return {"attention_mask": torch.zeros(hidden.shape).masked_fill(hidden, -1e9)}
    return {"attention_mask": real.long()}


@pytest.mark.check
@pytest.mark.parametrize("name", [name for name in OF_A_FORM if name not in NO_PADDING])
def test_family_of_a_form_equals_stock(name: str) -> None:
    model = small(name)
    changes = with_padding(name, model)
    if name in POOLED:
        changes = {"attention_mask": padding(POOLED[name])}
    expected = with_gradients(model, **changes)
    found = unpadded(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*attention_mask is a tensor for pairs")
        assert_alike(with_gradients(found, **changes), expected)
    assert any(packed_layers(found)) == (name not in PAIRS)


@pytest.mark.check
@pytest.mark.parametrize("name", sorted(NO_PADDING))
def test_family_of_a_form_without_padding_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="none of whose layers takes a mask of padded tokens"):
        unpadded(small(name))


FAMILIES = [
    "bert", "roberta", "distilbert", "mpnet", "albert", "modernbert", "gpt2", "llama", "mistral",
    "qwen2", "gemma2", "t5", "bart",
]  # fmt: skip
#: Those whose attention counts positions between tokens: with padding between real ones they run padded.
COUNTING = {"mpnet", "modernbert", "mistral", "gemma2", "t5"}


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_of_every_kind(family: str, kind: str) -> None:
    model = build(family)
    expected = with_gradients(model, attention_mask=padding(kind))
    found = unpadded(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*it counts positions between tokens")
        assert_alike(with_gradients(found, attention_mask=padding(kind)), expected)
    counts = kind == "holes" and family in COUNTING
    assert all(packed_layers(found)) != counts


# ---------------------------------------------------------------------- what models give
def test_layers_give_zeros_for_padding_and_see_real_tokens_alone() -> None:
    model = use(build("bert"), unpad=True)
    seen = []
    model.encoder.layer[0].output.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    found = model(**batch(model)).last_hidden_state
    real = batch(model)["attention_mask"].bool()
    assert seen[-1] == (1, int(real.sum()), 32)
    assert found.shape == (B, T, 32)
    assert not found[~real].any()


@pytest.mark.parametrize("name", ["bert", "albert", "llama", "t5"])
def test_hidden_states(name: str) -> None:
    """Asked for before `use` too: the hooks that collect them are older than those of `use` then."""
    model = build(name)
    real = batch(model)["attention_mask"].bool()

    def states(of: Any) -> list[Tensor]:
        found = of(**batch(model), output_hidden_states=True)
        layers = found.encoder_hidden_states if name == "t5" else found.hidden_states
        return [state[real] for state in layers]

    expected = states(model)
    assert_alike(states(use(model, unpad=True)), expected)
    assert any(packed_layers(model))  # not the first of a stack, whose input is collected


@pytest.mark.parametrize(
    ("name", "task", "labels"),
    [
        ("bert", "BertForSequenceClassification", torch.tensor([0, 1, 1])),  # pooled [CLS]
        ("bert", "BertForMaskedLM", None),
        ("llama", "LlamaForSequenceClassification", torch.tensor([0, 1, 1])),  # the last token
        ("llama", "LlamaForCausalLM", None),
        ("t5", "T5ForConditionalGeneration", None),
        ("bart", "BartForConditionalGeneration", None),
    ],
)
def test_losses(name: str, task: str, labels: Tensor | None) -> None:
    model = build(name, model=task)
    arguments = batch(model) | {"attention_mask": padding("right")}
    if name == "llama":  # which finds the last token by its id
        arguments["input_ids"] = arguments["input_ids"].masked_fill(padding("right") == 0, 0)
    if labels is None:
        ids = arguments.get("decoder_input_ids", arguments["input_ids"])
        real = arguments.get("decoder_attention_mask", arguments["attention_mask"])
        labels = ids.masked_fill(real == 0, -100)
    arguments["labels"] = labels
    found = {}
    for each in (model, unpadded(model)):
        loss = each(**arguments).loss
        loss.backward()
        gradients = {n: p.grad for n, p in each.named_parameters() if p.grad is not None}
        found[each is model] = {"loss": loss.detach(), **gradients}
    assert_alike(found[False], found[True])


def test_encoder_alone_is_padded() -> None:
    """A decoder without a mask of its own, as in training: all of its tokens are packed rows."""
    model = build("bart")
    arguments = {"decoder_attention_mask": None}
    expected = with_gradients(model, **arguments)
    found = unpadded(model)
    assert_alike(with_gradients(found, **arguments), expected)
    assert all(packed_layers(found))


def test_decoder_alone_is_padded() -> None:
    model = build("t5")
    arguments = {"attention_mask": None}
    expected = with_gradients(model, **arguments)
    found = unpadded(model)
    assert_alike(with_gradients(found, **arguments), expected)
    assert packed_layers(found) == [False, False, True, True]


#: A model of each kind of pooling, with the side of padding at which it reads no padding.
POOLED = {
    "bert": "right", "roberta": "right", "chinese_clip_text_model": "right", "altclip_text_model": "right",
    "aimv2_text_model": "right", "clip_text_model": "left", "owlv2_text_model": "left",
    "siglip_text_model": "left", "siglip2_text_model": "left",
}  # fmt: skip


@pytest.mark.parametrize("seen_before", [False, True])
@pytest.mark.parametrize("name", POOLED)
def test_outputs_pooled_at_padding_are_refused(name: str, seen_before: bool) -> None:
    """Also in a later pass, after one with padding on the side where none is read."""
    model = tiny_models.small(name)
    side = POOLED[name]
    other = "left" if side == "right" else "right"
    found = unpadded(model)
    if seen_before:
        expected = model(**batch(model) | {"attention_mask": padding(side)}).pooler_output
        same = found(**batch(model) | {"attention_mask": padding(side)}).pooler_output
        assert_alike(same, expected)
        assert all(packed_layers(found))
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"outputs of \w+ depend on padded tokens, .*unpad=False"
        ):
            found(**batch(model) | {"attention_mask": padding(other)})
    # Not stock: a padded row that sees no key gives 0 here, and is what is pooled.
    pooled = use(model)(**batch(model) | {"attention_mask": padding(other)}).pooler_output
    again = use(found, unpad=False)(**batch(model) | {"attention_mask": padding(other)})
    assert_alike(again.pooler_output, pooled)


def test_losses_of_padding_are_refused() -> None:
    model = build("bert", model="BertForTokenClassification")
    arguments = batch(model) | {"attention_mask": padding("right")}
    labels = torch.ones(B, T, dtype=torch.long)
    with pytest.raises(ValueError, match=r"or are a loss of one; .*labels of -100"):
        unpadded(model)(**arguments, labels=labels)
    hidden = labels.masked_fill(padding("right") == 0, -100)
    expected = model(**arguments, labels=hidden).loss
    assert_alike(unpadded(model)(**arguments, labels=hidden).loss, expected)


@pytest.mark.parametrize(
    "real", [torch.ones(B, T), torch.zeros(B, T), torch.tensor([[1.0], [0], [0]]).expand(B, T)]
)
def test_whole_and_empty_rows(real: Tensor) -> None:
    model = use(build("bert"))
    found = unpadded(build("bert"))
    expected = model(**batch(model) | {"attention_mask": real}).last_hidden_state
    out = found(**batch(model) | {"attention_mask": real}).last_hidden_state
    assert_alike(out[real.bool()], expected[real.bool()])


# ---------------------------------------------------------------------- heads
@pytest.mark.parametrize("name", ["bert", "albert", "bart", "llama"])
def test_head_masks(name: str) -> None:
    model = use(build(name))
    found = unpadded(build(name))
    H = model.config.num_attention_heads
    for mask in (torch.rand(H), torch.rand(2, H)):
        expected = with_gradients(model, head_mask=mask)
        assert_alike(with_gradients(found, head_mask=mask), expected)
    assert all(packed_layers(found))


@pytest.mark.parametrize("kind", ["fixed", "hard concrete", "per sample", "closed", "pruned"])
def test_gates(kind: str) -> None:
    found = []
    for unpad in (False, True):
        model = use(build("bert"), unpad=unpad)
        torch.manual_seed(0)
        if kind == "fixed":
            hk.heads.gate(model, lambda H: hk.nn.FixedGate(torch.rand(H)))
        elif kind == "closed":
            hk.heads.close(model, {0: [0, 2]})
        elif kind == "pruned":
            hk.heads.prune(model, {0: [0, 2]})
        else:
            hk.heads.gate(model, partial(hk.nn.HardConcrete, per_sample=kind == "per sample"))
            for module in model.modules():
                if isinstance(module, hk.nn.HardConcrete):
                    module.train()  # the same draws: nothing else draws
        torch.manual_seed(3)
        found.append(with_gradients(model))
    assert_alike(found[1], found[0])
    assert all(packed_layers(model)) == (kind != "per sample")


def test_readings_of_heads_are_of_padded_rows() -> None:
    model, found = use(build("bert")), unpadded(build("bert"))
    one, other = (m(**batch(m), output_attentions=True).attentions for m in (model, found))
    for expected, statistics in zip(one, other, strict=True):
        assert_alike(statistics.entropy, expected.entropy)
    batches = [batch(model)]
    assert_alike(
        *(list(hk.analysis.statistics(m, batches).entropy.scores) for m in (model, found)),
    )
    assert not any(packed_layers(found))


# ---------------------------------------------------------------------- how models are run
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["bert", "t5", "llama"])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    model = build(name)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if name == "bert":
        for layer in model.encoder.layer:
            layer.attention.self.dropout.p = 0.0
    if name == "t5":
        for module in model.modules():
            if hasattr(module, "dropout") and isinstance(module.dropout, float):
                module.dropout = 0.0
    expected = with_gradients(model, use_cache=False)
    found = unpadded(model)
    found.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        found.enable_input_require_grads()
    assert_alike(with_gradients(found, use_cache=False), expected)
    assert all(packed_layers(found))


def test_training_mode_and_random_numbers_are_left_alone() -> None:
    model = use(build("bert"), unpad=True).train()
    model.encoder.layer[0].attention.eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    first = model(**batch(model)).last_hidden_state
    assert [module.training for module in model.modules()] == modes
    torch.manual_seed(5)
    assert torch.equal(model(**batch(model)).last_hidden_state, first)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_autocast(name: str) -> None:
    model, found = use(build(name)), unpadded(build(name))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, out = outputs(model), outputs(found)
    assert out.dtype == expected.dtype
    assert_alike(out.float(), expected.float(), dtype=torch.bfloat16)
    assert all(packed_layers(found))


def test_half_precision() -> None:
    model, found = use(build("bert").bfloat16()), unpadded(build("bert").bfloat16())
    assert_alike(outputs(found), outputs(model))
    assert all(packed_layers(found))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_generate(name: str, cache: str) -> None:
    """The prompt runs packed and leaves the cache as decoding wants it."""
    model = build(name)
    arguments = {
        "input_ids": torch.randint(3, 40, (B, T)), "attention_mask": padding("left"),
        "do_sample": False, "max_new_tokens": 6, "cache_implementation": cache, "pad_token_id": 0,
    }  # fmt: skip
    expected = model.generate(**arguments)
    assert torch.equal(use(model, unpad=True).generate(**arguments), expected)
    assert all(packed_layers(model)) or (name, cache) == ("mistral", "static")


def test_generate_of_a_pair() -> None:
    model = build("bart", model="BartForConditionalGeneration")
    arguments = {
        "input_ids": torch.randint(3, 40, (B, T)), "attention_mask": padding("right"),
        "do_sample": False, "max_new_tokens": 6, "num_beams": 2, "pad_token_id": 0,
        "decoder_input_ids": torch.randint(3, 40, (B, 4)),
    }  # fmt: skip
    expected = model.generate(**arguments)
    assert torch.equal(use(model, unpad=True).generate(**arguments), expected)
    assert all(packed_layers(model))


def test_cache_is_continued() -> None:
    model = build("llama")
    found = unpadded(model)
    ids, real = torch.randint(3, 40, (B, T)), padding("left")
    rows = []
    for each in (model, found):
        past = each(ids[:, :6], attention_mask=real[:, :6]).past_key_values
        assert type(past) is transformers.DynamicCache
        rest = each(ids[:, 6:], attention_mask=real, past_key_values=past)
        rows.append(rest.logits)
    assert_alike(rows[1], rows[0])


@pytest.mark.check
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_compile_does_not_compile_every_batch(name: str) -> None:
    torch._dynamo.reset()
    model = build(name)
    found = unpadded(model)
    compiled = torch.compile(found)
    counters = torch._dynamo.utils.counters
    graphs = []
    for lengths in ((9, 4, 2), (9, 7, 3), (9, 1, 5), (9, 8, 8), (9, 2, 6)):
        real = (torch.arange(T) < torch.tensor(lengths)[:, None]).long()
        expected = outputs(model, attention_mask=real)
        with torch.no_grad():
            assert_alike(outputs(compiled, attention_mask=real, use_cache=False), expected)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1:] == graphs[1:2] * 4
    assert all(packed_layers(found))


# ---------------------------------------------------------------------- on, off, copies
def test_release_and_copies() -> None:
    model = build("llama")
    expected = outputs(model)
    states = {name: set(vars(m)) for name, m in model.named_modules()}
    use(model, unpad=True)
    copied = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    for each in (model, copied, loaded):
        assert_alike(outputs(each), expected)
        assert all(packed_layers(each))
        release(each)
        assert packed_layers(each) == []
        assert {name: set(vars(m)) for name, m in each.named_modules()} == states
        assert all(not m._forward_pre_hooks for m in each.model.layers)
    use(model.model, unpad=True)
    assert len(packed_layers(use(model))) == 0  # the whole says what its parts do


@pytest.mark.parametrize("name", ["llama", "mpnet", "t5"])
def test_one_call_switches_a_model_in_use(name: str) -> None:
    model = build(name)
    expected = outputs(model)
    stock = {n: type(m) for n, m in model.named_modules()}
    hooks = [len(m._forward_hooks) for m in use(model).modules()]
    for unpad in (True, True, False, True):
        assert use(model, unpad=unpad) is model
        assert_alike(outputs(model), expected)
        assert all(packed_layers(model))
        assert bool(packed_layers(model)) == unpad
    assert [len(m._forward_hooks) for m in use(model).modules()] == hooks
    assert {n: type(m) for n, m in release(model).named_modules()} == stock


def test_save_pretrained(tmp_path: Any) -> None:
    model = use(build("bert"), unpad=True)
    expected = outputs(model)
    model.save_pretrained(tmp_path)
    loaded = unpooled(transformers.BertModel.from_pretrained(tmp_path))
    assert_alike(outputs(use(loaded, unpad=True)), expected)


def test_model_in_something_else() -> None:
    model = build("bert")
    expected = outputs(model)
    holder = nn.ModuleDict({"base_model": use(model, unpad=True)})
    assert_alike(outputs(holder["base_model"]), expected)
    assert all(packed_layers(holder))


# ---------------------------------------------------------------------- what is refused
class Neighbours(nn.Module):
    """A projection that adds what the token before it gives."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Tensor) -> Tensor:
        out = self.inner(hidden_states)
        return out + 0.01 * out.roll(1, 1)


def test_layer_that_looks_at_its_neighbours_is_refused() -> None:
    model = build("bert")
    layer = model.encoder.layer[1]
    layer.intermediate.dense = Neighbours(layer.intermediate.dense)
    use(model, unpad=True)
    refusal = (
        r"unpad is True, but on real tokens alone 'encoder\.layer\.1', a BertLayer, .*; call use"
    )
    with pytest.raises(ValueError, match=refusal):
        outputs(model)
    with pytest.raises(ValueError, match=refusal):
        outputs(model)
    assert not layer.training
    use(model, unpad=False)
    outputs(model)


class Positions(nn.Module):
    """A projection that adds something for each position between tokens, as layers with their own positions do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Tensor) -> Tensor:
        out = self.inner(hidden_states)
        return out + 0.01 * torch.arange(hidden_states.shape[1])[:, None]


def test_a_check_of_one_row_says_nothing_of_several() -> None:
    """One row that is padded on the right keeps its positions."""
    model = build("bert")
    layer = model.encoder.layer[0]
    layer.intermediate.dense = Positions(layer.intermediate.dense)
    use(model, unpad=True)
    ids, real = torch.randint(3, 40, (B, T)), padding("right")
    model(ids[1:2], attention_mask=real[1:2])
    with pytest.raises(
        ValueError, match=r"'encoder\.layer\.0', a BertLayer, computes something else"
    ):
        model(ids, attention_mask=real)


def test_refusals() -> None:
    with pytest.raises(TypeError, match="unpad is a str; pass True or False"):
        use(build("bert"), unpad="yes")  # type: ignore[arg-type]
    model = build("swin")
    refusal = r"unpad is True for a SwinModel .* none of whose layers takes a mask of padded tokens"
    with pytest.raises(ValueError, match=refusal):
        use(model, unpad=True)
    assert model.config._attn_implementation == "eager"
    model = use(model)
    with pytest.raises(ValueError, match=refusal):
        use(model, unpad=True)
    assert model.config._attn_implementation == "heads_kernels"
