"""Converted models whose heads share keys and values: values stay grouped in weights, caches and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import heads_kernels as hk
from heads_kernels.convert import collaborate
from heads_kernels.heads import projected_layers
from heads_kernels.nn import GatedMultiheadAttention
from tests.convert.converted_models import convert, in_use
from tests.support.alike import assert_alike
from tests.support.tiny_models import assert_same, batch, outputs

#: Query heads, value heads and their width in the grouped families.
H, Hk, D = 8, 2, 4


def bytes_of(cache: Any) -> int:
    """Of keys and values of all layers, a token."""
    kept = [each for layer in cache.layers for each in (layer.keys, layer.values)]
    return sum(each.nbytes // (each.shape[0] * each.shape[2]) for each in kept)


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_values_and_the_bytes_of_a_cache(implementation: str) -> None:
    """Values are the same parameters; `Ds + Hk D` numbers a token and layer, instead of `2 Hk D`."""
    stock, model = in_use("llama"), in_use("llama")
    before = [layer.value.linear.weight for layer in projected_layers(model)]
    convert(model, 6)
    for layer, weight in zip(projected_layers(model), before, strict=True):
        assert layer.value.linear.weight is weight
        assert (layer.num_heads, layer.value.heads, layer.value_dim) == (H, Hk, D)
        assert layer.module.num_key_value_groups == H // Hk
    prompt = batch(model)["input_ids"][:1, :5]
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    options |= {"cache_implementation": implementation, "return_dict_in_generate": True}
    found = [bytes_of(each.generate(prompt, **options).past_key_values) for each in (stock, model)]
    layers, number = len(projected_layers(model)), torch.float32.itemsize
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
def test_pruning(steps: list[list[int]], left: int, tmp_path: Path) -> None:
    pruned = convert(in_use("llama"), 14)
    for gone in steps:
        hk.heads.close(pruned, {0: gone, 1: [0]})
        expected = outputs(pruned)
        hk.heads.prune(pruned, hk.heads.closed(pruned))
    assert projected_layers(pruned)[0].value.heads == left
    assert_alike(outputs(pruned), expected)
    hk.heads.save(pruned, tmp_path / "model.safetensors")
    loaded = in_use("llama")
    hk.heads.load(loaded, tmp_path / "model.safetensors")
    assert_same(loaded, pruned)


def test_files_without_a_number_of_value_heads() -> None:
    """Records that say nothing of value heads mean one for each head, as they were before."""
    model = convert(in_use("modernbert"), 14)
    hk.heads.prune(model, {0: [1]})
    shapes = hk.heads.shapes(model)
    for shape in shapes["pruned"].values():
        shape.pop("value_heads", None)
    other = in_use("modernbert")
    hk.heads.apply_shapes(other, shapes)
    other.load_state_dict(model.state_dict())
    assert_same(other, model)


def test_what_grouped_keys_had_is_counted() -> None:
    model = torch.nn.Sequential(GatedMultiheadAttention(32, H, num_key_heads=Hk))
    parts = [model[0].q_proj, model[0].k_proj]
    before = sum(each.numel() for part in parts for each in part.parameters())
    found = collaborate(model, 32)
    [report] = found.reports
    assert report.parameters_before == before == 32 * 32 + 32 * 8 + 32 + 8
    assert found.parameters > found.parameters_before
    T, F = report.length, report.executed_features
    # projections of queries, keys and values, scores, weighted values, output
    rows = 2 * T * 32 * (H * D + 2 * Hk * D + 32)
    assert report.flops_before == rows + 2 * 2 * T * T * H * D
    # One key of 32 features and content biases in the place of 2 keys of 4; values are grouped as before.
    rows += 2 * T * 32 * (32 - Hk * D + H)
    assert report.flops == rows + T * F + T * T * H + 2 * T * T * (F + H * D)
    assert report.break_even == 0
    found = collaborate(torch.nn.Sequential(GatedMultiheadAttention(32, H, num_key_heads=Hk)), 5)
    assert found.reports[0].break_even == round(32 * (32 + 8 - 2 * 5) / (8 * 5 - 32))
