"""Gates of models whose parameters `fully_shard` has split, with and without tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.processes import Processes

fsdp = pytest.importorskip("torch.distributed.fsdp")
parallel = pytest.importorskip("torch.distributed.tensor.parallel")
distributed = pytest.importorskip("heads_kernels.integrations.distributed")

E, H, B, T = 16, 4, 4, 6


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gated = hk.nn.GatedMultiheadAttention(E, H)
        self.shared = hk.nn.CollaborativeMultiheadAttention(E, H, 8)
        hk.heads.gate(self, lambda H: hk.nn.HardConcrete(H, log_alpha="voita"))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shared(x + self.gated(x)[0])[0]


def made() -> Layers:
    torch.manual_seed(0)
    return Layers()


def schedule_of(model: nn.Module) -> hk.heads.GateSchedule:
    return hk.heads.GateSchedule(model, open_heads=3, steps=4, rate=0.5)


# ---------------------------------------------------------------------- in every rank
def check_training(shape: tuple[int, ...]) -> None:
    """Steps with both penalties, and `finish`: the gates and the weights are those of one process."""
    mesh = torch.distributed.init_device_mesh(
        "cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)]
    )
    plain, model = made(), made()
    if len(shape) == 2:
        plan = distributed.tensor_parallel_plan(model, mesh["tp"])
        parallel.parallelize_module(model, mesh["tp"], plan)
    for layer in (model.gated, model.shared):
        fsdp.fully_shard(layer, mesh=mesh["dp"])
    fsdp.fully_shard(model, mesh=mesh["dp"])
    x = torch.randn(B, T, E)
    mine = x.chunk(shape[0])[mesh.get_local_rank("dp")]
    expected: list[Tensor] = []
    for each, inputs in ((plain, x), (model, mine)):
        schedule, optimizer = schedule_of(each), torch.optim.SGD(each.parameters(), lr=0.1)
        for step in range(3):
            torch.manual_seed(step)  # the same noise in all processes, as in one
            loss = each(inputs).square().mean()
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


# ---------------------------------------------------------------------- tests
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_training(shape: tuple[int, ...], ranks: Callable[[int], Processes]) -> None:
    ranks(torch.Size(shape).numel()).run(check_training, shape)
