"""Worker processes that survive what kernels do: an illegal access, a hang, a killed process.

Items run in processes of their own, so that a broken CUDA context costs one item. Several at once,
because the first call of a kernel compiles it, seconds on one core, while the GPU has nothing to do.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.settings import CRASHED, LEFT_OUT, TIMED_OUT, Row, Settings

ROOT = Path(__file__).parent.parent.parent
#: The module that a worker runs.
WORKER = "benchmarks.gpu.worker"
#: Workers that compile kernels at the same time; each holds a CUDA context of half a GiB, and an oracle of
#: `accuracy` up to 8 GiB more.
MOST_WORKERS = 16
#: Seconds in which a worker has to import torch and open the GPU while others do the same.
STARTUP_S = 120.0
#: Seconds beyond the end of a stage that an item under way may take.
GRACE_S = 10.0
_END_S = 5.0  # for a process to end in, after the signal
#: There are workers enough: none needs a pool of compiling processes of its own.
_ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
_TAIL = 1500  # characters of stderr kept of a crashed worker


class _Died(Exception):
    """The worker is gone; the message says how."""


class _NoStart(_Died):
    """It did not come up: nothing that an item could be blamed for."""


class _TooLong(Exception):
    """No answer in time."""


class _Worker:
    """One process, started when it is first asked; asked again after a crash, it starts anew."""

    def __init__(self, settings: Settings) -> None:
        self._command = [sys.executable, "-m", WORKER, settings.to_json()]
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._pending = b""

    def ask(self, stage: str, name: str, limit_s: float) -> Row:
        """The row of an item of a worker that was started; raises `_Died` or `_TooLong`, after which
        the process is gone."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise _Died("the worker was stopped")
        stdin, stdout = process.stdin, process.stdout
        try:
            stdin.write(json.dumps({"stage": stage, "name": name}).encode() + b"\n")
            stdin.flush()
            row = self._line(stdout, limit_s)
        except OSError as error:  # a broken pipe
            raise _Died(self._post_mortem()) from error
        except _TooLong:
            self.stop()
            raise
        if row.get("fatal"):
            self.stop()
        return row

    def tell(self) -> None:
        """Ask the process to end, and what it started with it (see `sanitizer`)."""
        process = self._process
        if process is not None:
            process.terminate()

    def stop(self) -> None:
        self.tell()
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver
                    process.wait(_END_S)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def start(self, limit_s: float) -> None:
        """Have a process that answers; raises `_NoStart` where none does within `limit_s`."""
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._pending = b""
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `stop`)
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env={**os.environ, **_ENVIRONMENT}, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=self._errors,
            )  # fmt: skip
            assert self._process.stdout is not None
            try:
                self._line(self._process.stdout, min(STARTUP_S, limit_s))
            except (_Died, _TooLong) as error:
                self.stop()
                raise _NoStart(f"no worker comes up: {error}") from error

    def _line(self, stdout: IO[bytes], limit_s: float) -> Row:
        stop = time.monotonic() + limit_s
        while b"\n" not in self._pending:
            left = stop - time.monotonic()
            if left <= 0:
                raise _TooLong(f"no answer in {limit_s:.0f} s")
            if select.select([stdout], [], [], min(left, 1.0))[0]:
                block = os.read(stdout.fileno(), 1 << 16)
                if not block:
                    raise _Died(self._post_mortem())
                self._pending += block
        line, _, self._pending = self._pending.partition(b"\n")
        row: Row = json.loads(line)
        return row

    def _post_mortem(self) -> str:
        process, errors = self._process, self._errors
        if process is None or errors is None:
            return "the worker was stopped"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        try:
            size = errors.seek(0, os.SEEK_END)
            errors.seek(max(0, size - _TAIL))
            tail = errors.read().decode(errors="replace").strip()
        except ValueError:  # closed by the thread that ends the pool
            tail = ""
        self.stop()
        return f"the worker ended with status {process.returncode}: {tail}"


class Pool:
    """Up to `workers` processes; a context manager that ends them."""

    def __init__(self, settings: Settings, workers: int) -> None:
        self._workers = [_Worker(settings) for _ in range(workers)]
        self._stopped = threading.Event()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for worker in self._workers:  # all at once: giving a GPU back takes each a second
            worker.tell()
        for worker in self._workers:
            worker.stop()

    def run(
        self,
        stage: str,
        names: Sequence[str],
        *,
        until: float,
        item_s: float,
        done: Callable[[Row], Any] = lambda row: None,
    ) -> list[Row]:
        """The rows of the items, in the order in which they were finished.

        No item begins after `until` (of `time.monotonic`), and one under way then may take `GRACE_S`
        more; those are rows too, "left out". No item takes longer than `item_s`.
        """
        queue, rows, lock = deque(names), list[Row](), threading.Lock()
        not_up: list[str] = []

        def finish(row: Row) -> None:
            with lock:
                rows.append(row)
                done(row)

        def serve(worker: _Worker) -> None:
            while not self._stopped.is_set() and time.monotonic() < until:
                with lock:
                    if not queue:
                        return
                    name = queue.popleft()
                try:
                    row = _answer(worker, stage, name, item_s, until)
                except _NoStart as error:
                    with lock:
                        queue.appendleft(name)
                        not_up.append(str(error))
                    return  # the other workers go on
                if not self._stopped.is_set():
                    finish(row)

        threads = [
            threading.Thread(target=serve, args=(worker,), daemon=True)
            for worker in self._workers[: len(names)]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        late = time.monotonic() >= until or not not_up
        verdict, detail = (LEFT_OUT, "no time was left") if late else (CRASHED, not_up[0])
        for name in queue:
            finish({"name": name, "verdict": verdict, "detail": detail})
        return rows


def _answer(worker: _Worker, stage: str, name: str, item_s: float, until: float) -> Row:
    def left() -> float:
        return max(0.0, until - time.monotonic()) + GRACE_S

    started, limit_s = time.monotonic(), item_s
    try:
        worker.start(left())
        limit_s = min(item_s, left())
        return worker.ask(stage, name, limit_s)
    except _NoStart:
        raise
    except _Died as error:
        verdict, detail = CRASHED, str(error)
    except _TooLong as error:
        verdict = TIMED_OUT if limit_s == item_s else LEFT_OUT
        detail = str(error) if verdict == TIMED_OUT else "cut short: no time was left"
    seconds = round(time.monotonic() - started, 3)
    return {"name": name, "verdict": verdict, "detail": detail, "seconds": seconds}
