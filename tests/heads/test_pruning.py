"""Pruned models compute what they computed with those heads closed: key heads, sizes, what is refused.

tests/transformers/test_families.py has every family, tests/nn/test_modules.py the package's own modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.model_state import state
from tests.support.tiny_models import as_linear, build, outputs


@contextmanager
def closed_by_hand(model: Any, heads: dict[int, list[int]]) -> Iterator[None]:
    """For a while the columns of W_O are 0 where their head is closed."""
    linears = {layer.output.linear: layer for layer in hk.heads.projected_layers(model)}
    before = {linear: linear.weight.detach().clone() for linear in linears}
    for linear, layer in linears.items():
        columns = layer.output.features(heads.get(layer.index, []))
        as_linear(linear, linear.weight.data)[:, columns] = 0.0
    yield
    for linear, weight in before.items():
        linear.weight.data.copy_(weight)


@pytest.mark.parametrize(("name", "changes"), [("bert", {"is_decoder": True}), ("gpt2", {})])
def test_cross_attention_beside_a_cache(name: str, changes: dict[str, bool]) -> None:
    for gone in ([1], [0, 1, 2, 3]):
        model = build(name, add_cross_attention=True, **changes).double()
        memory = torch.randn(3, 4, 32, dtype=torch.float64)
        heads = {layer.index: gone for layer in hk.heads.attention_layers(model)}
        with closed_by_hand(model, heads):
            expected = outputs(model, encoder_hidden_states=memory)
        hk.heads.prune(model, heads)
        assert_alike(outputs(model, encoder_hidden_states=memory), expected)


@pytest.mark.parametrize(
    ("gone", "key_heads"),
    [
        ([0, 1, 2, 3], [1]),  # a whole group drops its key head
        ([0, 1, 6, 7], [0, 1]),  # equal groups of 2 keep theirs
        ([0], [0, 0, 0, 1, 1, 1, 1]),  # 3 and 4 heads: none in common
        ([0, 5, 6, 7], [0, 0, 0, 1]),
        ([2, 3], [0, 1, 1]),  # 2 and 4: groups of 2
        ([0, 1, 2, 4, 5, 6, 7], [0]),
    ],
)
def test_key_heads_of_grouped_queries(gone: list[int], key_heads: list[int]) -> None:
    model = build("llama").double()
    old = hk.heads.projected_layers(model)[0]
    rows = old.key.linear.weight.detach().clone()
    with closed_by_hand(model, {0: gone}):
        expected = outputs(model)
    hk.heads.prune(model, {0: gone})
    layer = hk.heads.projected_layers(model)[0]
    assert layer.num_key_heads == len(key_heads)
    assert layer.module.num_key_value_groups == (8 - len(gone)) // len(key_heads)
    assert torch.equal(layer.key.linear.weight, rows[old.key.features(key_heads)])
    assert_alike(outputs(model), expected)


def test_new_parameters_keep_dtype_and_requires_grad() -> None:
    model = build("gpt2").to(torch.bfloat16)
    attention = model.transformer.h[0].attn
    attention.c_attn.weight.requires_grad_(False)
    hk.heads.prune(model, {0: [2]})
    assert attention.c_attn.weight.dtype == torch.bfloat16
    assert [p.requires_grad for p in attention.c_attn.parameters()] == [False, True]
    assert (attention.c_attn.nf, attention.c_proj.nx, attention.num_heads) == (72, 24, 3)


def test_pruning_twice_adds_up_and_numbers_heads_anew() -> None:
    once, twice = build("bert").double(), build("bert").double()
    hk.heads.prune(once, {1: [0, 2]})
    hk.heads.prune(twice, {1: [0]})
    hk.heads.prune(twice, {1: [1]})
    assert_alike(outputs(once), outputs(twice))
    attention = twice.encoder.layer[1].attention.self
    assert attention.kept_heads.tolist() == [1, 3]
    with pytest.raises(ValueError, match="has head 2; it has heads 0 to 1, 2 in all"):
        hk.heads.prune(twice, {1: [2]})
    hk.heads.prune(twice, {1: [0, 1]})
    with pytest.raises(ValueError, match="it has no head left"):
        hk.heads.prune(twice, {1: [0]})


NAME = "encoder.layer.0.attention.self"
BAD: list[tuple[Any, str]] = [
    ({0: [1], 5: [0]}, "names layer 5; this model has layers 0 to 1: 'encoder"),
    ({0: [1], "attention": [0]}, "names layer 'attention'"),
    ({0: [1], 1: [4]}, r"layer 1 \('encoder.* has head 4; it has heads 0 to 3, 4 in all"),
    ({NAME: [-1]}, "has head -1"),
    ({True: [1]}, "names layer True"),
    ({torch.tensor(True): [1]}, r"names layer tensor\(True\)"),
    *((heads, "heads") for heads in ({0: 1}, {0: [True]}, {0: [0.5]}, {0: "01"}, [0])),
    # A mask is no list of numbers: as one, these would be heads 0 and 1.
    *(
        (
            {0: torch.tensor(heads)},
            r"heads of layer 0 \(.*pass (integers|a list of heads); it has heads 0",
        )
        for heads in ([True, False, False, True], [0.0], [[0, 1]], 1)
    ),
]


def test_bad_input() -> None:
    model = build("bert")
    before = state(model)
    for heads, refusal in BAD:
        with pytest.raises((TypeError, ValueError), match=refusal):
            hk.heads.prune(model, heads)
    assert state(model) == before


@pytest.mark.parametrize("tied", ["query and key", "modules", "parameters"])
def test_tied_projections_are_refused(tied: str) -> None:
    """Query and key of a layer are one module, or two layers have one, or one parameter."""
    model = build("bert")
    first, second = (layer.attention for layer in model.encoder.layer)
    if tied == "query and key":
        second.self.key = second.self.query
    elif tied == "modules":
        second.output.dense = first.output.dense
    else:
        second.self.value.weight = first.self.value.weight
    layers = hk.heads.projected_layers(model)
    assert [(layer.num_heads, layer.num_key_heads) for layer in layers] == [(4, 4)] * 2
    before = state(model)
    message = r"layer 1 .*shares projections with other roles or layers"
    with pytest.raises(ValueError, match=message):
        hk.heads.prune(model, {1: [0]})
    assert state(model) == before
