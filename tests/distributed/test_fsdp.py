"""Models whose parameters are sharded: trained with gates, pruned, saved, and loaded over other processes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint, fsdp
from torch.distributed.tensor import parallel

import heads_kernels as hk
from heads_kernels.integrations import distributed
from tests.support.alike import assert_alike
from tests.support.processes import mesh_of
from tests.support.refusals import assert_refused

E, H = 16, 6


def made(gate: Callable[[int], hk.nn.HeadGate] | None = hk.nn.HardConcrete) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        hk.nn.GatedMultiheadAttention(E, H, head_dim=4),
        hk.nn.CollaborativeMultiheadAttention(E, H, 8, value_dim=4),
    )
    if gate is not None:
        hk.heads.gate(model, gate)
    return model


def settled() -> Any:
    """With heads 1 and 4 closed."""
    model = made()
    for layer in model:
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
    return x


@pytest.mark.processes("shape")
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_training(shape: tuple[int, ...]) -> None:
    """Steps with both penalties, and `finish`: the gates and the weights are those of one process."""
    mesh = mesh_of(*shape, names=("dp", "tp")[: len(shape)])
    plain, model = (made(lambda H: hk.nn.HardConcrete(H, log_alpha="voita")) for _ in range(2))
    if len(shape) == 2:
        sharded(model, mesh["tp"], "tensor parallel")
    sharded(model, mesh["dp"], "FSDP")
    x = torch.randn(4, 6, E)
    mine = x.chunk(shape[0])[mesh.get_local_rank("dp")]
    expected: list[Tensor] = []
    for each, inputs in ((plain, x), (model, mine)):
        schedule = hk.heads.GateSchedule(each, open_heads=3, steps=4, rate=0.5)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for step in range(3):
            torch.manual_seed(step)  # the same noise in all processes, as in one
            loss = output(each, inputs).square().mean()
            (loss + hk.nn.l0_penalty(each) + schedule.penalty()).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        expected.append(hk.nn.expected_open(each))
        schedule.finish()
    assert_alike(*expected)
    assert hk.heads.closed(model) == hk.heads.closed(plain)
    assert sum(map(len, hk.heads.closed(model).values())) == 2 * H - 3
    for (name, own), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_alike(own.full_tensor(), want, name=name)


@pytest.mark.processes(2)
@pytest.mark.parametrize("how", ["FSDP", "tensor parallel", "DDP"])
def test_pruning(how: str) -> None:
    mesh = mesh_of(2)
    x = torch.randn(2, 5, E)
    plain = settled()
    expected = output(plain, x).detach()
    model = sharded(settled(), mesh, how)
    for weight in plain.parameters():
        weight.data.zero_()
    whole = distributed.gather(model, into=plain)
    hk.heads.prune(whole, hk.heads.closed(whole))
    assert [layer.num_heads for layer in whole] == [4, 4]
    assert_alike(output(sharded(whole, mesh, how), x).detach(), expected)


@pytest.mark.processes(2)
def test_checkpoint(tmp_path: Path) -> None:
    """Saved by two processes of FSDP, loaded by two of tensor parallelism."""
    mesh = mesh_of(2)
    x = torch.randn(2, 5, E)
    model = settled()
    hk.heads.prune(model, hk.heads.closed(model))
    expected = output(model, x).detach()
    sharded(model, mesh, "FSDP")
    shapes = json.dumps(hk.heads.shapes(model))
    checkpoint.save({"model": model.state_dict(), "heads": shapes}, checkpoint_id=tmp_path)
    loaded = made(None)
    heads = {"heads": ""}
    checkpoint.load(heads, checkpoint_id=tmp_path)
    hk.heads.apply_shapes(loaded, json.loads(heads["heads"]))
    sharded(loaded, mesh, "tensor parallel")
    for weight in loaded.parameters():
        weight.data.zero_()
    state = {"model": loaded.state_dict()}
    checkpoint.load(state, checkpoint_id=tmp_path)
    assert_alike(output(loaded, x).detach(), expected)


@pytest.mark.processes(2)
def test_refusals() -> None:
    mesh = mesh_of(2)
    model = sharded(made(), mesh, "FSDP")
    wide = nn.Sequential(hk.nn.GatedMultiheadAttention(E, H, head_dim=8), made()[1])
    hk.heads.gate(wide[:1], hk.nn.HardConcrete)
    alone = sharded(made(None), mesh, "FSDP")
    of_processes = r"layer 0 .*is sharded over processes"
    assert_refused(
        (lambda: distributed.gather(model, made(None)), r"into has other weights than model: 0\.head_gate\.log_al"),
        (lambda: distributed.gather(model, wide), r"into has 0\.q_proj\.weight of shape \[48, 16\], model"),
        (lambda: hk.heads.gate(alone, hk.nn.HardConcrete), r"layer 0 .*is sharded .*before fully_shard"),
        (lambda: hk.heads.prune(alone, {0: [1]}), of_processes),
        (lambda: hk.convert.collaborate(alone, 8), of_processes),
    )
