"""Sharded models that are pruned, saved, and loaded over other processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.processes import Processes

fsdp = pytest.importorskip("torch.distributed.fsdp")
parallel = pytest.importorskip("torch.distributed.tensor.parallel")
distributed = pytest.importorskip("heads_kernels.integrations.distributed")
checkpoint = pytest.importorskip("torch.distributed.checkpoint")

E, H = 16, 6


def made(gated: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        hk.nn.GatedMultiheadAttention(E, H, head_dim=4),
        hk.nn.CollaborativeMultiheadAttention(E, H, 8, value_dim=4),
    ]
    model = nn.Sequential(*layers)
    if gated:
        hk.heads.gate(model, hk.nn.HardConcrete)
        for layer in layers:
            layer.head_gate.settle(torch.tensor([True, False, True, True, False, True]))
    return model


def sharded(model: nn.Module, mesh: Any, how: str) -> nn.Module:
    if how == "tensor parallel":
        plan = distributed.tensor_parallel_plan(model, mesh)
        return parallel.parallelize_module(model, mesh, plan)
    if how == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    for layer in model:
        fsdp.fully_shard(layer, mesh=mesh)
    return fsdp.fully_shard(model, mesh=mesh)


def output(model: nn.Module, x: Tensor) -> Tensor:
    for layer in getattr(model, "module", model):
        x = x + layer(x)[0]
    return x.detach()


# ---------------------------------------------------------------------- in every rank
def check_pruning(how: str) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    x = torch.randn(2, 5, E)
    plain = made()
    expected = output(plain, x)
    model = sharded(made(), mesh, how)
    for weight in plain.parameters():
        weight.data.zero_()
    whole = distributed.gather(model, into=plain)
    hk.heads.prune(whole, hk.heads.closed(whole))
    assert [layer.num_heads for layer in whole] == [4, 4]
    again = sharded(whole, mesh, how)
    assert_alike(output(again, x), expected)


def check_checkpoint(folder: str) -> None:
    """Saved by two processes of FSDP, loaded by two of tensor parallelism."""
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    x = torch.randn(2, 5, E)
    model = made()
    hk.heads.prune(model, hk.heads.closed(model))
    expected = output(model, x)
    sharded(model, mesh, "FSDP")
    shapes = json.dumps(hk.heads.shapes(model))
    checkpoint.save({"model": model.state_dict(), "heads": shapes}, checkpoint_id=folder)
    loaded = made(gated=False)
    heads = {"heads": ""}
    checkpoint.load(heads, checkpoint_id=folder)
    hk.heads.apply_shapes(loaded, json.loads(heads["heads"]))
    sharded(loaded, mesh, "tensor parallel")
    for weight in loaded.parameters():
        weight.data.zero_()
    state = {"model": loaded.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    assert_alike(output(loaded, x), expected)


def check_refusals() -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    model = sharded(made(), mesh, "FSDP")
    with pytest.raises(
        ValueError, match=r"into has other weights than model: 0\.head_gate\.log_al"
    ):
        distributed.gather(model, made(gated=False))
    wide = nn.Sequential(hk.nn.GatedMultiheadAttention(E, H, head_dim=8), made()[1])
    hk.heads.gate(wide[:1], hk.nn.HardConcrete)
    with pytest.raises(ValueError, match=r"into has 0\.q_proj\.weight of shape \[48, 16\], model"):
        distributed.gather(model, wide)


# ---------------------------------------------------------------------- tests
@pytest.mark.parametrize("how", ["FSDP", "tensor parallel", "DDP"])
def test_pruning(how: str, ranks: Callable[[int], Processes]) -> None:
    ranks(2).run(check_pruning, how)


def test_checkpoint(tmp_path: Path, ranks: Callable[[int], Processes]) -> None:
    ranks(2).run(check_checkpoint, str(tmp_path))


def test_refusals(ranks: Callable[[int], Processes]) -> None:
    ranks(2).run(check_refusals)


def test_shapes_of_layers_that_are_not_there() -> None:
    model = made(gated=False)
    hk.heads.prune(model, {0: [1]})
    with pytest.raises(ValueError, match="layer '0' does not exist in the model; it has layer"):
        hk.heads.apply_shapes(
            nn.ModuleDict({"layer": made(gated=False)[1]}), hk.heads.shapes(model)
        )
