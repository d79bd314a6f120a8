"""Process groups for tests: those of the mark `processes`, and a fake one. Without torch.distributed there are none."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.processes import Processes

collect_ignore_glob = [] if torch.distributed.is_available() else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    what = "processes(world): run in so many processes, a number, or an argument of the test: a number or a shape"
    config.addinivalue_line("markers", what)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests with the mark run in their processes, with their arguments."""
    mark = pyfuncitem.get_closest_marker("processes")
    if mark is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.function).parameters}
    (world,) = mark.args
    sizes = arguments.get(world, world)
    number = sizes if isinstance(sizes, int) else torch.Size(sizes).numel()
    pyfuncitem.funcargs["ranks"](number).run(pyfuncitem.function, *arguments.values())
    return True


@pytest.fixture(scope="session", autouse=True)
def ranks() -> Iterator[Callable[[int], Processes]]:
    """Processes by their number, which all tests share."""
    made: dict[int, Processes] = {}
    yield lambda world: made.setdefault(world, Processes(world))
    for processes in made.values():
        processes.end()


@pytest.fixture
def fake_mesh() -> Iterator[Callable[..., Any]]:
    """Makes a mesh on a fake process group, for calls that are refused before any communication."""
    reason = "this PyTorch has no fake process group"
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg", reason=reason)

    def make(*shape: int, names: tuple[str, ...] | None = None) -> Any:
        world = torch.Size(shape).numel()
        torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=world)
        return torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=names)

    yield make
    torch.distributed.destroy_process_group()
