"""`hk.nn.GatedMultiheadAttention` against `torch.nn.MultiheadAttention` and against the formula in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import heads_kernels as hk
from tests.support import reference
from tests.support.alike import assert_alike
from tests.support.nn_layers import (
    CAUSAL,
    PADDED,
    WIDTHS,
    B,
    E,
    Gates,
    H,
    S,
    T,
    formula,
    layer_of,
    torch_attention,
)


# ---------------------------------------------------------------------- torch.nn.MultiheadAttention
@pytest.mark.parametrize("options", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("floating", [False, True])
def test_cross_attention_is_that_of_torch(options: dict[str, Any], floating: bool) -> None:
    """Output and all gradients, from a source of other length and widths, padded."""
    theirs = torch_attention(**options).double()
    ours = hk.nn.GatedMultiheadAttention.from_torch(theirs)
    query = torch.randn(B, T, E).double().requires_grad_()
    key, value = (torch.randn(B, S, width).double() for width in (theirs.kdim, theirs.vdim))
    hidden = torch.zeros(B, S).masked_fill(PADDED, -torch.inf).double() if floating else PADDED
    expected = theirs(query, key, value, key_padding_mask=hidden, need_weights=False)[0]
    out, none = ours(query, key, value, key_padding_mask=hidden)
    assert none is None
    assert_alike(out, expected)

    weight = torch.randn_like(out)
    (dquery,) = torch.autograd.grad((out * weight).sum(), query, retain_graph=True)
    (wanted,) = torch.autograd.grad((expected * weight).sum(), query, retain_graph=True)
    assert_alike(dquery, wanted)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    assert theirs.out_proj.weight.grad is not None
    assert_alike(ours.out_proj.weight.grad, theirs.out_proj.weight.grad)
    grads = [part.weight.grad for part in (ours.q_proj, ours.k_proj, ours.v_proj)]
    if theirs.in_proj_weight is None:
        parts = (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
        wanted_grads = [part.grad for part in parts]
    else:
        wanted_grads = list(theirs.in_proj_weight.grad.chunk(3))
    assert_alike(grads, wanted_grads)


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal hint": {"attn_mask": CAUSAL, "is_causal": True},
    "causal tensor": {"attn_mask": CAUSAL},
    "causal floats": {"attn_mask": torch.zeros(S, S).masked_fill(CAUSAL, -torch.inf)},
    "padding": {"key_padding_mask": PADDED},
    "padding and causal": {"key_padding_mask": PADDED, "attn_mask": CAUSAL, "is_causal": True},
    "per head": {"attn_mask": (torch.arange(B * H * S * S).view(B * H, S, S) % 5 == 1)},
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_self_attention_is_that_of_torch(masks: dict[str, Any]) -> None:
    theirs = torch_attention()
    ours = hk.nn.GatedMultiheadAttention.from_torch(theirs)
    x = torch.randn(B, S, E)
    expected = theirs(x, x, x, need_weights=False, **masks)[0]
    out = ours(x, x, x, **masks)[0]
    real = ~PADDED if "key_padding_mask" in masks else torch.ones(B, S, dtype=torch.bool)
    assert_alike(out[real], expected[real])
    assert_alike(out[~real], ours.out_proj.bias.expand_as(out[~real]))
    assert_alike(ours(x, **masks)[0], out)


def test_the_hint_is_taken_and_the_tensor_is_not_read() -> None:
    layer, x = layer_of(dtype=torch.float32), torch.randn(B, S, E)
    nonsense = torch.full((3, 1), torch.nan)
    out = layer(x, attn_mask=nonsense, is_causal=True)[0]
    assert_alike(out, layer(x, mask=hk.Mask(causal=True))[0])


def test_native_masks_and_those_of_the_module_hide_the_same() -> None:
    layer, x, y = layer_of(), torch.randn(B, T, E).double(), torch.randn(B, S, E).double()
    rows = torch.tensor([[False] * T, [True] * 2 + [False] * 3])
    out = layer(x, y, key_padding_mask=PADDED, query_padding_mask=rows)[0]
    native = layer(x, y, mask=hk.Mask(key_mask=~PADDED, query_mask=~rows))[0]
    visible = (~PADDED[:, None, None, :] & ~rows[:, None, :, None]).expand(B, H, T, S)
    assert_alike(out, formula(layer, x, y, visible))
    assert_alike(native, out)
    both = layer(x, y, key_padding_mask=PADDED, mask=hk.Mask(query_mask=~rows))[0]
    assert_alike(both, out)


# ---------------------------------------------------------------------- the formula
@given(
    sizes=st.tuples(*(st.integers(1, 4) for _ in range(7))),
    kind=st.sampled_from(["self", "cross"]),
    causal=st.booleans(),
)
def test_any_shape_is_the_formula(sizes: tuple[int, ...], kind: str, causal: bool) -> None:
    b, t, s, key_heads, group, D, Dv = sizes
    layer = layer_of(
        embed_dim=6, num_heads=key_heads * group, num_key_heads=key_heads, head_dim=D, value_dim=Dv
    )
    x = torch.randn(b, t, 6).double()
    y = x if kind == "self" else torch.randn(b, s, 6).double()
    visible = torch.ones(b, layer.num_heads, t, y.shape[1], dtype=torch.bool)
    expected = formula(layer, x, y, visible.tril() if causal else visible)
    assert_alike(layer(x, y, is_causal=causal)[0], expected)


def test_scale_is_the_one_asked_for() -> None:
    layer, x = layer_of(scale=0.7), torch.randn(B, S, E).double()
    assert layer.scale == 0.7
    assert_alike(layer(x)[0], formula(layer, x, x))
    assert layer_of(head_dim=9).scale == pytest.approx(1 / 3)


@pytest.mark.parametrize("output_gate", [None, "head", "element"])
@pytest.mark.parametrize("head_gate", [False, True])
def test_gates(output_gate: str | None, head_gate: bool) -> None:
    layer = layer_of(output_gate=output_gate, num_key_heads=2)
    x = torch.randn(B, S, E).double()
    expected = torch.ones(B, H, S, 1).double()
    if output_gate:
        assert layer.gate_proj is not None
        logits = layer.gate_proj(x).unflatten(2, (H, -1)).transpose(1, 2)
        assert logits.shape[3] == (1 if output_gate == "head" else layer.value_dim)
        expected = expected / (1 + torch.exp(-logits))
    if head_gate:
        layer.head_gate = Gates([0.0, 1.0, 0.25, -2.0])
        expected = expected * layer.head_gate.gates[:, None, None]
    out, wanted = layer(x)[0], formula(layer, x, x, gates=expected)
    assert_alike(out, wanted)
    weight = torch.randn_like(out)
    parameters = dict(layer.named_parameters())
    grads = torch.autograd.grad((out * weight).sum(), list(parameters.values()), retain_graph=True)
    wanted_grads = torch.autograd.grad((wanted * weight).sum(), list(parameters.values()))
    for name, grad, want in zip(parameters, grads, wanted_grads, strict=True):
        assert_alike(grad, want, name=name)


def test_head_gate_says_whether_closed_heads_have_a_gradient() -> None:
    layer, x = layer_of(), torch.randn(B, S, E).double()
    gate = layer.head_gate = Gates([0.0, 1.0, 1.0, 1.0])
    layer(x)[0].square().sum().backward()
    assert gate.gates.grad is not None
    assert gate.gates.grad[0] != 0
    gate.closed_grad, gate.gates.grad = False, None
    layer(x)[0].square().sum().backward()
    assert gate.gates.grad[0] == 0


def test_gates_by_example() -> None:
    """`[B, H]`: what a Hard Concrete gate with a sample for each example gives."""
    layer, x = layer_of(), torch.randn(B, S, E).double()
    gates = torch.tensor([[1.0, 0.0, 0.5, 1.0], [0.0, 1.0, 1.0, 0.0]])

    class ByExample(Gates):
        def forward(self, batch_size: int, length: int) -> Tensor:
            return gates[:batch_size]

    layer.head_gate = ByExample([1.0] * H)
    assert_alike(layer(x)[0], formula(layer, x, x, gates=gates[:, :, None, None]))


def test_gates_by_row() -> None:
    """`[B, H, T]`, made from the batch size and the number of query rows, with the gradient of each."""
    layer, x, y = layer_of(), torch.randn(B, T, E).double(), torch.randn(B, S, E).double()
    gates = torch.rand(B, H, T, dtype=torch.float64, requires_grad=True)

    class ByRow(Gates):
        def forward(self, batch_size: int, length: int) -> Tensor:
            assert (batch_size, length) == (B, T)
            return gates

    layer.head_gate = ByRow([1.0] * H)
    out, expected = layer(x, y)[0], formula(layer, x, y, gates=gates[..., None])
    assert_alike(out, expected)
    slopes = (torch.autograd.grad(each.square().sum(), gates)[0] for each in (out, expected))
    assert_alike(*slopes)


def remove_heads(layer: hk.nn.GatedMultiheadAttention, kept: list[int]) -> None:
    """Ungrouped heads out of the weights."""
    for part, size in (
        (layer.q_proj, layer.head_dim),
        (layer.k_proj, layer.head_dim),
        (layer.v_proj, layer.value_dim),
    ):
        part.weight.data = part.weight.data.unflatten(0, (-1, size))[kept].flatten(0, 1)
        part.bias.data = part.bias.data.unflatten(0, (-1, size))[kept].flatten()
    columns = layer.out_proj.weight.data.unflatten(1, (-1, layer.value_dim))
    layer.out_proj.weight.data = columns[:, kept].flatten(1)
    layer.num_heads = layer.num_key_heads = len(kept)


@pytest.mark.parametrize("kept", [[0, 3], [2], []])
def test_closed_heads_are_removed_heads(kept: list[int]) -> None:
    """Also all of them: a layer without heads gives the bias of `out_proj`, and gradients."""
    layer = layer_of()
    x = torch.randn(B, S, E).double().requires_grad_()
    removed = copy.deepcopy(layer)
    remove_heads(removed, kept)
    layer.head_gate = hk.nn.FixedGate(torch.tensor([float(h in kept) for h in range(H)]))
    out, smaller = layer(x)[0], removed(x)[0]
    assert_alike(smaller, out)
    weight = torch.randn_like(out)
    (dx,) = torch.autograd.grad((out * weight).sum(), x)
    (smaller * weight).sum().backward()
    assert_alike(x.grad, dx)
    assert_alike(removed.out_proj.bias.grad, weight.sum((0, 1)))
    if not kept:
        assert_alike(smaller, layer.out_proj.bias.expand_as(smaller))
        removed.output_gate, removed.gate_proj = "head", nn.Linear(E, 1).double()
        removed.gate_proj.weight.data = torch.empty(0, E).double()
        removed.gate_proj.bias.data = torch.empty(0).double()
        removed.head_gate = hk.nn.FixedGate(torch.ones(0))
        padded = removed(x, key_padding_mask=PADDED, is_causal=True)[0]
        assert_alike(padded, smaller)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_real_row(side: str) -> None:
    layer, x = layer_of(), torch.randn(1, 4, E).double()
    junk = torch.full((1, 3, E), torch.nan).double()
    parts = (junk, x) if side == "left" else (x, junk)
    hidden = torch.cat([part.isnan().any(2) for part in parts], 1)
    out = layer(torch.cat(parts, 1), is_causal=True, key_padding_mask=hidden)[0]
    assert_alike(out[~hidden], layer(x, is_causal=True)[0][0])
    assert_alike(out[hidden], layer.out_proj.bias.expand(3, E))


def test_statistics_are_those_of_the_probabilities() -> None:
    layer, x, y = layer_of(num_key_heads=2), torch.randn(B, T, E).double(), torch.randn(B, S, E)
    y = y.double()
    out, rows = layer(x, y, key_padding_mask=PADDED, need_statistics=True)
    assert_alike(out, layer(x, y, key_padding_mask=PADDED)[0])
    query = layer.q_proj(x).unflatten(2, (H, -1)).transpose(1, 2)
    key = layer.k_proj(y).unflatten(2, (2, -1)).transpose(1, 2).repeat_interleave(2, 1)
    scores = (layer.scale * query @ key.mT).masked_fill(PADDED[:, None, None], -torch.inf)
    p = scores.softmax(-1)
    assert_alike(rows.lse, scores.logsumexp(-1))
    assert_alike(rows.max_prob, p.amax(-1))
    assert rows.argmax.equal(p.argmax(-1))
    assert_alike(rows.entropy, -torch.special.xlogy(p, p).sum(-1))


def test_dropout_in_training_only() -> None:
    layer, x = layer_of(dropout=0.5), torch.randn(B, S, E).double()
    assert_alike(layer(x)[0], formula(layer, x, x))
    layer.train()
    torch.manual_seed(3)
    out = layer(x)[0]
    assert not torch.allclose(out, layer(x)[0])
    torch.manual_seed(3)
    seed = int(torch.randint(2**63 - 1, (1,)))
    kept = reference.keeps(seed, 0.5, B, H, S, S) * 2.0
    query, key, value = (
        part(x).unflatten(2, (H, -1)).transpose(1, 2)
        for part in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    heads = reference.attention(
        {"query": query, "key": key, "value": value},
        torch.ones(B, H, S, S, dtype=torch.bool),
        layer.scale,
        kept=kept,
    )
    assert_alike(out, layer.out_proj(heads.transpose(1, 2).flatten(2)))


# ---------------------------------------------------------------------- bad input
BAD_LAYERS = [
    ({"embed_dim": 0}, ValueError, "embed_dim is 0"),
    ({"embed_dim": 8.0}, TypeError, "embed_dim is a float"),
    ({"num_heads": 0}, ValueError, "num_heads is 0"),
    ({"num_heads": 5}, ValueError, "embed_dim is 24, but num_heads is 5; .* head_dim"),
    ({"num_key_heads": 3}, ValueError, "num_key_heads is 3, but num_heads is 4"),
    ({"kdim": -1}, ValueError, "kdim is -1"),
    ({"vdim": "8"}, TypeError, "vdim is a str"),
    ({"head_dim": 0}, ValueError, "head_dim is 0"),
    ({"value_dim": True}, TypeError, "value_dim is a bool"),
    ({"bias": 1}, TypeError, "bias is a int"),
    ({"dropout": 1.0}, ValueError, "dropout is 1.0"),
    ({"dropout": "no"}, TypeError, "dropout is a str"),
    ({"scale": float("nan")}, ValueError, "scale is nan"),
    ({"scale": torch.ones(())}, TypeError, "scale is a tensor"),
    ({"output_gate": "row"}, ValueError, "output_gate is 'row'; use None, 'head' or 'element'"),
    ({"batch_first": 0}, TypeError, "batch_first is a int"),
]


@pytest.mark.parametrize(("options", "error", "match"), BAD_LAYERS)
def test_bad_layers(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        hk.nn.GatedMultiheadAttention(**{"embed_dim": E, "num_heads": H, **options})


NESTED = torch.nested.nested_tensor(list(torch.zeros(2, 5, 24)), layout=torch.jagged)
X, Y = torch.zeros(B, T, E), torch.zeros(B, S, E)
BAD_CALLS = [
    ({"query": [1]}, TypeError, "query is a list"),
    ({"query": X[0]}, ValueError, r"query has shape \[5, 24\]; pass \[B, T, 24\], batch first"),
    ({"query": X[..., :8]}, ValueError, r"query has shape \[2, 5, 8\]"),
    ({"query": NESTED}, ValueError, "query is nested"),
    ({"key": Y[..., :8]}, ValueError, r"key has shape \[2, 7, 8\]; pass \[B, S, 24\]"),
    ({"key": Y[:1]}, ValueError, "key has batch 1, but query has batch 2"),
    ({"value": Y[:, :3]}, ValueError, r"value has shape \[2, 3, 24\], but key has \[2, 7, 24\]"),
    ({"key": None, "value": Y}, ValueError, "value is given without key"),
    ({"need_weights": True}, ValueError, "need_weights is True.*need_statistics.*attention_stat"),
    ({"key_padding_mask": hk.Mask()}, TypeError, "key_padding_mask is a Mask; .* mask="),
    ({"key_padding_mask": PADDED[0]}, ValueError, r"key_padding_mask has shape \[7\]"),
    ({"key_padding_mask": PADDED[:, :3]}, ValueError, r"key_padding_mask has shape \[2, 3\]"),
    ({"key_padding_mask": PADDED.long()}, TypeError, "key_padding_mask has dtype torch.int64"),
    ({"key_padding_mask": PADDED * -1e4}, ValueError, "key_padding_mask holds floats other than"),
    ({"query_padding_mask": PADDED}, ValueError, r"query_padding_mask has shape \[2, 7\]"),
    ({"query_padding_mask": [0]}, TypeError, "query_padding_mask is a list"),
    ({"attn_mask": CAUSAL}, ValueError, r"attn_mask has shape \[7, 7\].*\[5, 7\] or \[8, 5, 7\]"),
    ({"mask": PADDED}, TypeError, "mask is a Tensor; pass a hk.Mask"),
    ({"is_causal": 1}, TypeError, "is_causal is a int"),
    ({"cache": {}}, TypeError, "cache is a dict"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "match"), BAD_CALLS)
def test_bad_calls(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    layer = hk.nn.GatedMultiheadAttention(E, H)
    with pytest.raises(error, match=match):
        layer(**{"query": X, "key": Y, **arguments})
