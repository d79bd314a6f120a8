"""Leading batch dimensions: none, several, broadcast; every argument that has them follows."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import heads_kernels as hk
from tests.ops.calls import DIFFERENTIABLE, EVERY, NAMES, OPERATORS, assert_same_bits, call, parsed
from tests.support.alike import assert_alike

H, T, S, D = 4, 5, 7, 8
#: Batch dimensions of query, key and value, and what they broadcast to.
BATCHES = {
    "none": ((), (), (), ()),
    "one": ((1,), (3,), (3,), (3,)),
    "fewer": ((2, 3), (3,), (), (2, 3)),
    "crossed": ((2, 1), (1, 3), (2, 3), (2, 3)),
    "three": ((2, 1, 2), (2, 1, 2), (2, 1, 2), (2, 1, 2)),
    "empty": ((0, 2), (1, 2), (0, 1), (0, 2)),
}


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("own", [(2, 1), (1, 0), (2, 0)], ids=str)
def test_a_bias_of_an_empty_batch(own: tuple[int, ...], backend: str) -> None:
    query = torch.randn(2, 0, H, T, D, requires_grad=True)
    bias = torch.randn(*own, H, 1, T, requires_grad=True)
    out = call("gated_attention", backend, query=query, key=query, value=query, bias=bias)
    assert out.shape == query.shape
    (grad,) = torch.autograd.grad(out.sum(), bias)
    assert torch.equal(grad, torch.zeros_like(bias))


def operands(operator: str, names: tuple[tuple[int, ...], ...], grad: bool = False) -> dict[str, Any]:
    """Random arguments of `operator` with these batch dimensions of query, key and value."""
    query, key, value, batch = names
    shared = operator == "collaborative_attention"
    heads: tuple[int, ...] = () if shared else (H,)
    found = {
        "query": torch.randn(*query, *heads, T, D, dtype=torch.float64),
        "key": torch.randn(*key, *heads, S, D, dtype=torch.float64),
    }
    if operator != "attention_statistics":
        found["value"] = torch.randn(*value, H, S, D, dtype=torch.float64)
    if shared:
        found["mixing"] = torch.randn(H, D, dtype=torch.float64)
        found["content_bias"] = torch.randn(*batch, H, S, dtype=torch.float64)
    return {name: tensor.requires_grad_(grad) for name, tensor in found.items()}


def expanded(operator: str, arguments: dict[str, Any], batch: tuple[int, ...]) -> dict[str, Any]:
    """The same call with one batch dimension of size B, made by hand."""
    of_heads = 2 if operator == "collaborative_attention" else 3
    kept = {"query": of_heads, "key": of_heads, "value": 3}  # the dimensions after the batch
    kept |= {"content_bias": 2, "exclude_keys": 1, "received": 2}
    result = dict(arguments)
    for name, tensor in arguments.items():
        count = tensor.dim() - len(batch) if name == "gate" else kept.get(name)
        if count is not None and tensor.dim() > 1:
            own = tensor.shape[tensor.dim() - count :]
            result[name] = tensor.expand(*batch, *own).reshape(math.prod(batch), *own)
    return result


@pytest.mark.parametrize("names", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("gate_rank", [1, 2, 3, 4])
@pytest.mark.parametrize("operator", OPERATORS)
def test_batch_dimensions_are_flattened(operator: str, gate_rank: int, names: tuple[tuple[int, ...], ...]) -> None:
    batch = names[3]
    arguments = operands(operator, names, grad=True)
    shape = (H,) if gate_rank == 1 else (*batch, *(H, T, D)[: gate_rank - 1])
    arguments["gate"] = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    leaves = list(arguments.values())
    out = call(operator, "eager", **arguments, is_causal=True)
    assert out.shape == (*batch, H, T, D)
    by_hand = call(operator, "eager", **expanded(operator, arguments, batch), is_causal=True)
    assert_alike(out.reshape(by_hand.shape), by_hand)
    got = torch.autograd.grad(out.square().sum(), leaves)
    want = torch.autograd.grad(by_hand.square().sum(), leaves)
    for name, a, b in zip(arguments, got, want, strict=True):
        assert_alike(a, b, name=name)


@pytest.mark.parametrize(("operator", "backend"), EVERY)
def test_on_every_backend(operator: str, backend: str) -> None:
    names = BATCHES["crossed"]
    arguments = {n: t.float() for n, t in operands(operator, names).items()}
    if operator == "attention_statistics":
        arguments |= {"received": torch.rand(2, 1, H, T), "exclude_keys": torch.rand(2, 1, S) > 0.5}
    got = call(operator, backend, **arguments)
    want = call(operator, backend, **expanded(operator, arguments, names[3]))
    parts = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
    for a, b in parts:
        assert a.shape[:2] == names[3]
        assert_same_bits(backend, a.reshape(b.shape), b)


@pytest.mark.parametrize(
    "batch", [pytest.param((2,), id="one"), pytest.param((2, 3), id="two", marks=pytest.mark.check)]
)
@pytest.mark.parametrize(
    ("operator", "backend"),
    [*DIFFERENTIABLE, *(("entmax_attention", name) for name in NAMES)],
)
def test_entries_of_an_expanded_operand_have_their_own_gradients(
    operator: str, backend: str, batch: tuple[int, ...]
) -> None:
    """Also where they are no leaf, but what `expand` returned: their sum is left to its own backward pass."""
    given = operands("collaborative_attention" if operator[0] == "c" else "gated_attention", (batch,) * 4)
    if operator == "entmax_attention":
        given["alpha"] = torch.full((H,), 1.5)
    else:
        given["sinks"] = torch.randn(H)
    given = {name: tensor.float() for name, tensor in given.items()}
    given["gate"] = torch.randn(*batch, H, T)
    dense = torch.randn(*batch, H, T, S)
    for dim, bias in [
        *((dim, dense) for dim in range(dense.dim())),
        *((dim, torch.randn(H, 9)) for dim in (0, 1)),
    ]:
        views, copies = {}, {}
        for name, tensor in {**given, "bias": bias}.items():
            last = 1 if name in ("query", "key", "value") else 0  # the last dimension is contiguous
            if dim < tensor.dim() - last:
                views[name] = tensor.narrow(dim, 0, 1).requires_grad_().expand(tensor.shape)
                copies[name] = views[name].detach().clone().requires_grad_()
        grads = []
        for expanded_ones in (views, copies):
            arguments = {**given, "bias": bias, **expanded_ones}
            if bias.dim() == 2:
                arguments["bias"] = hk.OffsetBias(arguments["bias"])
            out = call(operator, backend, **arguments)
            leaves = list(expanded_ones.values())
            grads.append(torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(-2)))
        for name, found, want in zip(views, *grads, strict=True):
            assert_alike(found, want, name=f"d{name} along {dim}")


@pytest.mark.parametrize("names", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("mask_rank", [2, 3, 4, 5])
def test_masks_mean_what_they_mean_to_sdpa(names: tuple[tuple[int, ...], ...], mask_rank: int) -> None:
    batch = names[3]
    if mask_rank > len(batch) + 3:
        pytest.skip("more dimensions than the call has")
    arguments = operands("gated_attention", names)
    shape = (*batch, H, T, S)[-mask_rank:]
    mask = torch.rand(shape) > 0.3
    mask[..., 0] = True  # SDPA's rows that see nothing differ between its kernels
    out = hk.gated_attention(**arguments, attn_mask=mask, backend="eager")
    # In PyTorch's own products, which broadcast any dimensions.
    scores = arguments["query"] @ arguments["key"].mT * D**-0.5
    want = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ arguments["value"]
    assert_alike(out, want)
    if batch and 0 not in batch:
        sdpa = F.scaled_dot_product_attention(*arguments.values(), mask)
        assert_alike(out, sdpa)


def test_operands_are_views_where_one_stride_serves() -> None:
    """Broadcasting and flattening copy nothing with one batch dimension, or several in memory order."""
    wide, key = torch.randn(2, 3, H, T, D), torch.randn(1, 1, H, S, D)
    problem = parsed("gated_attention", wide, key, key)
    assert problem.query.data_ptr() == wide.data_ptr()
    assert problem.key.data_ptr() == key.data_ptr()
    assert problem.key.stride(0) == 0


REFUSED: dict[str, tuple[dict[str, Tensor], str]] = {
    "gate without its batch": (
        {"gate": torch.ones(1, H)},
        "gate has 2 dimensions, but the call has 2 batch dimensions; pass [H], [..., H], [..., H, T] or",
    ),
    "gate of another batch": (
        {"gate": torch.ones(3, 2, H)},
        "gate has shape [3, 2, 4], but the batch dimensions of the call are [2, 3]; pass [2, 3, H]",
    ),
    "key of another batch": (
        {"key": torch.ones(3, 3, H, S, D)},
        "query, key, value have batch dimensions [2, 3], [3, 3], [2, 3]; make every size equal",
    ),
    "mask of another batch": (
        {"attn_mask": torch.ones(3, 2, H, T, S, dtype=torch.bool)},
        "attn_mask has shape [3, 2, 4, 5, 7], but the batch dimensions of the call are [2, 3];",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_named(name: str) -> None:
    bad, message = REFUSED[name]
    arguments = {
        "query": torch.ones(2, 3, H, T, D),
        "key": torch.ones(2, 3, H, S, D),
        "value": torch.ones(2, 3, H, S, D),
        **bad,
    }
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        hk.gated_attention(**arguments)


# ---------------------------------------------------------------------- SDPA's signature
def test_positional_arguments_are_those_of_sdpa() -> None:
    """The fourth is a mask or a bias, also where a gate would have its shape: [B, H, T, Dv] with Dv = S."""
    query, key, value = (torch.randn(2, H, T, T) for _ in range(3))
    mask, bias = torch.rand(T, T) > 0.3, torch.rand(2, H, T, T)
    mask.fill_diagonal_(True)
    for arguments in ((mask,), (mask, 0.0), (mask, 0.0, False), (None, 0.0, True), (bias,)):
        got = hk.gated_attention(query, key, value, *arguments)
        want = F.scaled_dot_product_attention(query, key, value, *arguments)
        assert_alike(got, want)
    with pytest.raises(TypeError, match="positional argument"):
        hk.gated_attention(query, query, query, None, 0.0, False, torch.ones(H))  # type: ignore[misc]


def test_enable_gqa() -> None:
    query, few, one = (torch.randn(2, heads, T, D) for heads in (H, 2, 1))
    for key in (few, one):
        got = hk.gated_attention(query, key, key, enable_gqa=True)
        want = F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
        assert_alike(got, want)
    got = hk.gated_attention(query, one, one, enable_gqa=False)  # broadcast, as SDPA does
    assert_alike(got, F.scaled_dot_product_attention(query, one, one))
    with pytest.raises(ValueError, match="enable_gqa is False"):
        hk.gated_attention(query, few, few, enable_gqa=False)
    with pytest.raises(TypeError, match="enable_gqa is a int"):
        hk.gated_attention(query, query, query, enable_gqa=1)  # type: ignore[arg-type]
