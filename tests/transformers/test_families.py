"""The rules that every family of transformers models is held to; the details are tested with a few families.

A family is built once. Its tests change copies of the model.
"""

import copy
import re
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import heads_kernels as hk
from heads_kernels.convert.collaborate import read_heads
from heads_kernels.heads.interface import class_calls_interface
from heads_kernels.integrations.transformers import from_pretrained, release, use
from tests.convert.converted_models import CONVERTIBLE, ROTARY, TURNED, convert
from tests.support import tiny_models
from tests.support.alike import assert_alike
from tests.support.model_state import structure
from tests.support.refusals import assert_refused
from tests.support.tiny_models import OF_A_FORM, TINY, batch, documented, outputs, unpooled, with_gradients

#: Families of which no layer runs packed, and what the warning says of them.
PADDED = {
    "bloom": "alibi has shape",
    "gemma3n_text": "hidden_states has shape",
    "layoutlmv3": "position_bias has shape [3, 4, 9, 9]",
    "mpt": "position_bias has shape",
    "wav2vec2-conformer": "relative_position_embeddings has shape [1, 197, 32]",
    **dict.fromkeys(tiny_models.PAIRS, "attention_mask is a tensor for pairs"),
    **dict.fromkeys(tiny_models.NEVER_PADDED, ""),  # no warning
}
#: Families with gradients in which rounding grows: those of stock code in float32 are off by 1,264 units of eps. They
#: are compared in float64; some steps of the models are float32 still.
SENSITIVE = {"deepseek_v2"}
#: Families of which some layers run packed, and what the warning says of the others.
PARTLY_PADDED = {
    "beam": "attention_scaling has shape [1, 1, 9, 1]",
    "switch_transformers": "attention_mask is a tensor for pairs",
    "umt5": "its cross-attention makes a bias of all pairs",
}
#: Families whose stock maps are without the share of the sinks, which scale outputs instead.
SINKS_APART = {"granite_swa", "granitemoe_swa"}
#: Position biases of all heads, which transformers' own attention adds to those that are left.
BIASED = {"beit", "layoutlmv3", "mt5", "swin", "switch_transformers", "t5"}
#: Families whose stock classes may compute attention themselves: the projections of heads, by the end of their name.
ITSELF = {
    "bloom": "self_attention.dense",
    "mpnet": "attn.o",
    "mpt": "attn.out_proj",
    "swinv2": "attention.output.dense",
}


class Family(NamedTuple):
    """A stock model, changes of its batch that pad it, its outputs and the gradients of its weights."""

    name: str
    stock: Any
    changes: dict[str, Tensor]
    expected: dict[str, Tensor]

    @property
    def has_heads(self) -> bool:
        """Whether its heads are known in its weights."""
        return bool(TINY[self.name].attention) if self.name in TINY else self.name in OF_A_FORM

    def copy(self) -> Any:
        return copy.deepcopy(self.stock)

    def outputs(self, model: Any, **changes: Any) -> Tensor:
        return outputs(model, **self.changes | changes)

    def with_gradients(self, model: Any, **changes: Any) -> dict[str, Tensor]:
        return with_gradients(model, **self.changes | changes)


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    """Of the families of a form, whose layers are alike, `make check` runs every third."""
    if name in OF_A_FORM and name not in OF_A_FORM[::3]:
        return [pytest.mark.release]
    return [] if name in tiny_models.FEW | {"bloom", "gpt_neox", "olmo2", "phi3"} else [pytest.mark.check]


NAMES = (*TINY, *OF_A_FORM, *tiny_models.ATTENTION_ALONE)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=marks_of(name)) for name in NAMES])
def family(request: pytest.FixtureRequest) -> Family:
    name = request.param
    stock = unpooled(tiny_models.build(name) if name in TINY else tiny_models.small(name))
    changes = tiny_models.padding_of(name, stock)
    return Family(name, stock, changes, with_gradients(stock, **changes))


def test_equals_stock(family: Family) -> None:
    """Outputs of real tokens and gradients of all weights; after `release`, the model of before."""
    dtype = None
    if family.name in SENSITIVE:
        stock, dtype = family.copy().double(), torch.float32
        family = family._replace(stock=stock, expected=family.with_gradients(stock))
    model = family.copy()
    assert use(model) is model
    assert_alike(family.with_gradients(model), family.expected, dtype=dtype)
    release(model)
    assert structure(model) == structure(family.stock)
    assert_alike(family.outputs(model), family.expected["outputs"], dtype=dtype)


def test_statistics_are_those_of_the_maps(family: Family) -> None:
    """Of real tokens, under every name that stock has maps under; of converted layers too."""
    if family.name in OF_A_FORM:
        pytest.skip("as those of others")
    arguments = batch(family.stock) | family.changes

    def results_of(model: Any) -> Any:
        torch.manual_seed(2)  # ViTMAE shuffles its patches
        return model(**arguments, output_attentions=True)

    expected = results_of(family.stock)
    models = [use(family.copy())]
    if family.name in (*CONVERTIBLE, *ROTARY):
        models.append(convert(use(family.copy())))
    results = [results_of(model) for model in models]
    read = [
        (key, found[key])
        for found in results
        for key in expected
        if "attentions" in key and any(isinstance(each, hk.AttentionStatistics) for each in found[key])
    ]
    assert len(read) >= len(models)
    for key, own in read:
        of_decoder = key in ("decoder_attentions", "cross_attentions")
        real = arguments.get("decoder_attention_mask" if of_decoder else "attention_mask")
        for statistics, maps in zip(own, expected[key], strict=True):
            if maps is None:
                assert statistics is None
                continue
            rows = torch.ones(maps.shape[:3], dtype=torch.bool)
            if real is not None and real.shape == maps.shape[::2]:
                rows &= real.bool()[:, None]
            # Of keys whose probabilities differ by rounding, a processor may prefer either.
            chosen = statistics.argmax[rows]
            assert_alike(maps[rows].gather(-1, chosen[:, None])[:, 0], maps.amax(-1)[rows])
            if family.name in SINKS_APART:
                continue
            assert_alike(statistics.max_prob[rows], maps.amax(-1)[rows])
            assert_alike(statistics.entropy[rows], -torch.xlogy(maps, maps).sum(-1)[rows])


def test_observed_probabilities_are_the_maps(family: Family) -> None:
    """Where heads are known in the weights, tests/analysis/ has them."""
    if family.has_heads:
        pytest.skip("as those of others")
    model, arguments = use(family.copy()), batch(family.stock) | family.changes
    torch.manual_seed(2)
    maps = family.stock(**arguments, output_attentions=True).get("attentions")
    found = {}

    def look(layer: hk.heads.AttentionLayer, call: hk.analysis.AttentionCall) -> None:
        found[layer.index] = call.probabilities(slice(0, call.T)), call.real_queries

    torch.manual_seed(2)
    with hk.analysis.observe(model, look) as layers:
        model(**arguments)
    assert found.keys() == {layer.index for layer in layers}
    statistics = hk.analysis.statistics(model, [arguments])
    for layer in layers:
        own, rows = found[layer.index]
        of_rows = own.double().transpose(1, 2)[rows]  # [rows, H, S]
        largest = of_rows.amax(-1).mean(0)
        assert_alike(statistics.confidence.scores[layer.index], largest, dtype=torch.float32)
    if maps is None or len(maps) != len(found) or family.name in SINKS_APART:  # Swin v2: of some layers
        return
    for (own, rows), each in zip(found.values(), [each for each in maps if each is not None], strict=True):
        assert_alike(own.transpose(1, 2)[rows], each.transpose(1, 2)[rows])


# ---------------------------------------------------------------------- heads
def gated_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Stock eager attention, `[B, T, H, Dv]`, times the gates of the module."""
    heads, maps = sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)
    gates = getattr(module, "gates", None)
    return heads if gates is None else heads * gates[:, None], maps


AttentionInterface.register("gated_eager", gated_attention)
AttentionMaskInterface.register("gated_eager", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def gated(family: Family, gates: dict[str, Tensor]) -> Any:
    """A stock model with heads times gates, by the names of its attention modules."""
    model = family.copy()
    if class_calls_interface(type(model.get_submodule(next(iter(gates))))):
        for name, gate in gates.items():
            model.get_submodule(name).gates = gate
        model.set_attn_implementation("gated_eager")
        return model
    ends = ITSELF[family.name]
    projections = [part for name, part in model.named_modules() if name.endswith(ends)]
    for part, gate in zip(projections, gates.values(), strict=True):

        def multiply(_: Any, inputs: tuple[Tensor, ...], gate: Tensor = gate) -> Any:
            heads = inputs[0].unflatten(-1, (len(gate), -1)) * gate[:, None]
            return heads.flatten(-2), *inputs[1:]

        part.register_forward_pre_hook(multiply)
    return model


def with_heads(family: Family) -> tuple[Any, list[hk.heads.ProjectedLayer]]:
    """A model in use, and its layers."""
    if not family.has_heads:
        pytest.skip("its heads are not known in its weights")
    model = use(family.copy())
    return model, hk.heads.projected_layers(model)


Masks = dict[str, Tensor]


def masks_of(family: Family) -> tuple[Masks, dict[str, Tensor]]:
    """Head masks, of a row for each layer, and what stock gives with them: outputs, gradients of weights and masks."""
    model = use(family.copy())
    layers: dict[str, list[hk.heads.AttentionLayer]] = {}
    names = {"decoder": "decoder_head_mask", "cross": "cross_attn_head_mask"} if model.config.is_encoder_decoder else {}
    for layer in hk.heads.attention_layers(model):
        layers.setdefault(names.get(layer.kind, "head_mask"), []).append(layer)
    masks, rows = {}, {}
    for argument, own in layers.items():
        L, H = getattr(model.config, "num_hidden_layers", len(own)), own[0].num_heads
        shape = (L, H) if len(own) == L else (H,)  # layers without heads have rows too
        masks[argument] = torch.linspace(0.3, 1.2, torch.Size(shape).numel()).view(shape)
        masks[argument][..., 1] = 0.0
        of_layers = masks[argument].requires_grad_().expand(len(own), H)
        rows |= {layer.name: row for layer, row in zip(own, of_layers, strict=True)}
    if family.name in (table := documented()):
        assert masks.keys() == set(re.findall(r"\w*head_mask", table[family.name][3]))
    return masks, with_masks(family, gated(family, rows), masks)


def with_masks(family: Family, model: Any, masks: Masks, **arguments: Tensor) -> dict[str, Tensor]:
    for mask in masks.values():
        mask.grad = None
    found = family.with_gradients(model, **arguments)
    return found | {name: mask.grad for name, mask in masks.items()}


def test_head_masks(family: Family) -> None:
    masks, expected = masks_of(family)
    assert_alike(with_masks(family, use(family.copy()), masks, **masks), expected)
    assert (expected["outputs"] - family.expected["outputs"]).abs().max() > 1e-4


def test_closed_and_pruned_heads(family: Family) -> None:
    """They give what stock does without them; stock attention runs what is left, and never with closed heads."""
    model = use(family.copy())
    layers = hk.heads.attention_layers(model)
    hk.heads.gate(model, lambda H: hk.nn.FixedGate(torch.ones(H)))
    assert_alike(family.outputs(model), family.expected["outputs"])
    hk.heads.ungate(model)

    gates = {}
    for layer in layers:
        H = torch.arange(layer.num_heads)
        gates[layer.name] = (H != 0 if layer.index % 2 else H == 1).float()
    closed = {name: (gate == 0).nonzero().flatten().tolist() for name, gate in gates.items()}
    expected = family.with_gradients(gated(family, gates))
    zeros = {name: dict.fromkeys(heads, "zero") for name, heads in closed.items()}
    with hk.heads.patch(model, zeros):
        assert_alike(family.outputs(model), expected["outputs"])
    hk.heads.close(model, closed)
    assert_alike(family.with_gradients(model), expected)

    if family.name not in ITSELF:  # whose attention transformers does not set
        model.set_attn_implementation("eager")
        assert_refused((lambda: family.outputs(model), r"'eager' in a .* its gates"))
        use(model)
    assert_refused((lambda: release(model), "model has gates on the heads of"))

    if not family.has_heads:
        words = r"layer 0 \('.*'\) is a \w+, wh(ich|ose) .*; close heads instead"
        assert_refused((lambda: hk.heads.prune(model, closed), words))
        return
    assert hk.heads.prune(model, hk.heads.closed(model)) == closed
    pruned = family.with_gradients(model)
    whole = [name for name, each in pruned.items() if each.shape == expected[name].shape]
    assert len(whole) > 4
    assert_alike({n: pruned[n] for n in whole}, {n: expected[n] for n in whole})
    for index, layer in enumerate(hk.heads.projected_layers(model)):
        assert layer.index == index
        assert layer.num_heads == int(gates[layer.name].sum())
        assert model.get_submodule(layer.name) is layer.module
    if family.name in BIASED:
        words = r"fewer heads in .* than the position bias|'eager' in a .* with \d of \d heads"
        assert_refused((lambda: family.outputs(release(model)), words))
        return
    assert_alike(family.outputs(release(model)), expected["outputs"])


def test_layers_without_heads(family: Family) -> None:
    """They give the bias of their projection, and all of their parameters have gradients (of 0), as DDP expects."""
    if family.name not in TINY:
        pytest.skip("stock code of some forms reshapes with -1")
    model, layers = with_heads(family)
    layer = layers[-1]
    expected = family.outputs(gated(family, {layer.name: torch.zeros(layer.num_heads)}))
    hk.heads.prune(model, {layer.index: range(layer.num_heads)})
    found = family.with_gradients(model)
    assert_alike(found["outputs"], expected)
    assert found.keys() == family.expected.keys()


def assert_loaded(family: Family, loaded: Any, model: Any) -> None:
    tiny_models.assert_same_states(loaded, model)
    assert_alike(family.outputs(loaded), family.outputs(model))
    for old, new in zip(*map(hk.heads.projected_layers, (model, loaded)), strict=True):
        assert (old.name, old.num_heads, old.head_dim) == (new.name, new.num_heads, new.head_dim)
        assert (old.num_key_heads, old.value.heads) == (new.num_key_heads, new.value.heads)
        assert old.layout == new.layout
        assert torch.equal(old.module.kept_heads, new.module.kept_heads)
        assert old.module.heads_before == new.module.heads_before


def assert_saved(family: Family, model: Any, folder: Path) -> None:
    """Both ways: `save_pretrained`, and a file of weights for a model of other weights."""
    model.save_pretrained(folder)
    named = {"attn_implementation": "heads_kernels", "experts_implementation": "eager"}
    assert_loaded(family, unpooled(from_pretrained(folder, type(model), **named)), model)
    hk.heads.save(model, folder / "heads.safetensors")
    whole = use(family.copy())
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(1.0)
    hk.heads.load(whole, folder / "heads.safetensors")
    assert_loaded(family, whole, model)


def test_saved_and_loaded(family: Family, tmp_path: Path) -> None:
    model, layers = with_heads(family)
    for layer in layers:
        H = layer.num_heads
        hk.heads.prune(model, {layer.index: {layer.index % H, (layer.index + 2) % H}})
    assert_saved(family, model, tmp_path)


def test_unpadded(family: Family) -> None:
    """Layers on real tokens alone; where none can, a warning says why, or `use` refuses."""
    if family.name in tiny_models.NO_PADDING:
        words = "none of whose layers takes a mask of padded tokens"
        assert_refused((lambda: use(family.copy(), unpad=True), words))
        return
    model = use(family.copy(), unpad=True)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        found = family.with_gradients(model)
    assert_alike(found, family.expected)
    assert any(tiny_models.packed_layers(model)) == (family.name not in PADDED)
    said = [str(each.message) for each in given]
    words = (PADDED | PARTLY_PADDED).get(family.name, "")
    assert bool(said) == bool(words), said
    assert all(words in each for each in said), said


def test_converted(family: Family, tmp_path: Path) -> None:
    """With all features, in all heads, masks do what they did; pruned heads are closed ones; saved, not drawn anew."""
    if family.name not in (*CONVERTIBLE, *ROTARY):
        if family.name in TURNED:
            _, layers = with_heads(family)
            words = r"layer 0 \(.*\) has (norms .* and )?rotary positions"
            assert_refused((lambda: read_heads(layers[0]), words))
        return
    masks, expected = masks_of(family)
    found = with_masks(family, convert(use(family.copy()), method="dense"), masks, **masks)
    scores = {
        id(parameter)
        for layer in hk.heads.projected_layers(family.stock)
        for projection in (layer.query, layer.key)
        for parameter in projection.linear.parameters()
    }
    own = {n for n, parameter in family.stock.named_parameters() if id(parameter) in scores}
    same = expected.keys() - own
    assert len(same) > len(expected) / 2
    assert_alike({n: found[n] for n in same}, {n: expected[n] for n in same})

    closed = convert(use(family.copy()), 12)
    pruned = copy.deepcopy(closed)
    heads = {layer.index: [1, 3] for layer in hk.heads.attention_layers(closed)}
    hk.heads.close(closed, heads)
    hk.heads.prune(pruned, heads)
    assert_alike(family.outputs(pruned), family.outputs(closed))
    assert_saved(family, pruned, tmp_path)
    before = {name: weight.clone() for name, weight in pruned.state_dict().items()}
    pruned.init_weights()
    assert_alike(pruned.state_dict(), before)


# ---------------------------------------------------------------------- the table
def test_families_in_the_documentation() -> None:
    rows = documented()
    for name, (model, *_, pruning, _) in rows.items():
        assert (model, pruning) == (TINY[name].model, "yes" if TINY[name].attention else "no")
    assert rows.keys() >= {name for name in TINY if not TINY[name].attention}
    document = tiny_models.DOCUMENT.read_text(encoding="utf-8")
    for name in (*OF_A_FORM, *tiny_models.ATTENTION_ALONE):
        assert f"`{name}`" in document
