"""Operands that are DTensors: outputs and gradients are those of one process, however they are sharded."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import tensor

import heads_kernels as hk
from heads_kernels.testing import CASES, Inputs
from tests.ops.calls import tensors
from tests.support.alike import assert_alike
from tests.support.processes import mesh_of, whole
from tests.support.refusals import assert_refused

#: The dimensions of operands: batch, heads, rows or keys.
HEADS = {"value": "BHT_", "sinks": "H"}
GATED = {"query": "BHT_", "key": "BHT_", **HEADS}
SHARED = {"query": "BT_", "key": "BT_", "mixing": "H_", "content_bias": "BHT", **HEADS}
SMALL = [case for case in CASES if "nasty" in case.tags and case.T <= 200]
#: Each with every sixth case, in `make check` with as many more, and before a release with the others.
SPLITS = [
    pytest.param(splits, (number + further) % 6, marks=[pytest.mark.processes(2 ** len(splits)), *marks])
    for number, splits in enumerate(("B", "H", "T", "BH", "HB", "HH", "HT"))
    for further, marks in enumerate([[], [pytest.mark.check], *[[pytest.mark.release]] * 4])
]


# ---------------------------------------------------------------------- in every rank
def distributed(inputs: Inputs, mesh: Any, splits: str, plain: bool) -> dict[str, Tensor]:
    """The tensors of a call, sharded along `splits`, one letter for each dimension of the mesh.

    Those without that dimension are replicated; with `plain` they, and the gate, are no DTensors; the value always is.
    """
    dims = SHARED if inputs.operator == "collaborative_attention" else GATED
    result = {}
    for name, t in inputs.tensors.items():
        letters = dims.get(name, "")
        if name == "gate":
            letters = "H" if t.dim() == 1 else "BHT_"[: t.dim()]
        placements = [
            tensor.Shard(letters.index(split))
            if split in letters and t.shape[letters.index(split)] != 1
            else tensor.Replicate()
            for split in splits
        ]
        replicated = all(placement.is_replicate() for placement in placements)
        if name == "offset_table" or (plain and name != "value" and (replicated or name == "gate")):
            result[name] = t.detach().clone().requires_grad_()
        else:
            result[name] = tensor.distribute_tensor(t, mesh, placements).requires_grad_()
    return result


@pytest.mark.parametrize("operator", ["gated_attention", "collaborative_attention"])
@pytest.mark.parametrize(("splits", "first"), SPLITS)
def test_cases(operator: str, splits: str, first: int) -> None:
    mesh = mesh_of(*[2] * len(splits))
    cases = [case for case in SMALL if case.operator == operator]
    for number, case in enumerate(cases[first::6]):
        inputs = case.make(torch.float32)
        expected, gradients = inputs.backward()
        sharded = distributed(inputs, mesh, splits, plain=number % 2 == 0)
        here = Inputs(operator, sharded, inputs.options, inputs.dout, inputs.seed)
        out = here.call()
        dout = tensor.distribute_tensor(inputs.dout, mesh, out.placements)
        grads = torch.autograd.grad(out, list(sharded.values()), dout)
        assert_alike(whole(out), expected, name=f"{case}: out")
        for (name, want), grad in zip(gradients.items(), grads, strict=True):
            assert_alike(whole(grad), want, name=f"{case}: d{name}")


#: Tensors of one process; every rank draws the same.
operands = partial(tensors, B=4, Hk=4, T=6, S=6, Dv=8, dtype=torch.float32)


@pytest.mark.parametrize(
    "operator", ["gated_attention", pytest.param("collaborative_attention", marks=pytest.mark.check)]
)
@pytest.mark.processes(2)
def test_compile(operator: str) -> None:
    mesh = mesh_of(2)
    given = operands(operator)
    expected = getattr(hk, operator)(**given, gate=torch.ones(4))
    placements = {"value": tensor.Shard(1)}
    if operator == "gated_attention":
        placements |= {"query": tensor.Shard(1), "key": tensor.Shard(1)}
    split = {
        name: tensor.distribute_tensor(t, mesh, [placements.get(name, tensor.Replicate())]) for name, t in given.items()
    }
    gate = torch.ones(4, requires_grad=True)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(gate: Tensor, **operands: Tensor) -> Tensor:
        return getattr(hk, operator)(**operands, gate=gate) * 2  # type: ignore[no-any-return]

    out = run(gate, **split)
    assert_alike(out.full_tensor().detach(), 2 * expected)
    out.sum().backward()
    assert_alike(gate.grad, 2 * expected.sum((0, 2, 3)))


@pytest.mark.processes(2)
def test_partial_sums() -> None:
    """A sum that no process has yet is reduced."""
    mesh = mesh_of(2)
    given = operands("gated_attention")
    split = {name: tensor.distribute_tensor(t, mesh, [tensor.Shard(1)]) for name, t in given.items()}
    split["value"] = tensor.DTensor.from_local(given["value"] / 2, mesh, [tensor.Partial()])
    out = hk.gated_attention(**split)
    assert out.placements == (tensor.Shard(1),)
    assert_alike(out.full_tensor(), hk.gated_attention(**given))


def check_call(call: Callable[..., Any], given: dict[str, Tensor], dim: int) -> None:
    """Results and gradients, of processes whose generators differ."""
    mesh = mesh_of(2)
    results = []
    for split in (False, True):
        torch.manual_seed(7 + split * torch.distributed.get_rank())
        parts = {
            name: tensor.distribute_tensor(t, mesh, [tensor.Shard(dim)]) if split else t.clone()
            for name, t in given.items()
        }
        found = call(**{name: part.requires_grad_() for name, part in parts.items()})
        found = [found] if isinstance(found, Tensor) else list(found)
        if differentiable := [each.square().sum() for each in found if each.requires_grad]:
            sum(differentiable).backward()
            found += [part.grad for part in parts.values()]
        results.append([whole(each).detach() for each in found])
    assert_alike(results[1], results[0])


@pytest.mark.processes(2)
def test_other_calls() -> None:
    """One head is computed, and counted, once by every process; all draw the dropout of the first."""
    given, one_head = operands("gated_attention"), operands("gated_attention", H=1, Hk=1)
    shared = {"query": torch.randn(3, 4, 6, 8), "key": torch.randn(3, 2, 9, 8)}
    mask = hk.Mask(key_lengths=torch.tensor([9, 4, 1]))
    check_call(hk.gated_attention, one_head, 1)
    check_call(partial(hk.gated_attention, dropout_p=0.5), given, 1)
    for dim in (0, 1):
        check_call(partial(hk.gated_attention, return_lse=True), given, dim)
        check_call(partial(hk.attention_statistics, attn_mask=mask, received=True), shared, dim)


@pytest.mark.processes(2)
def test_received() -> None:
    """Of query rows that processes share, each adds what its rows give; weights are split with them."""
    mesh = mesh_of(2)
    query, key = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 9, 8)
    weights = torch.rand(2, 1, 7)
    expected = hk.attention_statistics(query, key, is_causal=True, received=weights)
    split = tensor.distribute_tensor(query, mesh, [tensor.Shard(2)])
    for given in (weights, tensor.distribute_tensor(weights, mesh, [tensor.Shard(2)])):
        found = hk.attention_statistics(split, key, is_causal=True, received=given)
        assert found.received.placements == (tensor.Partial(),)
        assert_alike([each.full_tensor() for each in found], list(expected))


# ---------------------------------------------------------------------- what is refused
def part(sizes: tuple[int, ...], mesh: Any, *placements: Any) -> Tensor:
    """A DTensor with parts of these sizes."""
    return tensor.DTensor.from_local(torch.randn(sizes), mesh, placements, run_check=False)


def test_refusals(fake_mesh: Callable[..., Any]) -> None:
    mesh, shard, all_ = fake_mesh(2, 2), tensor.Shard, tensor.Replicate()
    key, shared = torch.randn(2, 4, 6, 8), torch.randn(2, 6, 8)
    query = part((2, 4, 3, 8), mesh, shard(0), all_)
    other = torch.distributed.init_device_mesh("cpu", (4,))
    groups = shared, shared, torch.randn(2, 3, 6, 8), part((3, 8), mesh, shard(0), all_)
    whole_query, by_head = part((2, 4, 3, 8), mesh, all_, all_), part((2, 3, 3, 8), mesh, shard(1), all_)
    assert_refused(
        ((part((2, 4, 3, 4), mesh, shard(3), all_), key, key), r"query is sharded along D .*batch, heads or sequence"),
        ((query, *[part((4, 2, 6, 8), mesh, shard(1), all_)] * 2), "key is sharded along H, but query along B"),
        ((by_head, key[:, :3], key[:, :3]), r"query has 6 heads, .* 0 to 2; .* groups? of 2"),
        ((whole_query, *[part((2, 4, 6, 8), other, all_)] * 2), r"key is on the mesh .* but query is on"),
        of=hk.gated_attention,
    )
    real = tensor.DTensor.from_local(torch.ones(2, 3, dtype=torch.bool), mesh, (all_, all_))
    call, refused = partial(hk.gated_attention, *[whole_query] * 3), r"is a DTensor; pass full_tensor\(\)"
    by_group = r"^mixing has 6 heads, .* 0 to 2; .* groups? of 2 .* value head"
    assert_refused(
        (lambda: hk.collaborative_attention(*groups), by_group),
        (lambda: call(attn_mask=real[:, None, None]), TypeError, refused),
        (lambda: call(attn_mask=hk.Mask(key_mask=real)), TypeError, refused),
    )
    assert hk.explain(hk.gated_attention, *[whole_query] * 3).backend == "cpu"
