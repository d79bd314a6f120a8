"""Leading batch dimensions: none, several, broadcast; every argument that has them follows."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import heads_kernels as hk
from tests.ops.calls import ATTENTION, EVERY, NAMES, OPERATORS, assert_same_bits, call, parsed
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
    kept |= {"content_bias": 2, "exclude_keys": 1, "received": 2, "attn_mask": 3}
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
    """Of all operands, of gates of every rank, and of masks, which broadcast as those of SDPA do."""
    batch = names[3]
    arguments = operands(operator, names, grad=True)
    shape = (H,) if gate_rank == 1 else (*batch, *(H, T, D)[: gate_rank - 1])
    arguments["gate"] = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    leaves = list(arguments.values())
    mask = torch.rand((*batch, H, T, S)[-1 - gate_rank :]) > 0.3
    by_hand = expanded(operator, arguments | {"attn_mask": mask.expand(*batch, H, T, S)}, batch)
    out = call(operator, "eager", **arguments, attn_mask=mask, is_causal=True)
    assert out.shape == (*batch, H, T, D)
    want = call(operator, "eager", **by_hand, is_causal=True)
    assert_alike(out.reshape(want.shape), want)
    got = torch.autograd.grad(out.square().sum(), leaves)
    assert_alike(got, torch.autograd.grad(want.square().sum(), leaves))


@pytest.mark.parametrize(("operator", "backend"), EVERY)
def test_on_every_backend(operator: str, backend: str) -> None:
    names = BATCHES["crossed"]
    arguments: dict[str, Any] = {n: t.float() for n, t in operands(operator, names).items()}
    if operator == "attention_statistics":
        arguments |= {"received": torch.rand(2, 1, H, T), "exclude_keys": torch.rand(2, 1, S) > 0.5}
    else:
        arguments["return_lse"] = True
    got = call(operator, backend, **arguments)
    want = call(operator, backend, **expanded(operator, arguments, names[3]))
    for a, b in zip(got, want, strict=True):
        assert a.shape[:2] == names[3]
        assert_same_bits(backend, a.reshape(b.shape), b)


@pytest.mark.parametrize(
    "batch", [pytest.param((2,), id="one"), pytest.param((2, 3), id="two", marks=pytest.mark.check)]
)
@pytest.mark.parametrize(("operator", "backend"), ATTENTION)
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
    along = [(dim, dense) for dim in range(dense.dim())]
    for dim, bias in [*along, (0, torch.randn(H, 9)), (1, torch.randn(H, 9))]:
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


def test_operands_are_views_where_one_stride_serves() -> None:
    """Broadcasting and flattening copy nothing with one batch dimension, or several in memory order."""
    wide, key = torch.randn(2, 3, H, T, D), torch.randn(1, 1, H, S, D)
    problem = parsed("gated_attention", wide, key, key)
    assert problem.query.data_ptr() == wide.data_ptr()
    assert problem.key.data_ptr() == key.data_ptr()
    assert problem.key.stride(0) == 0


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
