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


@pytest.mark.parametrize("backend", COLLABORATIVE)
def test_grouped_values_are_values_repeated(backend: str) -> None:
    B, H, T, S = 2, 6, 33, 70
    tensors = draw("collaborative_attention", B, H, T, S)
    tensors["value"] = torch.randn(B, 3, S, 24)
    tensors["gate"] = torch.tensor([0.5, 0.0, 1.0, 2.0, 0.0, 0.0])
    dout = torch.randn(B, H, T, 24)
    got = run("collaborative_attention", backend, tensors, dout, is_causal=True)
    repeated = {**tensors, "value": tensors["value"].repeat_interleave(2, 1)}
    want = run("collaborative_attention", backend, repeated, dout, is_causal=True)
    want["value"] = want["value"].unflatten(1, (3, 2)).sum(2)
    same(got, want)


@pytest.mark.parametrize("backend", COLLABORATIVE)
def test_zero_features_of_mixing_are_features_removed(backend: str) -> None:
    B, H, T, S, Ds = 2, 2, 20, 21, 64
    tensors = draw("collaborative_attention", B, H, T, S, D=Ds)
    used = torch.arange(Ds) // 16 % 2 == 0  # chunks 0 and 2
    tensors["mixing"] = (tensors["mixing"] * used).detach()
    dout = torch.randn(B, H, T, 24)
    got = run("collaborative_attention", backend, tensors, dout, scale=0.2)
    narrow = {
        name: t.detach()[..., used] if name in ("query", "key", "mixing") else t.detach()
        for name, t in tensors.items()
    }
    want = run("collaborative_attention", backend, narrow, dout, scale=0.2)
    assert not got["query"][..., ~used].any()
    assert not got["key"][..., ~used].any()
    got |= {name: got[name][..., used] for name in ("query", "key", "mixing")}
    same(got, want)


@pytest.mark.parametrize("backend", COLLABORATIVE)
def test_a_constant_content_bias_changes_nothing(backend: str) -> None:
    tensors = draw("collaborative_attention", 2, 3, 17, 19, D=32)
    dout = torch.randn(2, 3, 17, 24)
    want = run("collaborative_attention", backend, tensors, dout)
    tensors["content_bias"] = tensors["content_bias"].detach() + 3.0
    same(run("collaborative_attention", backend, tensors, dout), want)
    zero = torch.zeros_like(want["content_bias"].sum(2))
    assert_alike(want["content_bias"].sum(2), zero)


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


@pytest.mark.parametrize("backend", GATED)
def test_grouped_heads_are_expanded_heads(backend: str) -> None:
    tensors = draw("gated_attention", 2, 6, 17, 19, Hk=2)
    dout = torch.randn(2, 6, 17, 24)
    got = run("gated_attention", backend, tensors, dout, is_causal=True)
    wide = tensors | {name: tensors[name].repeat_interleave(3, 1) for name in ("key", "value")}
    want = run("gated_attention", backend, wide, dout, is_causal=True)
    for name in ("key", "value"):
        want[name] = want[name].unflatten(1, (2, 3)).sum(2)
    same(got, want)


# ---------------------------------------------------------------------- closed heads
@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_no_features_are_equal_weights(backend: str) -> None:
    query, key, value = torch.randn(1, 2, 3, 0), torch.randn(1, 2, 5, 0), torch.randn(1, 2, 5, 4)
    out = hk.gated_attention(query, key, value, scale=1.0, backend=backend)
    assert_alike(out, value.mean(2, keepdim=True).expand_as(out))
    empty = hk.gated_attention(query, key, value[..., :0], scale=1.0, backend=backend)
    assert empty.shape == (1, 2, 3, 0)
    rows = hk.attention_statistics(query, key, scale=1.0, backend=backend)
    assert_alike(rows.lse, torch.full((1, 2, 3), 5.0).log())


@pytest.mark.slow
@pytest.mark.parametrize("mask", [
    hk.Mask(), hk.Mask(causal="lower_right"), hk.Mask(causal="lower_right", window=(20, 0)),
    hk.Mask(key_lengths=torch.tensor([70, 3])), hk.Mask(key_mask=torch.arange(140).view(2, 70) % 3 > 0),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("gate", [
    None, (6,), (1, 6), (2, 1), (2, 6, 1), (1, 6, 1, 24), (2, 1, 1, 24), (2, 6, 1, 1)
], ids=str)  # fmt: skip
@pytest.mark.parametrize("backend", GATED)
def test_decoding_with_grouped_heads(
    backend: str, gate: tuple[int, ...] | None, mask: hk.Mask
) -> None:
    """One query row a head: kernels may make one tile of the heads that share a key head."""
    tensors = draw("gated_attention", 2, 6, 1, 70, Hk=2)
    expanded = {n: t if n == "query" else t.repeat_interleave(3, 1) for n, t in tensors.items()}
    values = None if gate is None else torch.randn(gate)
    for closed in (False, True):
        if closed and values is not None:
            values.view(-1)[-1] = 0.0
        options = {"gate": values, "attn_mask": mask}
        got = run("gated_attention", backend, tensors, torch.ones(2, 6, 1, 24), **options)["out"]
        want = call("gated_attention", backend, **expanded, **options)
        assert_alike(got, want)


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


@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 17), (2, 3, 17, 24)])
def test_gradient_of_a_gate(operator: str, backend: str, shape: tuple[int, ...]) -> None:
    """`dL/dg = sum dout * o`, also where g is 0: out is linear in the gate."""
    tensors = draw(operator, 2, 3, 17, 19, torch.float64)
    dout = torch.randn(2, 3, 17, 24, dtype=torch.float64)
    gate = torch.rand(shape, dtype=torch.float64).masked_fill(torch.rand(shape) < 0.4, 0.0)
    gate[..., :1] = 0.0
    attended = call(operator, backend, **tensors).detach()
    got = run(operator, backend, tensors | {"gate": gate}, dout)
    rank = len(shape)
    along = (0, 2, 3) if rank == 1 else tuple(range(rank, 4))
    terms = dout * attended
    want = terms.sum(along) if along else terms
    assert_alike(got["gate"], want)

    skipped = run(operator, backend, tensors | {"gate": gate}, dout, closed_grad=False)
    assert not skipped["gate"][gate == 0].any()
    assert_same_bits(backend, skipped["gate"][gate != 0], got["gate"][gate != 0])
    for name in tensors:
        if name == "mixing":  # no entry of it is 0
            assert bool((tensors[name] != 0).all())
        assert_alike(skipped[name], got[name])


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
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_the_order_of_keys_does_not_matter(operator: str, backend: str) -> None:
    tensors = draw(operator, 2, 2, 9, 70, torch.float64)
    dout = torch.randn(2, 2, 9, 24, dtype=torch.float64)
    visible = torch.rand(2, 70) < 0.7
    want = run(operator, backend, tensors, dout, attn_mask=hk.Mask(key_mask=visible))
    order = torch.randperm(70)
    axis = {"key": -2, "value": -2, "content_bias": -1}
    mixed = {
        n: t.detach().index_select(axis[n], order) if n in axis else t for n, t in tensors.items()
    }
    got = run(operator, backend, mixed, dout, attn_mask=hk.Mask(key_mask=visible[:, order]))
    moved = {n: t.index_select(axis[n], order) if n in axis else t for n, t in want.items()}
    same(got, moved)


@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_a_batch_is_its_elements(operator: str, backend: str) -> None:
    """Bit for bit in fused kernels: nothing of one batch element enters another."""
    tensors = draw(operator, 3, 2, 33, 35)
    whole = call(operator, backend, **tensors, is_causal=True)
    for b in range(3):
        one = {n: t if n == "mixing" else t[b : b + 1] for n, t in tensors.items()}
        alone = call(operator, backend, **one, is_causal=True)
        assert_same_bits(backend, alone[0], whole[b])


@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_out_is_linear_in_value(operator: str, backend: str) -> None:
    tensors = draw(operator, 2, 2, 17, 19, torch.float64)
    other = torch.randn_like(tensors["value"])
    one = call(operator, backend, **tensors)
    two = call(operator, backend, **tensors | {"value": other})
    both = call(operator, backend, **tensors | {"value": 2 * tensors["value"] - 3 * other})
    assert_alike(both, 2 * one - 3 * two)
