"""Groups of processes for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.processes import Processes


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Processes]]:
    """Processes by their number, which all tests share."""
    made: dict[int, Processes] = {}
    yield lambda world: made.setdefault(world, Processes(world))
    for processes in made.values():
        processes.end()


@pytest.fixture
def fake_mesh() -> Iterator[Callable[..., Any]]:
    """Makes a mesh of this process and others that do not exist: for what is refused before anything communicates."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")

    def make(*shape: int, names: tuple[str, ...] | None = None) -> Any:
        world = torch.Size(shape).numel()
        torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=world)
        return torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=names)

    yield make
    torch.distributed.destroy_process_group()
