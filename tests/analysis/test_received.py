"""What tokens receive, of whole models, against maps in memory."""

from __future__ import annotations

import copy

import pytest
import torch

import heads_kernels as hk
from tests.analysis.attention_maps import Maps, layers, padded_layers, stock_maps
from tests.support import tiny_models
from tests.support.alike import assert_alike
from tests.support.nn_layers import Layers, spread


def assert_received(
    found: hk.analysis.HeadReceived, maps: Maps, kind: str, last_rows: int | None = None
) -> None:
    of_kind = [each for each, name in zip(found.examples, found.kinds, strict=True) if name == kind]
    assert len(of_kind) == len(maps.maps)
    for examples, of_layer in zip(of_kind, maps.maps, strict=True):
        assert len(examples) == len(maps.rows)
        for b, example in enumerate(examples):
            rows = maps.rows[b].nonzero()[:, 0]
            rows = rows if last_rows is None else rows[-last_rows:]
            expected = of_layer[b][:, rows].mean(1)[:, maps.keys[b]]
            assert_alike(example, expected)
            assert_alike(example.sum(1), torch.ones(len(example), dtype=example.dtype))


@pytest.mark.parametrize("last_rows", [None, 1, 4])
@pytest.mark.parametrize(("left", "causal"), [(False, False), (False, True), (True, True)])
def test_modules(left: bool, causal: bool, last_rows: int | None) -> None:
    model, batch, maps = padded_layers(left, causal)
    found = hk.analysis.received(model, [batch], last_rows=last_rows)
    assert [example.shape for example in found.examples[0]] == [(4, 9), (4, 6)]
    kinds = dict.fromkeys(found.kinds)
    assert_received(found, maps, next(iter(kinds)), last_rows)


@pytest.mark.parametrize("name", ["bert", "t5", "albert"])
def test_stock_maps(name: str) -> None:
    stock = tiny_models.build(name).double()
    arguments = tiny_models.batch(stock)
    model = hk.integrations.transformers.use(copy.deepcopy(stock))
    found = hk.analysis.received(model, [arguments, arguments])
    half = hk.analysis.HeadReceived(
        found.layers, found.kinds, tuple(each[: len(each) // 2] for each in found.examples)
    )
    for one, two in zip(found.examples, half.examples, strict=True):
        assert_alike(list(one[len(two) :]), list(two))
    for kind, maps in stock_maps(stock, arguments).items():
        if name == "albert":  # its layers share their weights: a mean over the runs
            maps = Maps(maps.maps.mean(0, keepdim=True), maps.rows, maps.keys)
        assert_received(half, maps, kind)


def test_refusals() -> None:
    model, x = layers(), torch.randn(2, 6, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="last_rows is 0; pass an int of at least 1"):
        hk.analysis.received(model, [x], last_rows=0)
    with pytest.raises(ValueError, match="data has no batches"):
        hk.analysis.received(model, [])

    class Steps(Layers):
        def forward(self, x: torch.Tensor) -> None:
            cache = hk.nn.KeyValueCache()
            for part in x.split(3, 1):
                self.layers[0](part, is_causal=True, cache=cache)

    steps = Steps(spread(hk.nn.GatedMultiheadAttention(16, 4, dtype=torch.float64)))
    with pytest.raises(ValueError, match=r"data has a pass in which .* runs on different tokens"):
        hk.analysis.received(steps, [x])
