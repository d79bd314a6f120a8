"""Decoding step by step with `hk.nn.KeyValueCache` is the full pass."""

from __future__ import annotations

import pytest
import torch

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.nn_layers import PADDED, B, E, H, S, T, layer_of


@torch.no_grad()
def test_a_growing_cache_is_copied_seldom() -> None:
    layer, cache, rooms = layer_of(), hk.nn.KeyValueCache(), set()
    for _ in range(33):
        layer(torch.randn(B, 1, E).double(), cache=cache)
        rooms.add(
            cache.append(torch.empty(B, 0, H, 6).double(), torch.empty(B, 0, H, 6).double())[
                0
            ].data_ptr()
        )
    assert cache.length == 33
    assert len(rooms) <= 7  # 1, 2, 4, 8, 16, 32, 64


@torch.no_grad()
def test_the_source_of_encoder_decoder_attention_is_projected_once() -> None:
    layer, x, memory = layer_of(), torch.randn(B, T, E).double(), torch.randn(B, S, E).double()
    full = layer(x, memory, key_padding_mask=PADDED)[0]
    calls = []
    layer.k_proj.register_forward_hook(lambda *call: calls.append(call))
    cache = hk.nn.KeyValueCache()
    steps = [
        layer(row, memory, key_padding_mask=PADDED, cache=cache)[0] for row in x.split(2, dim=1)
    ]
    assert_alike(torch.cat(steps, 1), full)
    assert len(calls) == 1
    assert cache.length == S


def test_a_cache_that_does_not_fit_is_refused() -> None:
    layer, x = layer_of(), torch.randn(B, S, E).double()
    with pytest.raises(ValueError, match=r"cache is filled while gradients.*no_grad"):
        layer(x, cache=hk.nn.KeyValueCache())
    with pytest.raises(ValueError, match=r"cache is filled while gradients.*no_grad"):
        layer(x, x.clone(), cache=hk.nn.KeyValueCache())
    with torch.no_grad():
        cache = hk.nn.KeyValueCache(max_length=8)
        layer(x, cache=cache)
        with pytest.raises(ValueError, match="max_length is 8, but 14 positions"):
            layer(x, cache=cache)
        with pytest.raises(ValueError, match=r"cache holds float64\[2, S, 4, 6\].*\[1, S, 4, 6\]"):
            layer(x[:1, :1], cache=cache)
        with pytest.raises(ValueError, match="cache holds the tokens of self-attention"):
            layer(x, x.clone(), cache=cache)
        source = hk.nn.KeyValueCache()
        layer(x, x.clone(), cache=source)
        with pytest.raises(ValueError, match="cache holds the source of encoder-decoder"):
            layer(x, cache=source)
        with pytest.raises(ValueError, match="cache holds batch 2, but query has batch 1"):
            layer(x[:1], x[:1].clone(), cache=source)
        for bad, error in ((torch.ones(2), TypeError), (torch.tensor([[0]]), ValueError)):
            with pytest.raises(error, match="beams has"):
                cache.reorder(bad)
        with pytest.raises(TypeError, match="beams is"):
            cache.reorder([0, 1])  # type: ignore[arg-type]
    for bad, error in ((0, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="max_length is"):
            hk.nn.KeyValueCache(bad)  # type: ignore[arg-type]
