"""Modules under tensor parallelism are what they are in one process."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import parallel

import heads_kernels as hk
from heads_kernels.integrations import distributed
from tests.support.alike import assert_alike
from tests.support.nn_layers import backward
from tests.support.processes import mesh_of, whole
from tests.support.refusals import assert_refused

E, H, B, T = 16, 4, 3, 6
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gated": lambda: hk.nn.GatedMultiheadAttention(E, H),
    "grouped": lambda: hk.nn.GatedMultiheadAttention(E, H, num_key_heads=2),
    "multi_query": lambda: hk.nn.GatedMultiheadAttention(E, H, num_key_heads=1),
    "head_gate": lambda: hk.nn.GatedMultiheadAttention(E, H, output_gate="head", bias=False),
    "element_gate": lambda: hk.nn.GatedMultiheadAttention(E, H, output_gate="element"),
    "dropout": lambda: hk.nn.GatedMultiheadAttention(E, H, dropout=0.3),
    "collaborative": lambda: hk.nn.CollaborativeMultiheadAttention(E, H, 12),
    "ragged": lambda: hk.nn.CollaborativeMultiheadAttention(E, H, 12, ragged=True, output_gate="head"),
    "merged": lambda: hk.nn.MergedAttention(E, H, num_key_heads=2, output_gate="head"),
}


# ---------------------------------------------------------------------- in every rank
@pytest.mark.processes(2)
@pytest.mark.parametrize("gates", [None, "shared", "per sample"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, gates: str | None) -> None:
    mesh = mesh_of(2)
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
        found = {key: whole(value) for key, value in backward(model, out).items()}
        results.append({"dx": given.grad, **found})
    assert_alike(results[1], results[0])


@pytest.mark.processes(2)
@pytest.mark.parametrize("name", ["gated", "multi_query", "collaborative"])
def test_decoding(name: str) -> None:
    mesh = mesh_of(2)
    layer = LAYERS[name]().eval()
    x = torch.randn(B, T, E)
    with torch.no_grad():
        expected, _ = layer(x, is_causal=True)
        parallel.parallelize_module(layer, mesh, distributed.tensor_parallel_plan(layer, mesh))
        cache = hk.nn.KeyValueCache()
        found = [layer(token, is_causal=True, cache=cache)[0] for token in x.split(1, dim=1)]
    assert_alike(torch.cat(found, 1), expected)


# ---------------------------------------------------------------------- in this process
@pytest.mark.parametrize("name", ["gated", "collaborative"])
def test_projections_that_give_local_heads(name: str, fake_mesh: Callable[..., Any]) -> None:
    layer = LAYERS[name]()
    parallel.parallelize_module(layer, fake_mesh(2), {"v_proj": parallel.ColwiseParallel()})
    assert_refused((lambda: layer(torch.randn(2, T, E)), r"v_proj gives 8 features, .*tensor_parallel_plan"))


def test_converted_layers_that_are_split_by_another_plan(fake_mesh: Callable[..., Any]) -> None:
    model = model_of("bert", convert=True)
    attention = model.encoder.layer[1].attention.self
    content = attention.key.content
    plan = {"key.content": parallel.ColwiseParallel()}
    parallel.parallelize_module(attention, fake_mesh(1), plan)
    assert attention.key.content is content
    assert_refused((lambda: model(torch.ones(1, 3).long()), r"key\.content\.weight is a DTensor"))


def model_of(name: str, convert: bool = False) -> Any:
    pytest.importorskip("transformers", reason="a model of transformers")
    from tests.support.tiny_models import build

    model = build(name)
    if convert:
        hk.convert.collaborate(model, 16, progress=False)
    return model


def test_plans_of_what_cannot_be_split(fake_mesh: Callable[..., Any]) -> None:
    mesh, gated, shared = fake_mesh(4), hk.nn.GatedMultiheadAttention, hk.nn.CollaborativeMultiheadAttention
    assert_refused(
        ((nn.Sequential(nn.Linear(E, E), gated(12, 6)), mesh), r".*1 has 6 heads, which 4 processes .*; keep 4 heads"),
        ((shared(18, 3, 12), mesh), r".* has 3 heads, .*; leave the layer out"),
        ((gated(24, 12, num_key_heads=3), mesh), r".* has 3 heads of keys, .*; use 3 processes"),
        ((shared(72, 12, 12, num_value_heads=3), mesh), r".* has 3 heads of values, .*; use .* that divides 3"),
        ((gated(12, 4, entmax=True), mesh), r".* has entmax, which serves no DTensors"),
        ((nn.Linear(3, 3), mesh), r"module is a Linear without attention"),
        ((model_of("bert"), mesh), r"module .* without attention of hk\.nn"),
        ((model_of("gpt2", convert=True), mesh), r".*layer 0 .*values together with other roles"),
        of=distributed.tensor_parallel_plan,
    )
