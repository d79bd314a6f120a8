"""Processes that test functions run in, each a rank of one `torch.distributed` group over gloo."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

#: Imported once, by the server that ranks are forked from.
_PRELOADED = [
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "heads_kernels.testing",
]


class Processes:
    """`world` processes that live until `close`; a test that fails leaves new ones behind."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., object], *args: object, limit: float = 120) -> None:
        """Call `function(*args)` in every rank; raises what the first of them to fail raised.

        `function` is importable by its name. Raises TimeoutError if a rank takes more than `limit` seconds.
        """
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send((function, args))
        end = time.monotonic() + limit
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not end in {limit} s")
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    failed = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    failed = "the process ended"
                if failed:
                    self.close()
                    raise AssertionError(f"rank {rank} of {self.world}: {failed}")

    def close(self) -> None:
        for process, _ in self._ranks:
            process.kill()
            process.join()
        self._ranks = []

    def _start(self) -> None:
        # multiprocessing looks at it, and the processes of xdist have none.
        sys.modules.setdefault("__main__", ModuleType("__main__"))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        store = os.path.join(tempfile.mkdtemp(), "store")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, store, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))


def whole(tensor: Any) -> Any:
    """Of a DTensor all of it, in every rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    import torch
    from torch import distributed

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    while True:
        function, args = pipe.recv()
        failed = None
        try:
            torch.manual_seed(0)
            function(*args)
        except BaseException:
            failed = traceback.format_exc()
        pipe.send(failed)
