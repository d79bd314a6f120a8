"""Readings of heads against maps in memory, of stock models and of the package's modules; statistics under options."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.analysis.statistics import MEASURES
from tests.analysis.attention_maps import (
    Maps,
    assert_reads,
    assert_received,
    layers,
    of_kind,
    padded_layers,
    stock_maps,
)
from tests.support import tiny_models
from tests.support.alike import assert_alike
from tests.support.nn_layers import Layers, spread

use = hk.integrations.transformers.use
FAMILIES = [
    "albert", "bert", "modernbert", "vit", "bart", "t5", "gpt2", "gemma3_text", "qwen3_next", "llama",
    "mistral",
]  # fmt: skip


def assert_readings(model: Any, batch: Any, expected: dict[str, Maps]) -> None:
    """Statistics, what tokens receive, distances and maps, by kind of layer."""
    statistics = hk.analysis.statistics(model, [batch])
    received = {rows: hk.analysis.received(model, [batch], last_rows=rows) for rows in (None, 1, 4)}
    examples = range(len(next(iter(expected.values())).rows))
    of_examples = [hk.analysis.maps(model, batch, example=example) for example in examples]
    for kind, maps in expected.items():
        assert_reads(statistics, maps, kind)
        for last_rows, found in received.items():
            assert_received(found, maps, kind, last_rows)
        distance = hk.analysis.distance(model, [batch], kind=kind)
        assert_alike(distance.matrix, maps.divergences(), dtype=torch.float32)
        L, _, H = maps.maps.shape[:3]
        assert (distance.kind, distance.rows, len(distance.layers)) == (kind, maps.rows.sum(), L)
        assert distance.heads == tuple((layer, head) for layer in range(L) for head in range(H))
        for example, of_layers in enumerate(of_examples):
            own = [one for one in of_layers if one.kind == kind]
            for one, of_layer in zip(own, maps.maps[:, example], strict=True):
                real = of_layer[:, maps.rows[example]][:, :, maps.keys[example]]
                assert_alike(one.maps, real, dtype=torch.float32)
                assert one.heads == tuple(range(H))


@pytest.mark.parametrize("name", FAMILIES)
def test_readings_of_families(name: str) -> None:
    """Padding on the right and on the left, causal, windows, grouped keys, position biases, cross-attention."""
    stock = tiny_models.build(name).double()
    batch = tiny_models.batch(stock)
    model = use(copy.deepcopy(stock))
    assert_readings(model, batch, stock_maps(stock, batch))


@pytest.mark.parametrize(("left", "causal"), [(False, False), (False, True), (True, True)])
def test_readings_of_modules(left: bool, causal: bool) -> None:
    """Grouped heads and collaborative ones."""
    model, batch, maps = padded_layers(left, causal)
    assert_readings(model, batch, {hk.heads.attention_layers(model)[0].kind: maps})


# ---------------------------------------------------------------------- sets of tokens
SETS = {"some": [5, 6, 7, 8, 9], "even": list(range(0, 40, 2))}


def read(model: nn.Module, *data: Any, **options: Any) -> hk.analysis.HeadStatistics:
    return hk.analysis.statistics(model, list(data), **options)


def assert_same(found: hk.analysis.HeadStatistics, expected: hk.analysis.HeadStatistics) -> None:
    assert found.rows == expected.rows
    for name, scores in expected.measures.items():
        assert_alike(found.measures[name].table(), scores.table(), name=name)
    assert all(map(torch.equal, found.offsets, expected.offsets))


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_token_sets_and_excluded_keys(name: str) -> None:
    stock = tiny_models.build(name).double()
    arguments = tiny_models.batch(stock)
    found = read(use(copy.deepcopy(stock)), arguments, exclude_keys=SETS["even"], token_sets=SETS)
    assert list(found.measures) == [*MEASURES, "to_some", "to_even"]
    for kind, maps in stock_maps(stock, arguments).items():
        ids = arguments["decoder_input_ids" if kind == "decoder" else "input_ids"]
        for key, tokens in SETS.items():
            members = torch.isin(ids, torch.tensor(tokens))[:, None]
            assert_alike(of_kind(found.to_tokens[key], kind), maps.share(members))
        odd = (ids % 2 == 1)[None, :, None, None]
        allowed = maps.maps.masked_fill(~odd, -1.0)
        assert_alike(of_kind(found.confidence, kind), maps.mean(allowed.amax(-1).clamp(min=0)))
        entropy = maps.measures()["entropy"]  # nothing is renormalised
        assert_alike(of_kind(found.entropy, kind), entropy)


def test_sets_by_a_function_of_the_batch() -> None:
    model = use(tiny_models.build("bart").double())
    arguments = tiny_models.batch(model)

    def five(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"encoder": batch["input_ids"] == 5, "decoder": batch["decoder_input_ids"] == 5}

    by_function = read(model, arguments, token_sets={"five": five}).to_tokens["five"]
    by_ids = read(model, arguments, token_sets={"five": [5]}).to_tokens["five"]
    for kind in ("encoder", "decoder"):
        assert_alike(of_kind(by_function, kind), of_kind(by_ids, kind))
    assert not of_kind(by_function, "cross").any()


def test_rows_without_an_allowed_key_have_no_offset() -> None:
    model, x = layers(), torch.randn(2, 6, 16, dtype=torch.float64)
    found = read(model, x, exclude_keys=lambda batch: torch.ones(2, 6, dtype=torch.bool))
    assert not any(counts.any() for counts in found.offsets)
    assert not found.confidence.table().any()


# ---------------------------------------------------------------------- other ways to the same numbers
def test_a_dense_mask_reads_as_a_native_one() -> None:
    model, x = layers(), torch.randn(2, 40, 16, dtype=torch.float64)
    dense = torch.ones(40, 40, dtype=torch.bool).triu(1)
    assert_same(read(model, {"x": x, "attn_mask": dense}), read(model, {"x": x, "is_causal": True}))


def test_rows_behind_a_cache() -> None:
    class Steps(Layers):
        def forward(self, x: Tensor, parts: list[int]) -> None:
            cache = hk.nn.KeyValueCache()
            for part in x.split(parts, 1):
                self.layers[0](part, is_causal=True, cache=cache)

    attention = spread(hk.nn.GatedMultiheadAttention(16, 4, dtype=torch.float64))
    model, x = Steps(attention), torch.randn(2, 9, 16, dtype=torch.float64)
    assert_same(read(model, (x, [4, 1, 3, 1])), read(model, (x, [9])))


def test_places_are_exact_in_half_precision() -> None:
    model = Layers(hk.nn.GatedMultiheadAttention(16, 4)).bfloat16()
    for weight in model.parameters():
        nn.init.zeros_(weight)  # every row attends to all keys alike
    places = torch.arange(600.0)
    distance = (places[:, None] - places).abs().mean().double()
    found = read(model, torch.randn(1, 600, 16).bfloat16()).distance.table()
    assert_alike(found, distance.expand(1, 4), dtype=torch.float32)


def test_received_refuses() -> None:
    model, x = layers(), torch.randn(2, 6, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="last_rows is 0; pass an int of at least 1"):
        hk.analysis.received(model, [x], last_rows=0)

    class Steps(Layers):
        def forward(self, x: Tensor) -> None:
            cache = hk.nn.KeyValueCache()
            for part in x.split(3, 1):
                self.layers[0](part, is_causal=True, cache=cache)

    steps = Steps(spread(hk.nn.GatedMultiheadAttention(16, 4, dtype=torch.float64)))
    with pytest.raises(ValueError, match=r"data has a pass in which .* runs on different tokens"):
        hk.analysis.received(steps, [x])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"token_sets": [5]}, "token_sets is a list"),
    ({"token_sets": {"x": lambda b: b["input_ids"][:, :2] == 5}}, r"token_sets\['x'\] is torch.b"),
    ({"token_sets": {"x": "five"}}, r"token_sets\['x'\] is a str"),
    ({"exclude_keys": lambda b: b["input_ids"][:, :2] == 5}, r"has shape \[3, 2\]; .* = \[9\]"),
    ({"exclude_keys": lambda b: b["input_ids"]}, "exclude_keys has dtype torch.int64"),
    ({"exclude_keys": lambda b: None}, "exclude_keys gave a NoneType; give a bool tensor"),
    ({"exclude_keys": lambda b: {"encoder": None}}, "exclude_keys gave a NoneType"),
    ({"exclude_keys": lambda b: {"self": b["input_ids"] == 5}}, "gave the kind 'self'"),
    ({"token_sets": {"x": lambda b: [True]}}, r"token_sets\['x'\] gave a list"),
]


@pytest.mark.parametrize("name", ["bert", "t5"])  # whose position bias goes another way
def test_bad_sets(name: str) -> None:
    model = use(tiny_models.build(name))
    arguments = tiny_models.batch(model)
    for options, words in BAD:
        with pytest.raises((TypeError, ValueError), match=words):
            read(model, arguments, **options)
    with pytest.raises(ValueError, match=r"token_sets\['x'\] .* a batch has no '\w*input_ids'"):
        read(model, arguments["input_ids"], token_sets={"x": [5]})
    last = torch.arange(9) == 8
    for keys in (last, last[None], last.expand(3, 9)):
        read(model, arguments, exclude_keys=lambda batch, keys=keys: {"encoder": keys})
