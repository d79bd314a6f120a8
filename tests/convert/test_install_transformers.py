"""Factors put into transformers models: what those compute, keep in caches and files, and what is refused.

tests/transformers has full-rank factors of every family (test_families.py) and decoding (test_generation.py).
"""

import copy
import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.convert import collaborate
from heads_kernels.convert.collaborate import read_heads
from heads_kernels.heads import projected_layers
from heads_kernels.heads.shared import SharedProjection
from heads_kernels.integrations.transformers import from_pretrained, release
from tests.convert.converted_models import convert, in_use
from tests.support.alike import assert_alike
from tests.support.dispatched import Ops
from tests.support.nn_layers import House
from tests.support.refusals import assert_refused
from tests.support.tiny_models import assert_same_states, batch, build, outputs, transformers

ALL_ATTENTION_FUNCTIONS = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS


# ---------------------------------------------------------------------- what is computed
def test_gpt2_with_scales_by_layer() -> None:
    changes = {"scale_attn_by_inverse_layer_idx": True}
    expected = outputs(build("gpt2", "sdpa", **changes))
    assert_alike(outputs(convert(in_use("gpt2", **changes))), expected)


def test_cross_attention_of_gpt2(tmp_path: Path) -> None:
    """With a query of its own, and a fused key and value; of a model made of two, which is saved and loaded."""
    parts = {"encoder": build("bert"), "decoder": build("gpt2", add_cross_attention=True)}
    stock = transformers.EncoderDecoderModel(**parts).double().eval()
    model = convert(hk.integrations.transformers.use(copy.deepcopy(stock)), method="dense")
    arguments = batch(stock)
    arguments |= {"decoder_input_ids": arguments["input_ids"][:, :5]}
    found, expected = (each(**arguments).logits for each in (model, stock))
    assert_alike(found, expected)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path, transformers.EncoderDecoderModel, dtype=torch.float64)
    assert_same_states(loaded, model)
    assert loaded.decoder.config._attn_implementation == "heads_kernels"
    assert_alike(loaded(**arguments).logits, found)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_parts_and_their_training(name: str) -> None:
    """They have the gradients that the projections were asked for; zeros of ragged stay."""
    model = in_use(name)
    frozen = projected_layers(model)[0]
    frozen.key.linear.requires_grad_(name == "gpt2")  # whose projections are fused
    value = frozen.value.linear.weight
    convert(model, 12)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    before = {}
    for layer in projected_layers(model):
        assert layer.layout.shared
        assert (layer.num_heads, layer.head_dim, layer.value_dim) == (4, 12, 8)
        own = [layer.module.mixing]
        for projection in (layer.query, layer.key):
            assert isinstance(projection.linear, SharedProjection)
            own += projection.linear.parameters()
        before |= {part: part.detach().clone() for part in own if part.requires_grad}
    first = projected_layers(model)[0]
    assert first.key.linear.content.weight.requires_grad == (name == "gpt2")
    assert name == "gpt2" or first.value.linear.weight is value
    for _ in range(2):
        optimiser.zero_grad()
        outputs(model.train()).square().mean().backward()
        optimiser.step()
    assert all(not torch.equal(old, new) for new, old in before.items())
    assert all(layer.module.mixing.count_nonzero() == 12 for layer in projected_layers(model))


#: Operations that write a copy.
COPIES = ("clone", "copy_", "cat", "_to_copy", "repeat", "index_select", "constant_pad_nd")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_a_cache_of_shared_keys(cache: str) -> None:
    """One key of all heads and the content biases; a step copies neither it nor weights, but for what stock does."""
    model = convert(in_use("gpt2"), 12, "cp")
    past = transformers.DynamicCache()
    if cache == "static":
        past = transformers.StaticCache(config=model.config, max_cache_len=60)
    model(torch.randint(3, 40, (2, 40)), past_key_values=past)
    for layer in past.layers:
        assert layer.keys.shape[1::2] == (1, 16)  # 12 features, 4 content biases
        assert layer.values.shape[1::2] == (4, 8)
    others = [copy.deepcopy(past), pickle.loads(pickle.dumps(past))]
    if cache == "dynamic":  # made anew from tensors, as data parallel code does
        kept = [(layer.keys, layer.values) for layer in past.layers]
        others.append(transformers.DynamicCache(kept))
    token = torch.randint(3, 40, (2, 1))
    with Ops() as ops:
        expected = model(token, past_key_values=past).logits
    named = zip((name.removeprefix("aten::") for name in ops.names), ops.ran, strict=True)
    copies = [(name, tuple(out.shape)) for name, (*_, out) in named if name in COPIES]
    large = [name for name, shape in copies if len(shape) > 2 and {41, 60} & set(shape)]
    assert large == (["cat"] * 2 * len(past.layers) if cache == "dynamic" else [])
    weights = {(12, 32), (32, 12), (16, 32), (32, 16), (32, 32), (96, 32), (32, 96)}
    assert not weights & {shape for _, shape in copies}
    for each in others:
        assert_alike(model(token, past_key_values=each).logits, expected)


# ---------------------------------------------------------------------- heads that share keys and values
#: Query heads, value heads and their width in the grouped families.
H, Hk, D = 8, 2, 4


def test_values_stay_grouped() -> None:
    """Values are the same parameters; a cache has `Ds + Hk D` numbers a token and layer, instead of `2 Hk D`."""
    model = in_use("llama")
    before = [layer.value.linear.weight for layer in projected_layers(model)]
    convert(model, 6)
    for layer, weight in zip(projected_layers(model), before, strict=True):
        assert layer.value.linear.weight is weight
        assert (layer.num_heads, layer.value.heads, layer.value_dim) == (H, Hk, D)
        assert layer.module.num_key_value_groups == H // Hk
    for each in model(batch(model)["input_ids"]).past_key_values.layers:
        assert (each.keys.shape[1::2], each.values.shape[1::2]) == ((1, 6), (Hk, D))


#: Heads that are pruned, one step after the other, and the value heads that are left: those of groups of one size, or
#: of its divisors. At once, the last would be two of 2.
PRUNED: list[tuple[list[list[int]], int]] = [
    ([[0, 1, 2, 3]], 1),
    ([[1, 2, 4, 7]], 2),
    ([[5, 7]], 3),
    ([[0, 5, 7]], 5),
    ([list(range(H))], 0),
    ([[5, 7], [0, 2]], 4),
]


@pytest.mark.parametrize(("steps", "left"), PRUNED)
def test_pruned_groups_of_values(steps: list[list[int]], left: int) -> None:
    """tests/transformers/test_families.py has their files."""
    pruned = convert(in_use("llama"), 14)
    for gone in steps:
        hk.heads.close(pruned, {0: gone, 1: [0]})
        expected = outputs(pruned)
        hk.heads.prune(pruned, hk.heads.closed(pruned))
    assert projected_layers(pruned)[0].value.heads == left
    assert_alike(outputs(pruned), expected)


# ---------------------------------------------------------------------- files
def test_the_record_is_in_the_config(tmp_path: Path) -> None:
    """Names read well, and other entries stay."""
    model = in_use("bert", model="BertForSequenceClassification")
    convert(model, 13)
    names = [f"bert.encoder.layer.{n}.attention.self" for n in range(2)]
    shapes = {name.removeprefix("bert."): {"dim": 13, "ragged": True} for name in names}
    assert model.config.heads_kernels == {"converted": shapes}
    found = {
        name.removeprefix(f"{names[0]}."): list(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name.startswith(names[0]) and "value" not in name
    }
    assert found == {"mixing": [4, 13], "query.weight": [13, 32], "key.weight": [13, 32], "key.content.weight": [4, 32]}
    model.config.heads_kernels["another"] = 1
    hk.heads.prune(model, {1: [0]})
    left = {"heads": [1, 2, 3], "key_heads": 1, "head_dim": 13, "value_dim": 8}
    pruned = {names[1].removeprefix("bert."): left}
    assert model.config.heads_kernels == {"another": 1, "pruned": pruned, "converted": shapes}
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert written["heads_kernels"] == model.config.heads_kernels


def test_files_of_converted_and_of_whole_models(tmp_path: Path) -> None:
    """What a file needs is said, and nothing is changed."""
    converted, stock, path = convert(in_use("bert"), 13), build("bert", "sdpa"), tmp_path / "model.safetensors"
    hk.heads.save(converted, path)
    assert_refused((lambda: hk.heads.load(stock, path), "attn_implementation is 'sdpa'"), unchanged=[stock])
    hk.heads.save(stock, path)
    assert_refused((lambda: hk.heads.load(converted, path), "before pruning and conversion"), unchanged=[converted])


# ---------------------------------------------------------------------- copies
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_other_attention_is_refused(implementation: str, tmp_path: Path) -> None:
    """In the model, a copy, and one that is loaded so."""
    model = convert(in_use("bert"), 28, "cp")  # padded to 4 and to 4 heads of 8: stock attention would not notice
    expected = outputs(model)
    model.save_pretrained(tmp_path)
    copied = copy.deepcopy(model)
    assert_alike(outputs(copied), expected)
    refusal = f"attn_implementation is '{implementation}' in a BertSelf"
    assert_refused(
        (lambda: release(copied), "share queries and keys in 'encoder"),
        (lambda: from_pretrained(tmp_path, attn_implementation=implementation), refusal),
        unchanged=[copied],
    )
    for each in (model, copied):
        each.set_attn_implementation(implementation)
        assert_refused((partial(outputs, each), refusal))
        each.set_attn_implementation("heads_kernels")
        assert_alike(outputs(each), expected)


# ---------------------------------------------------------------------- layers that cannot be converted
def test_layers_that_cannot_be_read() -> None:
    class Attention(transformers.models.llama.modeling_llama.LlamaAttention):
        """Perhaps with norms."""

    without_heads, with_nan, subclassed = build("bert"), build("gpt2"), in_use("llama")
    hk.heads.prune(without_heads, {0: range(4)})
    with_nan.transformer.h[0].attn.c_attn.weight.data[3, 40] = torch.nan
    subclassed.model.layers[0].self_attn.__class__ = Attention
    assert_refused(
        ((without_heads,), "layer 0 .*has no heads left"),
        ((with_nan,), r"layer 0 \('transformer.h.0.attn'\): key holds NaN"),
        ((subclassed,), "layer 0 .* is a Attention, which may do more than"),
        ((convert(in_use("bert")),), "layer 0 .*is collaborative already"),
        of=lambda model: read_heads(projected_layers(model)[0]),
    )


@pytest.mark.parametrize(
    ("change", "terms", "words"),
    [
        (partial(nn.functional.normalize, dim=-1), {}, "scores are not products"),
        (partial(torch.clamp, min=-20, max=20), {}, "scores are not products"),
        (nn.Identity(), {"softcap": 50.0}, "key bias, .* softcap or sinks"),
        (nn.Identity(), {"s_aux": torch.zeros(4)}, "key bias, .* softcap or sinks"),
    ],
)
def test_what_a_subclass_adds_is_found(change: Callable[[Tensor], Tensor], terms: dict[str, Any], words: str) -> None:
    """A norm of queries, a bound that random ones do not reach, and terms with which a bias of keys matters."""

    class Changed(transformers.models.vit.modeling_vit.ViTAttention):
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            query, key, value = (
                each(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                for each in (self.q_proj, self.k_proj, self.v_proj)
            )
            out, weights = ALL_ATTENTION_FUNCTIONS["heads_kernels"](self, change(query), key, value, None, **terms)
            return self.o_proj(out.flatten(2)), weights

    model = in_use("vit")
    model.layers[1].attention.__class__ = Changed
    said = f"layer 1 .* is a Changed, whose {words}"
    assert_refused((lambda: collaborate(model, 8, progress=False), said), unchanged=[model])
    collaborate(model, 8, layers=[0], progress=False)
    if terms:
        model.layers[1].attention.k_proj.bias = None
        expected = outputs(model)
        collaborate(model, 32, layers=[1], progress=False)
        assert_alike(outputs(model), expected)


class Fused(House):
    """Attention of someone else: one projection, split in equal parts."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        del self.q, self.k, self.v
        self.qkv, self.head_dim, self.scaling = nn.Linear(32, 96), self.width, 8**-0.5
        if config is not None:
            self.config = config

    def operands(self, x: Tensor) -> list[Tensor]:
        return [self.split(part) for part in self.qkv(x).chunk(3, dim=-1)]


@pytest.mark.parametrize("in_transformers", [False, True])
def test_modules_of_others_are_read_and_not_converted(in_transformers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = hk.heads.HeadLayout("other", "qkv", "qkv", "qkv", "out", scale="scaling")
    monkeypatch.setitem(hk.heads.layouts.LAYOUTS, "Fused", layout)
    model = nn.Sequential(Fused(in_use("bert").config if in_transformers else None))
    heads = read_heads(projected_layers(model)[0])
    assert torch.equal(heads.key.flatten(0, 1), model[0].qkv.weight[32:64].double())
    assert heads.scale == 8**-0.5
    said = "one projection for several roles" if in_transformers else "is a Fused; layers of"
    kind = ValueError if in_transformers else TypeError
    assert_refused((lambda: collaborate(model, 8, progress=False), kind, said), unchanged=[model])
    del model[0].scaling
    assert_refused((lambda: read_heads(projected_layers(model)[0]), "is a Fused without 'scaling'"))
