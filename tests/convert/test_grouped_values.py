"""Converted models whose heads share keys and values: values stay grouped in weights, caches and files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.convert import install, read_heads, rotary_ragged
from heads_kernels.heads import attention_layers
from tests.convert.converted_models import ROTARY, in_use
from tests.support.alike import assert_alike
from tests.support.tiny_models import assert_same, batch, outputs, with_gradients

#: Families with 8 query heads, 2 key heads and 2 value heads of width 4.
GROUPED = [name for name in ROTARY if name != "modernbert"]
H, Hk, D = 8, 2, 4


def convert(model: Any, dim: int = H * D) -> Any:
    for layer in attention_layers(model):
        install(model, layer, rotary_ragged(read_heads(layer), dim), ragged=True)
    return model


@pytest.mark.parametrize("name", GROUPED)
def test_values_are_the_same_parameters(name: str) -> None:
    model = in_use(name)
    before = [layer.value.linear.weight for layer in attention_layers(model)]
    convert(model)
    for layer, weight in zip(attention_layers(model), before, strict=True):
        assert layer.value.linear.weight is weight
        assert (layer.num_heads, layer.value.heads, layer.value_dim) == (H, Hk, D)
        assert layer.module.num_key_value_groups == H // Hk


# ---------------------------------------------------------------------- caches
def bytes_of(cache: Any) -> int:
    """Of keys and values of all layers, a token."""
    rooms = [each for layer in cache.layers for each in (layer.keys, layer.values)]
    return sum(each.nbytes // (each.shape[0] * each.shape[2]) for each in rooms)


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("name", GROUPED)
def test_bytes_of_a_cache(name: str, implementation: str) -> None:
    """`Ds + Hk D` numbers a token and layer, instead of `2 Hk D`; the tokens are those of a pass without a cache."""
    stock, model = in_use(name), convert(in_use(name), 6)
    prompt = batch(model)["input_ids"][:1, :5]
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    found = []
    for each in (stock, model):
        made = each.generate(
            prompt, **options, cache_implementation=implementation, return_dict_in_generate=True
        )
        assert torch.equal(made.sequences, each.generate(prompt, **options, use_cache=False))
        found.append(bytes_of(made.past_key_values))
    layers, number = len(attention_layers(model)), torch.float32.itemsize
    assert found == [layers * 2 * Hk * D * number, layers * (6 + Hk * D) * number]


@torch.no_grad()
def test_bytes_of_a_cache_of_a_module() -> None:
    """`Ds + H + Hv Dv` numbers a token, and the outputs of the full pass."""
    layer = hk.nn.CollaborativeMultiheadAttention(32, H, 12, num_value_heads=Hk)
    cache, x = hk.nn.KeyValueCache(), torch.randn(3, 9, 32)
    steps = [layer(tokens, is_causal=True, cache=cache)[0] for tokens in x.split([4, 1, 4], 1)]
    assert_alike(torch.cat(steps, 1), layer(x, is_causal=True)[0])
    held = cache.append(*(each[:, :0] for each in layer.source(x, x)))
    assert sum(each.nbytes for each in held) == 3 * 9 * (12 + H + Hk * D) * x.element_size()


# ---------------------------------------------------------------------- fewer heads
#: Heads that are pruned, and the value heads that are left: those of groups of one size, or of its divisors.
PRUNED = {
    "of one group all": ([0, 1, 2, 3], 1),
    "of each as many": ([1, 2, 4, 7], 2),
    "four and two": ([5, 7], 3),
    "three and two": ([0, 5, 7], 5),
    "all": (range(H), 0),
}


@pytest.mark.parametrize(("gone", "left"), PRUNED.values(), ids=PRUNED)
def test_pruning(gone: list[int], left: int, tmp_path: Path) -> None:
    closed, pruned = (convert(in_use("llama"), 14) for _ in range(2))
    hk.heads.close(closed, {0: gone, 1: [0]})
    hk.heads.prune(pruned, {0: gone, 1: [0]})
    assert attention_layers(pruned)[0].value.heads == left
    assert_alike(outputs(pruned), outputs(closed))
    hk.heads.save(pruned, tmp_path / "model.safetensors")
    loaded = in_use("llama")
    hk.heads.load(loaded, tmp_path / "model.safetensors")
    assert_same(loaded, pruned)
    pruned.save_pretrained(tmp_path)
    assert_same(hk.integrations.transformers.from_pretrained(tmp_path, type(pruned)), pruned)


def test_pruning_in_steps_is_recorded(tmp_path: Path) -> None:
    """Groups of 4 and 2 heads become three of 2, and those four of 1: at once they would be two of 2."""
    model = convert(in_use("qwen2"), 14)
    hk.heads.prune(model, {0: [5, 7]})
    hk.heads.prune(model, {0: [0, 2]})
    assert attention_layers(model)[0].value.heads == 4
    model.save_pretrained(tmp_path)
    loaded = hk.integrations.transformers.from_pretrained(tmp_path, type(model))
    assert attention_layers(loaded)[0].value.heads == 4
    assert_same(loaded, model)


def test_files_of_ordinary_heads_without_their_number_of_values(tmp_path: Path) -> None:
    """Records that say nothing of value heads mean one for each head, as they were before."""
    model = in_use("modernbert")
    convert(model, 14)
    hk.heads.prune(model, {0: [1]})
    shapes = copy.deepcopy(hk.heads.shapes(model))
    for shape in shapes["pruned"].values():
        shape.pop("value_heads", None)
    other = in_use("modernbert")
    hk.heads.apply_shapes(other, shapes)
    other.load_state_dict(model.state_dict())
    assert_same(other, model)


# ---------------------------------------------------------------------- analysis, batches, compilation
def analysed(model: Any) -> dict[str, Tensor]:
    """What the heads do, and how much they matter."""
    ids = batch(model)["input_ids"]
    data = [{"input_ids": ids, "labels": ids}]

    def loss(model: Any, batch: Any) -> Tensor:
        found: Tensor = model(**batch).loss
        return found

    found = {"confidence": hk.analysis.statistics(model, data).confidence.table()}
    for method in ("gradient", "leave_one_out"):
        found[method] = hk.analysis.importance(model, data, loss, method=method).table()
    return {name: table.float() for name, table in found.items()}  # as the model computes


def test_statistics_and_importance_stay() -> None:
    model = in_use("mistral")
    expected = analysed(model)
    assert_alike(analysed(convert(model)), expected)


def test_unpadded_batches() -> None:
    model = convert(in_use("llama"), 14)
    expected = outputs(model)
    assert_alike(outputs(hk.integrations.transformers.use(model, unpad=True)), expected)


@pytest.mark.check
def test_compile() -> None:
    model = convert(in_use("llama", num_hidden_layers=1), 14)
    expected = with_gradients(model, use_cache=False)
    found = with_gradients(
        torch.compile(model, fullgraph=True, backend="aot_eager"), use_cache=False
    )
    assert_alike(found, {f"_orig_mod.{n}" if n != "outputs" else n: g for n, g in expected.items()})
