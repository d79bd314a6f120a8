"""Decoding step by step with `hk.nn.KeyValueCache` is the full pass."""

from __future__ import annotations

import torch

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.nn_layers import PADDED, B, E, H, S, T, layer_of
from tests.support.refusals import assert_refused


@torch.no_grad()
def test_a_growing_cache_is_copied_seldom() -> None:
    layer, cache, rooms = layer_of(), hk.nn.KeyValueCache(), set()
    for _ in range(33):
        layer(torch.randn(B, 1, E).double(), cache=cache)
        nothing = torch.empty(B, 0, H, 6).double()
        rooms.add(cache.append(nothing, nothing)[0].data_ptr())
    assert cache.length == 33
    assert len(rooms) <= 7  # 1, 2, 4, 8, 16, 32, 64


@torch.no_grad()
def test_the_source_of_encoder_decoder_attention_is_projected_once() -> None:
    layer, x, memory = layer_of(), torch.randn(B, T, E).double(), torch.randn(B, S, E).double()
    full = layer(x, memory, key_padding_mask=PADDED)[0]
    calls = []
    layer.k_proj.register_forward_hook(lambda *call: calls.append(call))
    cache = hk.nn.KeyValueCache()
    steps = [layer(row, memory, key_padding_mask=PADDED, cache=cache)[0] for row in x.split(2, dim=1)]
    assert_alike(torch.cat(steps, 1), full)
    assert len(calls) == 1
    assert cache.length == S


def test_a_cache_that_does_not_fit_is_refused() -> None:
    layer, x, cache = layer_of(), torch.randn(B, S, E).double(), hk.nn.KeyValueCache()
    filled = r"cache is filled while gradients.*no_grad"
    assert_refused(
        (lambda: layer(x, cache=hk.nn.KeyValueCache()), filled),
        (lambda: layer(x, x.clone(), cache=hk.nn.KeyValueCache()), filled),
    )
    with torch.no_grad():
        layer(x, cache=cache)
        layer(x, x.clone(), cache=(of_source := hk.nn.KeyValueCache()))
        assert_refused(
            (lambda: layer(x[:1, :1], cache=cache), r"cache holds \[\(2, 4, 6, .*\[\(1, 4, 6, "),
            (lambda: layer(x, x.clone(), cache=cache), "cache holds the tokens of self-attention"),
            (lambda: layer(x, cache=of_source), "cache holds the source of encoder-decoder"),
            (lambda: layer(x[:1], x[:1].clone(), cache=of_source), "cache holds batch 2, but query has"),
            (lambda: cache.reorder(torch.ones(2)), TypeError, "beams has"),
            (lambda: cache.reorder(torch.tensor([[0]])), "beams has"),
            (lambda: cache.reorder([0, 1]), TypeError, "beams is"),
        )
