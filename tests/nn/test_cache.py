"""Decoding step by step with `hk.nn.KeyValueCache` is the full pass."""

from __future__ import annotations

import pytest
import torch

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.nn_layers import PADDED, B, E, H, S, T, formula, layer_of


@pytest.mark.parametrize("max_length", [None, 7, 9])
@torch.no_grad()
def test_decoding_is_the_full_pass(max_length: int | None) -> None:
    """A prompt of three tokens, then one by one; the batch is padded at the left."""
    layer, x = layer_of(num_key_heads=2, output_gate="head"), torch.randn(B, S, E).double()
    padded = PADDED.flip(1)
    full = layer(x, is_causal=True, key_padding_mask=padded)[0]
    cache = hk.nn.KeyValueCache(max_length)
    for _ in range(2):
        steps, end = [], 0
        for tokens in x.split([3, 1, 1, 2], dim=1):
            end += tokens.shape[1]
            hidden = padded[:, :end]
            steps += [layer(tokens, is_causal=True, key_padding_mask=hidden, cache=cache)[0]]
            assert cache.length == end
        assert_alike(torch.cat(steps, 1), full)
        cache.reset()
        assert cache.length == 0


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


@pytest.mark.parametrize("source", [True, False])
@torch.no_grad()
def test_beams_are_reordered(source: bool) -> None:
    layer, cache = layer_of(), hk.nn.KeyValueCache()
    first, last = torch.randn(3, 4, E).double(), torch.randn(2, 1, E).double()
    beams = torch.tensor([2, 0])
    if source:
        layer(first[:, :1], first, cache=cache)
        cache.reorder(beams)
        out = layer(last, first[beams], cache=cache)[0]
        expected = formula(layer, last, first[beams])
    else:
        layer(first, is_causal=True, cache=cache)
        cache.reorder(beams)
        out = layer(last, is_causal=True, cache=cache)[0]
        expected = formula(layer, last, torch.cat([first[beams], last], 1))
    assert_alike(out, expected)


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
