"""Modules under tensor parallelism are what they are in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.processes import Processes

parallel = pytest.importorskip("torch.distributed.tensor.parallel")
distributed = pytest.importorskip("heads_kernels.integrations.distributed")

E, H, B, T = 16, 4, 3, 6
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gated": lambda: hk.nn.GatedMultiheadAttention(E, H),
    "grouped": lambda: hk.nn.GatedMultiheadAttention(E, H, num_key_heads=2),
    "multi_query": lambda: hk.nn.GatedMultiheadAttention(E, H, num_key_heads=1),
    "head_gate": lambda: hk.nn.GatedMultiheadAttention(E, H, output_gate="head", bias=False),
    "element_gate": lambda: hk.nn.GatedMultiheadAttention(E, H, output_gate="element"),
    "dropout": lambda: hk.nn.GatedMultiheadAttention(E, H, dropout=0.3),
    "collaborative": lambda: hk.nn.CollaborativeMultiheadAttention(E, H, 12),
    "ragged": lambda: hk.nn.CollaborativeMultiheadAttention(
        E, H, 12, ragged=True, output_gate="head"
    ),
    "merged": lambda: hk.nn.MergedAttention(E, H, num_key_heads=2, output_gate="head"),
}


# ---------------------------------------------------------------------- in every rank
def check_layer(name: str, gates: str | None) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    plain = nn.Sequential(LAYERS[name]())
    if gates:
        hk.heads.gate(plain, lambda H: hk.nn.HardConcrete(H, per_sample=gates == "per sample"))
    split = copy.deepcopy(plain)
    parallel.parallelize_module(split, mesh, distributed.tensor_parallel_plan(split, mesh))
    x = torch.randn(B, T, E)
    source = [torch.randn(B, T, E)] if name == "merged" else []
    real = torch.ones(B, T, dtype=torch.bool)
    real[1, 4:] = False
    results = []
    for model, seed in ((plain, 3), (split, 3 + torch.distributed.get_rank())):
        torch.manual_seed(seed)
        given = x.clone().requires_grad_()
        out, _ = model[0](given, *source, key_padding_mask=~real, is_causal=True)
        out.square().sum().backward()
        grads = {key: whole(value.grad) for key, value in model.named_parameters()}
        results.append({"out": out.detach(), "dx": given.grad, **grads})
    assert_alike(results[1], results[0])


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check_decoding(name: str) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    layer = LAYERS[name]().eval()
    x = torch.randn(B, T, E)
    with torch.no_grad():
        expected, _ = layer(x, is_causal=True)
        parallel.parallelize_module(layer, mesh, distributed.tensor_parallel_plan(layer, mesh))
        cache = hk.nn.KeyValueCache()
        found = [layer(token, is_causal=True, cache=cache)[0] for token in x.split(1, dim=1)]
    assert_alike(torch.cat(found, 1), expected)


# ---------------------------------------------------------------------- tests
@pytest.mark.parametrize("gates", [None, "shared", "per sample"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, gates: str | None, ranks: Callable[[int], Processes]) -> None:
    ranks(2).run(check_layer, name, gates)


@pytest.mark.parametrize("name", ["gated", "multi_query", "collaborative"])
def test_decoding(name: str, ranks: Callable[[int], Processes]) -> None:
    ranks(2).run(check_decoding, name)


@pytest.mark.parametrize("name", ["gated", "collaborative"])
def test_projections_that_give_local_heads(name: str, fake_mesh: Callable[..., Any]) -> None:
    layer = LAYERS[name]()
    parallel.parallelize_module(layer, fake_mesh(2), {"v_proj": parallel.ColwiseParallel()})
    with pytest.raises(ValueError, match=r"v_proj gives 8 features, .*tensor_parallel_plan"):
        layer(torch.randn(2, T, E))


def test_heads_that_cannot_be_split(fake_mesh: Callable[..., Any]) -> None:
    mesh = fake_mesh(4)
    plan = distributed.tensor_parallel_plan
    model = nn.Sequential(nn.Linear(E, E), hk.nn.GatedMultiheadAttention(12, 6))
    with pytest.raises(ValueError, match=r"1 has 6 heads, which 4 processes .*; keep 4 heads"):
        plan(model, mesh)
    with pytest.raises(ValueError, match=r"has 3 heads, .*; leave the layer out"):
        plan(hk.nn.CollaborativeMultiheadAttention(12, 3, 4), mesh)
    with pytest.raises(ValueError, match=r"has 3 heads of keys, .*; use 3 processes"):
        plan(hk.nn.GatedMultiheadAttention(24, 12, num_key_heads=3), mesh)
    with pytest.raises(ValueError, match=r"has 3 heads of values, .*; use .* that divides 3"):
        plan(hk.nn.CollaborativeMultiheadAttention(24, 12, 12, num_value_heads=3), mesh)
    with pytest.raises(ValueError, match=r"module is a Linear without attention"):
        plan(nn.Linear(3, 3), mesh)
