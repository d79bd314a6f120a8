"""What tokens receive, of whole models, against maps in memory."""

from __future__ import annotations

import pytest
import torch

import heads_kernels as hk
from tests.analysis.attention_maps import assert_received, layers, padded_layers
from tests.support.nn_layers import Layers, spread


@pytest.mark.parametrize("last_rows", [None, 1, 4])
@pytest.mark.parametrize(("left", "causal"), [(False, False), (False, True), (True, True)])
def test_modules(left: bool, causal: bool, last_rows: int | None) -> None:
    model, batch, maps = padded_layers(left, causal)
    found = hk.analysis.received(model, [batch], last_rows=last_rows)
    assert [example.shape for example in found.examples[0]] == [(4, 9), (4, 6)]
    kinds = dict.fromkeys(found.kinds)
    assert_received(found, maps, next(iter(kinds)), last_rows)


def test_refusals() -> None:
    model, x = layers(), torch.randn(2, 6, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="last_rows is 0; pass an int of at least 1"):
        hk.analysis.received(model, [x], last_rows=0)

    class Steps(Layers):
        def forward(self, x: torch.Tensor) -> None:
            cache = hk.nn.KeyValueCache()
            for part in x.split(3, 1):
                self.layers[0](part, is_causal=True, cache=cache)

    steps = Steps(spread(hk.nn.GatedMultiheadAttention(16, 4, dtype=torch.float64)))
    with pytest.raises(ValueError, match=r"data has a pass in which .* runs on different tokens"):
        hk.analysis.received(steps, [x])
