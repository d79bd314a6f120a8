"""Layers whose queries and keys cannot be read, or not replaced, are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.convert import install, ragged, read_heads
from heads_kernels.heads import attention_layers
from tests.convert.converted_models import (
    TURNED,
    in_use,
)
from tests.support.tiny_models import (
    build,
)


# ---------------------------------------------------------------------- what cannot be read
@pytest.mark.parametrize("name", TURNED)
def test_rotary_positions_are_refused(name: str) -> None:
    """And nothing is listed in the table that has none: these modules take cosines and sines."""
    model = in_use(name)
    layer = attention_layers(model)[0]
    with pytest.raises(ValueError, match=r"layer 0 \(.*\) has (norms .* and )?rotary positions"):
        read_heads(layer)
    assert any(
        hasattr(module, "rotary_emb") or "Rotary" in type(module).__name__
        for module in model.modules()
    )


def test_layers_without_heads_are_refused() -> None:
    model = build("bert")
    hk.heads.prune(model, {0: range(4)})
    with pytest.raises(ValueError, match="has no heads left"):
        read_heads(attention_layers(model)[0])


def test_weights_that_are_no_numbers_are_refused() -> None:
    model = build("gpt2")
    layer = attention_layers(model)[1]
    with torch.no_grad():
        layer.key.linear.weight[3, 40] = torch.nan
    read_heads(attention_layers(model)[0])
    with pytest.raises(ValueError, match=r"layer 1 \('transformer.h.1.attn'\): key holds NaN"):
        read_heads(layer)


def test_packed_weights_are_refused() -> None:
    model = build("bert")
    layer = attention_layers(model)[0]
    layer.query.linear.weight = nn.Parameter(torch.zeros(512, dtype=torch.uint8), False)
    with pytest.raises(
        ValueError, match=r"its query projection has a Parameter of dtype torch.uint8"
    ):
        read_heads(attention_layers(model)[0])


def test_models_that_run_another_attention_are_refused() -> None:
    model = build("bert", "sdpa")
    layer = attention_layers(model)[0]
    factors = ragged(read_heads(layer), 12)
    with pytest.raises(ValueError, match=r"attn_implementation is 'sdpa' .*: call .*use\(model\)"):
        install(model, layer, factors, ragged=True)
    assert not attention_layers(model)[0].layout.shared


class _Attention(nn.Module):
    """Attention of someone else: fused, split in equal parts."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.head_dim = self.width = 4
        if config is not None:
            self.config = config

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        gate = getattr(self, "head_gate", None)
        gates = None if gate is None else gate(len(x), x.shape[1])
        out = hk.gated_attention(query, key, value, gate=gates)
        projected: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return projected


@pytest.mark.parametrize("in_transformers", [False, True])
def test_modules_of_others_are_read_and_not_converted(
    in_transformers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = hk.heads.HeadLayout("other", "qkv", "qkv", "qkv", "out", scale="width")
    monkeypatch.setitem(hk.heads.layouts.LAYOUTS, "_Attention", layout)
    model = nn.Sequential(_Attention(in_use("bert").config if in_transformers else None))
    [layer] = attention_layers(model)
    heads = read_heads(layer)
    assert torch.equal(heads.key.flatten(0, 1), model[0].qkv.weight[12:24].double())
    assert heads.scale == 4
    said = "one projection for several roles" if in_transformers else "is a _Attention; layers of"
    with pytest.raises((TypeError, ValueError), match=said):
        install(model, layer, ragged(heads, 8), ragged=True)
    del model[0].width
    with pytest.raises(ValueError, match="is a _Attention without 'width'"):
        read_heads(attention_layers(model)[0])
