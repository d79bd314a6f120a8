"""Readings of heads against maps in memory: of stock attention of transformers models, and of the package's modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import heads_kernels as hk
from tests.analysis.attention_maps import (
    Maps,
    assert_reads,
    assert_received,
    padded_layers,
    stock_maps,
)
from tests.support import tiny_models
from tests.support.alike import assert_alike

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
def test_families(name: str) -> None:
    """Padding on the right and on the left, causal, windows, grouped keys, position biases, cross-attention."""
    stock = tiny_models.build(name).double()
    batch = tiny_models.batch(stock)
    model = hk.integrations.transformers.use(copy.deepcopy(stock))
    assert_readings(model, batch, stock_maps(stock, batch))


@pytest.mark.parametrize(("left", "causal"), [(False, False), (False, True), (True, True)])
def test_modules(left: bool, causal: bool) -> None:
    """Grouped heads and collaborative ones."""
    model, batch, maps = padded_layers(left, causal)
    assert_readings(model, batch, {hk.heads.attention_layers(model)[0].kind: maps})
