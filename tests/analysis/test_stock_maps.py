"""Readings of heads of transformers models against the maps of their stock attention."""

from __future__ import annotations

import copy

import pytest
import torch

import heads_kernels as hk
from tests.analysis.attention_maps import assert_reads, assert_received, stock_maps
from tests.support import tiny_models
from tests.support.alike import assert_alike

FAMILIES = [
    "albert", "bert", "modernbert", "vit", "bart", "t5", "gpt2", "gemma3_text", "qwen3_next", "llama",
    "mistral",
]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_readings(name: str) -> None:
    """Padding on the right and on the left, causal, windows, grouped keys, position biases, cross-attention."""
    stock = tiny_models.build(name).double()
    arguments = tiny_models.batch(stock)
    model = hk.integrations.transformers.use(copy.deepcopy(stock))
    statistics = hk.analysis.statistics(model, [arguments])
    received = hk.analysis.received(model, [arguments])
    examples = range(len(arguments[stock.main_input_name]))
    of_examples = [hk.analysis.maps(model, arguments, example=example) for example in examples]
    for kind, maps in stock_maps(stock, arguments).items():
        assert_reads(statistics, maps, kind)
        assert_received(received, maps, kind)
        found = hk.analysis.distance(model, [arguments], kind=kind)
        assert_alike(found.matrix, maps.divergences(), dtype=torch.float32)
        L, _, H = maps.maps.shape[:3]
        assert (found.kind, found.rows, len(found.layers)) == (kind, int(maps.rows.sum()), L)
        assert found.heads == tuple((layer, head) for layer in range(L) for head in range(H))
        for example, of_layers in enumerate(of_examples):
            own = [one for one in of_layers if one.kind == kind]
            for one, expected in zip(own, maps.maps[:, example], strict=True):
                real = expected[:, maps.rows[example]][:, :, maps.keys[example]]
                assert_alike(one.maps, real, dtype=torch.float32)
                assert one.heads == tuple(range(H))
