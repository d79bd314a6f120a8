"""`hk.nn.MergedAttention` against its formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.nn_layers import PADDED, B, E, Gates, H, S, T, formula, gradients, spread
from tests.support.refusals import assert_refused

ROWS = torch.tensor([[False] * T, [True, False, True, False, False]])  # [B, T]: padded at the left, and a hole


def merged(**options: Any) -> hk.nn.MergedAttention:
    return spread(hk.nn.MergedAttention(E, H, **{"dtype": torch.float64, **options}))


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(B, T, E).double().requires_grad_(), torch.randn(B, S, E).double()


def averages(layer: hk.nn.MergedAttention, x: Tensor, real: Tensor) -> Tensor:
    """What the average gives each head, `[B, H, T, Dv]`; row by row."""
    heads = torch.zeros(B, H, T, layer.value_dim, dtype=x.dtype)
    for b in range(B):
        for t in range(T):
            if real[b, t]:
                mean = x[b, : t + 1][real[b, : t + 1]].mean(0)
                value = layer.v_proj(mean).unflatten(0, (layer.num_key_heads, layer.value_dim))
                heads[b, :, t] = value.repeat_interleave(H // layer.num_key_heads, 0)
    return heads


def expected(
    layer: hk.nn.MergedAttention,
    x: Tensor,
    y: Tensor,
    real: Tensor | None = None,
    gates: Tensor | None = None,
) -> Tensor:
    """The formula: attention to `y`, and what W_O makes of the averages."""
    real = torch.ones(B, T, dtype=torch.bool) if real is None else real
    visible = (real[:, None, :, None] & ~PADDED[:, None, None, :]).expand(B, H, T, S)
    beside = averages(layer, x, real)
    beside = beside if gates is None else beside * gates
    summed = beside.transpose(1, 2).flatten(2) @ layer.out_proj.weight.T
    return formula(layer, x, y, visible, gates) + summed


@pytest.mark.parametrize(
    ("options", "hidden"),
    [
        ({}, {}),
        ({"num_key_heads": 2, "bias": False}, {"mask": hk.Mask(query_mask=~ROWS)}),
        ({"value_dim": 3}, {"mask": hk.Mask(query_lengths=[5, 2])}),
    ],
)
def test_formula(options: dict[str, Any], hidden: dict[str, Any]) -> None:
    """Output and the gradients of input and weights."""
    layer, (x, y) = merged(**options), inputs()
    mask = hidden.get("mask", hk.Mask())
    out = layer(x, y, key_padding_mask=PADDED, **hidden)[0]
    wanted = expected(layer, x, y, mask.to_dense(B, 1, T, 1).expand(B, 1, T, 1)[:, 0, :, 0])
    assert_alike(out, wanted)
    leaves = [x, *layer.parameters()]
    assert_alike(gradients(out, *leaves), gradients(wanted, *leaves))


@pytest.mark.parametrize("output_gate", [None, "head", "element"])
def test_gates_multiply_both_parts(output_gate: str | None) -> None:
    layer, (x, y) = merged(output_gate=output_gate), inputs()
    if output_gate is None:
        layer.head_gate = Gates([0.5, 0.0, 2.0, -1.0])
        gates = layer.head_gate.gates.double()[None, :, None, None]
    else:
        assert layer.gate_proj is not None
        gates = layer.gate_proj(x).unflatten(2, (H, -1)).transpose(1, 2).sigmoid()
    out = layer(x, y, key_padding_mask=PADDED)[0]
    assert_alike(out, expected(layer, x, y, gates=gates))


def test_from_torch() -> None:
    theirs = spread(nn.MultiheadAttention(E, H, batch_first=True)).double()
    layer, (x, y) = hk.nn.MergedAttention.from_torch(theirs), inputs()
    assert isinstance(layer, hk.nn.MergedAttention)
    assert_alike(layer(x, y, key_padding_mask=PADDED)[0], expected(layer, x, y))


def test_the_average_of_bfloat16_is_summed_in_float32() -> None:
    """The mean of 4,096 equal rows; sums in bfloat16 would stop growing at 256."""
    layer = hk.nn.MergedAttention(8, 1, bias=False, dtype=torch.bfloat16)
    for part in (layer.v_proj, layer.out_proj):
        nn.init.eye_(part.weight)
    x = torch.ones(1, 4096, 8, dtype=torch.bfloat16)
    out = layer(x, torch.zeros(1, 1, 8, dtype=torch.bfloat16))[0]
    assert torch.equal(out, x)


def test_bad_calls_are_refused() -> None:
    layer, (x, y) = merged(), inputs()
    ids = torch.arange(T) // 2, torch.arange(S) // 3
    assert_refused(
        *((lambda source=source: layer(x, source), "^key is None or query; pass the out") for source in (None, x)),
        (lambda: layer(x, y, mask=hk.Mask(document_ids=ids)), "^mask has document_ids"),
        (lambda: hk.nn.MergedAttention(E, H, vdim=12), "^vdim is 12, but embed_dim is 24"),
        (lambda: hk.convert.collaborate(nn.Sequential(layer), 12), TypeError, "what its class adds would be lost"),
    )
