"""Processes that test functions run in, each a rank of one `torch.distributed` group over gloo."""

import datetime
import functools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, BrokenExecutor, ProcessPoolExecutor, wait
from types import ModuleType
from typing import Any

import torch
from torch import distributed

#: Imported once, by the server that ranks are forked from, where it is installed.
_PRELOADED = [
    "pytest",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "functorch.compile",
    "heads_kernels.testing",
    "heads_kernels.integrations.distributed",
    "heads_kernels.integrations.transformers",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
]


class Processes:
    """`world` processes that live until `close`; a test that fails leaves new ones behind."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._ranks: list[ProcessPoolExecutor] = []

    def run(self, function: Callable[..., object], *args: object, limit: float = 120) -> None:
        """Call `function(*args)` in every rank; raises AssertionError from what one of them raised.

        `function` is importable by its name. Raises TimeoutError if a rank takes more than `limit` seconds.
        """
        if not self._ranks:
            self._start()
        calls = [rank.submit(_call, function, *args) for rank in self._ranks]
        done, waiting = wait(calls, limit, FIRST_EXCEPTION)
        failed = [call for call in calls if call in done and call.exception()]
        if failed and waiting:
            # When a rank dies, the others may report a lost connection before its own error arrives.
            done, _ = wait(calls, 5)
            failed = [call for call in calls if call in done and call.exception()]
        if failed:
            self.close()
            first = min(failed, key=lambda call: not isinstance(call.exception(), BrokenExecutor))
            error = first.exception()
            raise AssertionError(f"rank {calls.index(first)} of {self.world}: {error}") from error
        if waiting:
            self.close()
            raise TimeoutError(f"{len(waiting)} ranks did not end in {limit} s")

    def end(self) -> None:
        """As `close`, of ranks that wait for the next test: their groups, and the threads of gloo, end before them."""
        if self._ranks:
            self.run(distributed.destroy_process_group)
        self.close()

    def close(self) -> None:
        for rank in self._ranks:
            for process in rank._processes.values():
                process.kill()
            rank.shutdown()
        self._ranks = []

    def _start(self) -> None:
        # multiprocessing looks at it, and the processes of xdist have none.
        sys.modules.setdefault("__main__", ModuleType("__main__"))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        store = os.path.join(tempfile.mkdtemp(), "store")
        self._ranks = [ProcessPoolExecutor(1, context, _join, (rank, self.world, store)) for rank in range(self.world)]


@functools.cache
def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    """A mesh of all ranks, called in each of them: one for every shape, whose groups all tests share."""
    return distributed.init_device_mesh("cpu", shape, mesh_dim_names=names)


def whole(tensor: Any) -> Any:
    """Of a DTensor all of it, in every rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _join(rank: int, world: int, store: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60)
    )


def _call(function: Callable[..., object], *args: object) -> None:
    torch.manual_seed(0)
    function(*args)
