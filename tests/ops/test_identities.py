"""Identities that tie features together: two ways to say the same thing give the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import heads_kernels as hk
from heads_kernels.ops import buffers
from tests.ops.calls import DIFFERENTIABLE, NAMES, assert_same_bits, call, run, tensors
from tests.support.alike import assert_alike


def draw(operator: str, B: int, H: int, T: int, S: int, **more: Any) -> dict[str, Tensor]:
    """Tensor arguments of a call by name."""
    sizes = {"B": B, "H": H, "Hk": H, "T": T, "S": S, "D": 16, "Dv": 24, "dtype": torch.float32}
    return tensors(operator, **(sizes | more))


# ---------------------------------------------------------------------- one operator by the other
@pytest.mark.parametrize("backend", NAMES)
def test_block_indicator_mixing_is_ordinary_attention(backend: str) -> None:
    B, H, T, S, D = 2, 4, 33, 40, 16
    shared = draw("collaborative_attention", B, H, T, S, D=H * D)
    shared["mixing"] = torch.eye(H).repeat_interleave(D, 1)
    del shared["content_bias"]
    dout = torch.randn(B, H, T, 24)
    got = run("collaborative_attention", backend, dout, **shared, is_causal=True)

    def split(t: Tensor) -> Tensor:
        return t.unflatten(2, (H, D)).transpose(1, 2)

    heads = {"query": split(shared["query"]), "key": split(shared["key"]), "value": shared["value"]}
    want = run("gated_attention", "eager", dout, **heads, is_causal=True)
    want["query"], want["key"] = (want[n].transpose(1, 2).flatten(2) for n in ("query", "key"))
    assert_alike({name: got[name] for name in want}, want)


# ---------------------------------------------------------------------- PyTorch's own attention
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "pairs", "heads"])
@pytest.mark.parametrize("backend", NAMES)
def test_gate_of_ones_is_sdpa(backend: str, mask: str) -> None:
    B, H, T, S = 2, 4, 33, 37
    given = draw("gated_attention", B, H, T, S, Hk=2)
    dout = torch.randn(B, H, T, 24)
    options: dict[str, Any] = {"is_causal": mask == "causal"}
    if mask == "padding":
        options["attn_mask"] = (torch.arange(S) < torch.tensor([[S], [9]]))[:, None, None]
    elif mask in ("pairs", "heads"):
        shape = (T, S) if mask == "pairs" else (B, H, T, S)
        options["attn_mask"] = torch.rand(shape) < 0.7
        options["attn_mask"][..., 0] = True  # SDPA has no word for rows that see nothing
    got = run("gated_attention", backend, dout, **given, gate=torch.ones(H), **options)

    leaves = {name: t.requires_grad_() for name, t in given.items()}
    want = F.scaled_dot_product_attention(*leaves.values(), **options, enable_gqa=True)
    grads = torch.autograd.grad(want, list(leaves.values()), dout)
    assert got.pop("gate").any()
    assert_alike(got, {"out": want.detach(), **dict(zip(leaves, grads, strict=True))})


# ---------------------------------------------------------------------- closed heads, exact zeros
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_a_closed_head_is_a_head_removed(operator: str, backend: str) -> None:
    B, H, T, S = 2, 4, 33, 35
    gate = torch.tensor([0.7, 0.0, 1.0, -0.0])
    given = draw(operator, B, H, T, S) | {"gate": gate}
    dout = torch.randn(B, H, T, 24)
    kept = gate != 0
    got = run(operator, backend, dout, **given, is_causal=True)
    assert not got["out"][:, ~kept].any()

    per_head = {"query": 1, "key": 1, "value": 1}
    if operator == "collaborative_attention":
        per_head = {"value": 1, "mixing": 0, "content_bias": 1}
    axes = {"out": 1, "gate": 0, **per_head}

    def without(name: str, t: Tensor) -> Tensor:
        return t.movedim(axes[name], 0)[kept].movedim(0, axes[name]) if name in axes else t

    fewer = {name: without(name, t) for name, t in given.items()}
    scale = {} if operator == "gated_attention" else {"scale": (16 / H) ** -0.5}
    want = run(operator, backend, dout[:, kept], **fewer, is_causal=True, **scale)
    for name in per_head:
        closed = got[name].movedim(axes[name], 0)[~kept]
        assert not closed.any(), f"d{name} of a closed head"
    assert_alike({name: without(name, t) for name, t in got.items()}, want)


@pytest.mark.parametrize("backend", NAMES)
def test_closed_grad_of_mixing(backend: str) -> None:
    """With closed_grad=False the zeros of mixing report no slope; all others keep theirs."""
    arguments = tensors("collaborative_attention", D=64)
    arguments["mixing"][0, :32] = 0.0
    arguments["mixing"][2, 16:] = 0.0
    arguments["mixing"][3, ::2] = 0.0
    zero = arguments["mixing"] == 0
    full = run("collaborative_attention", backend, **arguments)
    less = run("collaborative_attention", backend, **arguments, closed_grad=False)
    assert_same_bits(backend, less["out"], full["out"])
    assert full["mixing"][zero].all()
    full["mixing"].masked_fill_(zero, 0.0)
    assert_alike(less, full)


@pytest.mark.parametrize(
    ("operator", "backend", "name"),
    [
        (operator, backend, name)
        for operator, backend in DIFFERENTIABLE
        for name in ("gate", "mixing")
        if name == "gate" or operator == "collaborative_attention"
    ],
)
def test_zero_is_judged_in_its_own_dtype(operator: str, backend: str, name: str) -> None:
    """A number that float64 holds and float32 does not closes nothing beside float32 queries."""
    arguments = tensors(operator, Hk=4, D=64, dtype=torch.float32)
    small = torch.tensor([1e-50, 0.0, -1e-50, 1.0], dtype=torch.float64)
    if name == "mixing":
        arguments["mixing"] = arguments["mixing"].double()
        arguments["mixing"][3] = small.repeat_interleave(16)  # a chunk each
    else:
        arguments["gate"] = small
    grads = [run(operator, backend, **arguments, closed_grad=closed_grad)[name] for closed_grad in (True, False)]
    zero = arguments[name] == 0
    assert grads[0].all()
    assert not grads[1][zero].any()
    assert_alike(grads[1][~zero], grads[0][~zero])


# ---------------------------------------------------------------------- padding and packing
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_packed_is_padded_is_one_by_one(operator: str, backend: str, causal: bool) -> None:
    lengths, H = [40, 1, 17], 3
    longest, total, B = max(lengths), sum(lengths), len(lengths)
    padded = draw(operator, B, H, longest, longest)
    dout = torch.randn(B, H, longest, 24)
    token_axis = {"out": 2, "query": -2, "key": -2, "value": 2, "content_bias": 2}  # none of mixing

    def own(name: str, t: Tensor, b: int) -> Tensor:
        """The real tokens of sequence b."""
        return t[b : b + 1].narrow(token_axis[name], 0, lengths[b]) if name in token_axis else t

    def pack(name: str, t: Tensor) -> Tensor:
        """The real tokens of every sequence, one behind the other: batch 1."""
        parts = [own(name, t, b) for b in range(B)]
        return torch.cat(parts, token_axis[name]) if name in token_axis else t

    mask = hk.Mask(causal=causal, key_lengths=lengths, query_lengths=lengths)
    whole = run(operator, backend, dout, **padded, attn_mask=mask)
    want = {name: pack(name, t) for name, t in whole.items()}

    borders = torch.tensor([0, *lengths]).cumsum(0)
    document = {name: pack(name, t) for name, t in padded.items()}
    mask = hk.Mask.from_cu_seqlens(borders, total) & hk.Mask(causal=causal)
    assert_alike(run(operator, backend, pack("out", dout), **document, attn_mask=mask), want)

    alone = []
    for b in range(B):
        one = {name: own(name, t, b) for name, t in padded.items()}
        alone.append(run(operator, backend, own("out", dout, b), **one, is_causal=causal))
    for name, tensor in want.items():
        parts = [each[name] for each in alone]
        joined = torch.cat(parts, token_axis[name]) if name in token_axis else sum(parts)
        assert_alike(joined, tensor, name=name)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_growing_the_padding_changes_no_valid_bit(
    monkeypatch: pytest.MonkeyPatch, operator: str, backend: str, dtype: torch.dtype, causal: bool
) -> None:
    """Of the output and of every gradient that a kernel writes; bits for fused kernels.

    On a GPU the heads of a sum are split over blocks by how many tiles there are; here they are not.
    """
    monkeypatch.setattr(buffers, "programs_wanted", lambda device: 1)
    B, H, T, S, more = 2, 2, 40, 45, 70
    given = draw(operator, B, H, T, S, dtype=dtype, D=32) | {"gate": torch.rand(B, H, T)}
    dout = torch.randn(B, H, T, 24, dtype=dtype)
    mask = hk.Mask(causal=causal, key_lengths=[S, 20], query_lengths=[T, 33])
    want = run(operator, backend, dout, **given, attn_mask=mask)
    axis = {"query": -2, "key": -2, "value": -2, "content_bias": 2, "gate": 2, "out": 2}

    def grow(name: str, t: Tensor) -> Tensor:
        if name not in axis:
            return t
        size = list(t.shape)
        size[axis[name]] = more
        return torch.cat([t, torch.full(size, 7.0, dtype=t.dtype)], axis[name])

    grown = {name: grow(name, t) for name, t in given.items()}
    got = run(operator, backend, grow("out", dout), **grown, attn_mask=mask)
    for name in axis.keys() & got.keys():
        size = want[name].shape[axis[name]]
        assert not got[name].narrow(axis[name], size, more).any(), f"{name} in the padding"
        got[name] = got[name].narrow(axis[name], 0, size)
    assert_same_bits(backend, got, want)


# ---------------------------------------------------------------------- symmetries
@pytest.mark.parametrize(("T", "S"), [(3, 700), (33, 35)])
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_a_batch_is_its_elements(operator: str, backend: str, T: int, S: int) -> None:
    """Bit for bit in fused kernels, of few rows against many keys too: nothing of one batch element enters another."""
    given = draw(operator, 3, 2, T, S)
    whole = call(operator, backend, **given, is_causal=True)
    for b in range(3):
        one = {n: t if n == "mixing" else t[b : b + 1] for n, t in given.items()}
        alone = call(operator, backend, **one, is_causal=True)
        assert_same_bits(backend, alone[0], whole[b])
