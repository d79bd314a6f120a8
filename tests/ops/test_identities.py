"""Identities that tie features together: two ways to say the same thing give the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import heads_kernels as hk
from heads_kernels.ops import buffers
from tests.ops.calls import DIFFERENTIABLE, NAMES, assert_same_bits, call
from tests.support.alike import assert_alike

GATED = NAMES
COLLABORATIVE = NAMES

Tensors = dict[str, Tensor]


def draw(
    operator: str, B: int, H: int, T: int, S: int, dtype: torch.dtype = torch.float32, **more: int
) -> Tensors:
    """Leaves of a call by name; `D` (or `Ds`), `Dv` and `Hk` in `more`."""
    D, Dv, Hk = more.get("D", 16), more.get("Dv", 24), more.get("Hk", H)
    if operator == "gated_attention":
        shapes = {"query": (B, H, T, D), "key": (B, Hk, S, D), "value": (B, Hk, S, Dv)}
    else:
        shapes = {"query": (B, T, D), "key": (B, S, D), "value": (B, H, S, Dv)}
        shapes |= {"mixing": (H, D), "content_bias": (B, H, S)}
    return {name: torch.randn(s, dtype=dtype).requires_grad_() for name, s in shapes.items()}


def run(operator: str, backend: str, tensors: Tensors, dout: Tensor, **options: Any) -> Tensors:
    """Output "out" and the gradients by name; each tensor as a leaf of its own."""
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    out = call(operator, backend, **leaves, **options)
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def same(got: Tensors, want: Tensors) -> None:
    for name, tensor in want.items():
        assert_alike(got[name], tensor, name=name)


# ---------------------------------------------------------------------- one operator by the other
@pytest.mark.parametrize("backend", COLLABORATIVE)
def test_block_indicator_mixing_is_ordinary_attention(backend: str) -> None:
    B, H, T, S, D = 2, 4, 33, 40, 16
    shared = draw("collaborative_attention", B, H, T, S, D=H * D)
    shared["mixing"] = torch.eye(H).repeat_interleave(D, 1)
    shared["content_bias"] = torch.zeros(B, H, S)
    dout = torch.randn(B, H, T, 24)
    got = run("collaborative_attention", backend, shared, dout, is_causal=True)

    def split(t: Tensor) -> Tensor:
        return t.detach().unflatten(2, (H, D)).transpose(1, 2)

    heads = {"query": split(shared["query"]), "key": split(shared["key"]), "value": shared["value"]}
    want = run("gated_attention", "eager", heads, dout, is_causal=True)
    want["query"], want["key"] = (want[n].transpose(1, 2).flatten(2) for n in ("query", "key"))
    same(got, want)


# ---------------------------------------------------------------------- PyTorch's own attention
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "pairs", "heads"])
@pytest.mark.parametrize("backend", GATED)
def test_gate_of_ones_is_sdpa(backend: str, mask: str) -> None:
    B, H, T, S = 2, 4, 33, 37
    tensors = draw("gated_attention", B, H, T, S, Hk=2)
    dout = torch.randn(B, H, T, 24)
    options: dict[str, Any] = {"is_causal": mask == "causal"}
    if mask == "padding":
        options["attn_mask"] = (torch.arange(S) < torch.tensor([[S], [9]]))[:, None, None]
    elif mask in ("pairs", "heads"):
        shape = (T, S) if mask == "pairs" else (B, H, T, S)
        options["attn_mask"] = torch.rand(shape) < 0.7
        options["attn_mask"][..., 0] = True  # SDPA has no word for rows that see nothing
    got = run("gated_attention", backend, tensors | {"gate": torch.ones(H)}, dout, **options)

    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    want = F.scaled_dot_product_attention(*leaves.values(), **options, enable_gqa=True)
    grads = torch.autograd.grad(want, list(leaves.values()), dout)
    same(got, {"out": want.detach(), **dict(zip(leaves, grads, strict=True))})


# ---------------------------------------------------------------------- closed heads


@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_a_closed_head_is_a_head_removed(operator: str, backend: str) -> None:
    B, H, T, S = 2, 4, 33, 35
    tensors = draw(operator, B, H, T, S)
    dout = torch.randn(B, H, T, 24)
    gate = torch.tensor([0.7, 0.0, 1.0, -0.0])
    kept = gate != 0
    got = run(operator, backend, tensors | {"gate": gate}, dout, is_causal=True)
    assert not got["out"][:, ~kept].any()

    per_head = {"query": 1, "key": 1, "value": 1}
    if operator == "collaborative_attention":
        per_head = {"value": 1, "mixing": 0, "content_bias": 1}
    axes = {"out": 1, "gate": 0, **per_head}

    def without(name: str, t: Tensor) -> Tensor:
        return t.detach().movedim(axes[name], 0)[kept].movedim(0, axes[name]) if name in axes else t

    fewer = {name: without(name, t) for name, t in (tensors | {"gate": gate}).items()}
    scale = {} if operator == "gated_attention" else {"scale": (16 / H) ** -0.5}
    want = run(operator, backend, fewer, dout[:, kept], is_causal=True, **scale)
    for name in per_head:
        closed = got[name].movedim(axes[name], 0)[~kept]
        assert not closed.any(), f"d{name} of a closed head"
    same({name: without(name, t) for name, t in got.items()}, want)


# ---------------------------------------------------------------------- padding and packing
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_packed_is_padded_is_one_by_one(operator: str, backend: str, causal: bool) -> None:
    lengths, H = [40, 1, 17], 3
    longest, total, B = max(lengths), sum(lengths), len(lengths)
    padded = draw(operator, B, H, longest, longest)
    dout = torch.randn(B, H, longest, 24)
    shared = {"mixing"}  # has no tokens
    token_axis = {"out": 2, "query": -2, "key": -2, "value": 2, "content_bias": 2}

    def pack(name: str, t: Tensor) -> Tensor:
        """The real tokens of every sequence, one behind the other: batch 1."""
        axis = token_axis[name]
        parts = [t.detach()[b : b + 1].narrow(axis, 0, n) for b, n in enumerate(lengths)]
        return torch.cat(parts, axis)

    mask = hk.Mask(causal=causal, key_lengths=lengths, query_lengths=lengths)
    whole = run(operator, backend, padded, dout, attn_mask=mask)
    want = {name: t if name in shared else pack(name, t) for name, t in whole.items()}

    borders = torch.tensor([0, *lengths]).cumsum(0)
    document = {n: t.detach() if n in shared else pack(n, t) for n, t in padded.items()}
    mask = hk.Mask.from_cu_seqlens(borders, total) & hk.Mask(causal=causal)
    packed = run(operator, backend, document, pack("out", dout), attn_mask=mask)
    same(packed, want)

    alone = []
    for b, n in enumerate(lengths):
        one = {
            name: t if name in shared else t.detach()[b : b + 1].narrow(token_axis[name], 0, n)
            for name, t in padded.items()
        }
        alone.append(run(operator, backend, one, dout[b : b + 1, :, :n], is_causal=causal))
    joined = {
        name: sum((r[name] for r in alone), torch.zeros_like(whole[name]))
        if name in shared
        else torch.cat([r[name] for r in alone], token_axis[name])
        for name in want
    }
    same(joined, want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_growing_the_padding_changes_no_valid_bit(
    monkeypatch: pytest.MonkeyPatch, operator: str, backend: str, dtype: torch.dtype, causal: bool
) -> None:
    """Of the output and of every gradient that a kernel writes; bits for fused kernels.

    On a GPU the heads of a sum are split over blocks by how many tiles there are; here they are not.

    Eager multiplies whole matrices, whose blocking follows their size: close, not equal.
    """
    monkeypatch.setattr(buffers, "_programs_wanted", lambda device: 1)
    B, H, T, S, more = 2, 2, 40, 45, 70
    tensors = draw(operator, B, H, T, S, dtype, D=32)
    tensors["gate"] = torch.rand(B, H, T)
    dout = torch.randn(B, H, T, 24, dtype=dtype)
    lengths = {"key_lengths": [S, 20], "query_lengths": [T, 33]}
    want = run(operator, backend, tensors, dout, attn_mask=hk.Mask(causal=causal, **lengths))
    axis = {"query": -2, "key": -2, "value": -2, "content_bias": 2, "gate": 2, "out": 2}

    def grow(name: str, t: Tensor) -> Tensor:
        if name not in axis:
            return t.detach()
        size = list(t.shape)
        size[axis[name]] = more
        return torch.cat([t.detach(), torch.full(size, 7.0, dtype=t.dtype)], axis[name])

    grown = {name: grow(name, t) for name, t in tensors.items()}
    mask = hk.Mask(causal=causal, **lengths)
    wide = run(operator, backend, grown, grow("out", dout), attn_mask=mask)
    got = {}
    for name, t in wide.items():
        if name in axis:
            size = want[name].shape[axis[name]]
            got[name] = t.narrow(axis[name], 0, size)
            assert not t.narrow(axis[name], size, more).any(), f"{name} in the padding"
        else:
            got[name] = t
    assert_same_bits(backend, got, want)


# ---------------------------------------------------------------------- symmetries


@pytest.mark.parametrize(("T", "S"), [(3, 700), (33, 35)])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_a_batch_is_its_elements(operator: str, backend: str, T: int, S: int) -> None:
    """Bit for bit in fused kernels, of few rows against many keys too: nothing of one batch element enters another."""
    tensors = draw(operator, 3, 2, T, S)
    whole = call(operator, backend, **tensors, is_causal=True)
    for b in range(3):
        one = {n: t if n == "mixing" else t[b : b + 1] for n, t in tensors.items()}
        alone = call(operator, backend, **one, is_causal=True)
        assert_same_bits(backend, alone[0], whole[b])
