"""`use(model, unpad=True)`: layers on real tokens alone give what stock gives on the padded batch."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.integrations.transformers import release, use
from tests.convert.converted_models import changed, in_use
from tests.support import tiny_models
from tests.support.alike import assert_alike
from tests.support.model_state import structure
from tests.support.nn_layers import backward
from tests.support.refusals import assert_refused
from tests.support.tiny_models import batch, outputs, packed_layers, padding, unpooled, with_gradients

B, T = 3, 9


def build(*args: Any, **changes: Any) -> Any:
    return unpooled(tiny_models.build(*args, **changes))


def unpadded(model: Any) -> Any:
    return use(copy.deepcopy(model), unpad=True)


#: Families whose attention counts positions between tokens: with padding between real ones they run padded.
COUNTING = {"mistral", "modernbert", "mpnet", "t5"}
#: Models, what was changed in their layers (heads lost, queries and keys shared), and where the padding is:
#: test_families.py has stock layers with padding at the ends.
KINDS: list[tuple[str, str, str]] = [
    *((name, "stock", "holes") for name in ("albert", "bart", "bert", "gpt2", "llama", *sorted(COUNTING))),
    ("albert", "both", "left"), ("bert", "converted", "holes"), ("bert", "pruned", "right"),
    ("gpt2", "both", "holes"), ("t5", "converted", "left"), ("t5", "pruned", "right"), ("bart", "both", "right"),
    ("llama", "pruned", "left"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*it counts positions between tokens")
@pytest.mark.parametrize(("name", "change", "kind"), KINDS)
def test_training_steps(name: str, change: str, kind: str) -> None:
    """All gradients, before and after an optimiser changes the weights in place."""
    model = unpooled(changed(in_use(name), change, {0: range(4) if name == "llama" else [1, 3]}))
    found = unpadded(model)
    for _ in range(1 if change == "stock" else 2):
        expected = with_gradients(model, attention_mask=padding(kind))
        assert_alike(with_gradients(found, attention_mask=padding(kind)), expected)
        torch.optim.SGD(found.parameters(), lr=1e-3).step()
        model.load_state_dict(found.state_dict())
    assert all(packed_layers(found)) != (kind == "holes" and name in COUNTING)


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
    expected, found = (backward(each, each(**arguments, labels=labels).loss) for each in (model, unpadded(model)))
    assert_alike(found, expected)


@pytest.mark.parametrize(
    ("name", "without", "packed"),
    [
        ("bart", "decoder_attention_mask", [True] * 4),  # as in training: all of its tokens are packed rows
        ("t5", "attention_mask", [False, False, True, True]),
    ],
)
def test_one_part_of_a_pair_is_padded(name: str, without: str, packed: list[bool]) -> None:
    model = build(name)
    expected = with_gradients(model, **{without: None})
    found = unpadded(model)
    assert_alike(with_gradients(found, **{without: None}), expected)
    assert packed_layers(found) == packed


@pytest.mark.parametrize("seen_before", [False, True])
@pytest.mark.parametrize(
    ("name", "side", "other"),
    [("bert", "right", "left"), ("aimv2_text_model", "right", "left"), ("clip_text_model", "left", "right")],
)
def test_outputs_pooled_at_padding_are_refused(name: str, side: str, other: str, seen_before: bool) -> None:
    """Also in a later pass, after one with padding on the side where none is read."""
    model = tiny_models.small(name)
    found = unpadded(model)
    sides = {each: batch(model) | {"attention_mask": padding(each)} for each in (side, other)}
    if seen_before:
        expected = model(**sides[side]).pooler_output
        assert_alike(found(**sides[side]).pooler_output, expected)
        assert all(packed_layers(found))
    refused = (lambda: found(**sides[other]), r"outputs of \w+ depend on padded tokens, .*unpad=Fa")
    assert_refused(refused, refused)
    # Not stock: a padded row that sees no key gives 0 here, and is what is pooled.
    pooled = use(model)(**sides[other]).pooler_output
    assert_alike(use(found, unpad=False)(**sides[other]).pooler_output, pooled)


def test_losses_of_padding_are_refused() -> None:
    model = build("bert", model="BertForTokenClassification")
    arguments = batch(model) | {"attention_mask": padding("right")}
    labels = torch.ones(B, T, dtype=torch.long)
    assert_refused((lambda: unpadded(model)(**arguments, labels=labels), r"or are a loss of one; .*labels of -100"))
    hidden = labels.masked_fill(padding("right") == 0, -100)
    expected = model(**arguments, labels=hidden).loss
    assert_alike(unpadded(model)(**arguments, labels=hidden).loss, expected)


def test_outputs_may_be_infinite() -> None:
    model = build("bert", model="BertForTokenClassification")
    model.classifier.register_forward_hook(lambda module, args, out: out.index_fill(-1, torch.tensor([0]), -torch.inf))
    found, expected = outputs(unpadded(model)), outputs(use(model))
    assert_alike(found[:, 1:], expected[:, 1:])
    assert found[:, 0].isneginf().all()


@pytest.mark.parametrize("real", [torch.ones(B, T), torch.zeros(B, T), torch.tensor([[1.0], [0], [0]]).expand(B, T)])
def test_whole_and_empty_rows(real: Tensor) -> None:
    model, found = use(build("bert")), unpadded(build("bert"))
    assert_alike(outputs(found, attention_mask=real), outputs(model, attention_mask=real))


@pytest.mark.parametrize("kind", ["fixed", "hard concrete", "per sample"])
def test_gates(kind: str) -> None:
    found = []
    for unpad in (False, True):
        model = use(build("bert"), unpad=unpad)
        if kind == "fixed":
            hk.heads.gate(model, lambda _: hk.nn.FixedGate(torch.tensor([0.0, 0.3, 0.0, 1.0])))
        else:
            hk.heads.gate(model, partial(hk.nn.HardConcrete, per_sample=kind == "per sample"))
            for module in model.modules():
                if isinstance(module, hk.nn.HardConcrete):
                    module.train()  # `outputs` sets the seed, and nothing else draws
        found.append(with_gradients(model))
    assert_alike(found[1], found[0])
    assert all(packed_layers(model)) == (kind != "per sample")


def test_readings_of_heads_are_of_padded_rows() -> None:
    model, found = use(build("bert")), unpadded(build("bert"))
    one, other = (m(**batch(m), output_attentions=True).attentions for m in (model, found))
    for expected, statistics in zip(one, other, strict=True):
        assert_alike(statistics.entropy, expected.entropy)
    batches = [batch(model)]
    assert_alike(*(list(hk.analysis.statistics(m, batches).entropy.scores) for m in (model, found)))
    assert not any(packed_layers(found))


@pytest.mark.check
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_compile_does_not_compile_every_batch(name: str) -> None:
    model = build(name)
    found = unpadded(model)
    compiled = torch.compile(found, backend="aot_eager")
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
@pytest.mark.parametrize("name", ["llama", "afmoe", "mpnet", "t5"])
def test_one_call_switches_a_model_in_use(name: str) -> None:
    """Of some the forwards are replaced. Copies are in use, too."""
    model = build(name)
    expected = outputs(model)
    stock = structure(model)
    hooks = [len(m._forward_hooks) for m in use(model).modules()]
    for unpad in (True, True, False, True):
        assert use(model, unpad=unpad) is model
        assert_alike(outputs(model), expected)
        assert all(packed_layers(model))
        assert bool(packed_layers(model)) == unpad
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_alike(outputs(each), expected)
        assert all(packed_layers(each))
        assert structure(release(each)) == stock
        assert packed_layers(each) == []
    assert [len(m._forward_hooks) for m in use(model).modules()] == hooks
    assert structure(release(model)) == stock
    use(model.base_model, unpad=True)
    assert packed_layers(use(model)) == []  # the whole says what its parts do


#: What a layer adds to a token: of the token before it, or something for each position.
BESIDE = {"neighbours": lambda out: out.roll(1, 1), "positions": lambda out: torch.arange(out.shape[1])[:, None]}


@pytest.mark.parametrize("kind", BESIDE)
def test_layer_that_looks_beside_a_token_is_refused(kind: str) -> None:
    """In every pass; that one row, padded on the right, keeps its positions says nothing of several."""
    model = build("bert")
    layer = model.encoder.layer[1]
    layer.intermediate.dense.register_forward_hook(lambda _, args, out: out + 0.01 * BESIDE[kind](out))
    use(model, unpad=True)
    ids, real = torch.randint(3, 40, (B, T)), padding("right")
    if kind == "positions":
        model(ids[1:2], attention_mask=real[1:2])
    words = r"unpad is True, but on real tokens alone 'encoder\.layer\.1', a BertLayer, .*; call us"
    assert_refused(*[(lambda: model(ids, attention_mask=real), words)] * 2)
    assert not layer.training
    use(model, unpad=False)
    outputs(model)
