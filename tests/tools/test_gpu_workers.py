"""Workers of the GPU suite that crash, hang or do not come up, the sanitizer, and stale CUDA graphs."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import graphs, sanitizer
from benchmarks.gpu import pool as pool_module
from benchmarks.gpu.pool import Pool
from benchmarks.gpu.settings import (
    CRASHED,
    FAILED,
    LEFT_OUT,
    PASSED,
    TIMED_OUT,
    Refused,
    Row,
    Settings,
)
from benchmarks.gpu.worker import run_item

pytestmark = pytest.mark.release

TINY = Settings("cpu", tiny=True)


# ---------------------------------------------------------------------- what goes wrong
def worker(pool: Pool, body: str) -> None:
    """The pool's workers answer by `body`, which has `asked`, the request."""
    code = (
        "import json, os, sys, time\n"
        "def say(row): print(json.dumps(row), flush=True)\n"
        "say({'ready': True})\n"
        "for line in sys.stdin:\n    asked = json.loads(line)\n"
    ) + "".join(f"    {line}\n" for line in body.splitlines())
    for one in pool._workers:
        one._command = [sys.executable, "-c", code]


def verdicts(rows: list[Row]) -> dict[str, str]:
    return {row["name"]: row["verdict"] for row in rows}


def soon(seconds: float) -> float:
    return time.monotonic() + seconds


def test_a_crash_costs_one_item() -> None:
    with Pool(TINY, 2) as pool:
        worker(pool, "if asked['name'] == 'b': print('boom', file=sys.stderr); os._exit(3)\n"
            "say({'name': asked['name'], 'verdict': 'passed'})")  # fmt: skip
        rows = pool.run("s", ["a", "b", "c", "d"], until=soon(60), item_s=30)
    assert verdicts(rows) == {"a": PASSED, "b": CRASHED, "c": PASSED, "d": PASSED}
    (crashed,) = (row for row in rows if row["name"] == "b")
    assert "status 3: boom" in crashed["detail"]


def test_a_hang_costs_one_item() -> None:
    with Pool(TINY, 1) as pool:
        worker(pool, "if asked['name'] == 'b': time.sleep(60)\n"
            "say({'name': asked['name'], 'verdict': 'passed'})")  # fmt: skip
        rows = pool.run("s", ["a", "b", "c"], until=soon(60), item_s=1.0)
    assert verdicts(rows) == {"a": PASSED, "b": TIMED_OUT, "c": PASSED}


def test_a_broken_context_gets_a_new_process() -> None:
    with Pool(TINY, 1) as pool:
        worker(
            pool,
            "say({'name': asked['name'], 'verdict': 'failed', 'fatal': True, 'pid': os.getpid()})",
        )
        rows = pool.run("s", ["a", "b"], until=soon(60), item_s=30)
    assert rows[0]["pid"] != rows[1]["pid"]


def test_a_slow_start_does_not_outlast_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "GRACE_S", 0.5)
    with Pool(TINY, 1) as pool:
        pool._workers[0]._command = [sys.executable, "-c", "import time; time.sleep(60)"]
        started = time.monotonic()
        rows = pool.run("s", ["a"], until=soon(0.5), item_s=30)
    assert time.monotonic() - started < 10
    assert verdicts(rows) == {"a": LEFT_OUT}


def test_workers_that_do_not_come_up() -> None:
    with Pool(TINY, 2) as pool:
        for one in pool._workers:
            one._command = [sys.executable, "-c", "import sys; sys.exit('no torch here')"]
        rows = pool.run("s", ["a", "b", "c"], until=soon(60), item_s=30)
    assert set(verdicts(rows).values()) == {CRASHED}
    assert "no torch here" in rows[0]["detail"]


def test_an_item_that_raises_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def boom() -> Row:
        raise RuntimeError("boom")

    def refused() -> Row:
        raise Refused("too wide")

    accuracy = import_module("benchmarks.gpu.accuracy")
    monkeypatch.setattr(accuracy, "items", lambda settings: {"boom": boom, "refused": refused})
    row = run_item(TINY, "accuracy", "boom")
    assert row["verdict"] == FAILED
    assert row["detail"].startswith("RuntimeError: boom")
    assert run_item(TINY, "accuracy", "refused")["detail"] == "too wide"
    assert run_item(TINY, "accuracy", "nothing")["verdict"] == FAILED


def test_sanitizer_verdicts() -> None:
    ran = '{"name": "a", "verdict": "passed"}\n'
    clean = "========= ERROR SUMMARY: 0 errors\n"
    assert sanitizer._judge(ran + clean, "", 1)["verdict"] == PASSED
    found = "========= Invalid __global__ read\n========= ERROR SUMMARY: 1 error\n"
    assert "Invalid" in sanitizer._judge(ran + found, "", 1)["detail"]
    assert sanitizer._judge(clean, "", 1)["verdict"] == FAILED  # it ran nothing
    with pytest.raises(sanitizer.Skipped, match="cannot run on this machine"):
        sanitizer._judge("========= Error: Device not supported\n", "", 1)


def test_sanitizer_runs_items_under_the_tool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A tool that runs the program and reports; one that hangs is ended with what it started."""
    tool = tmp_path / "compute-sanitizer"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tool.write_text(
        '#!/bin/bash\nwhile [ "$1" != -m ]; do last=$1; shift; done\n'
        '"$last" "$@"\necho "========= ERROR SUMMARY: 0 errors"\n'
    )
    tool.chmod(0o755)
    row = sanitizer._run_under(TINY, "memcheck", "triton")
    assert row["verdict"] == PASSED, row
    assert row["items"] == 2  # gated and entmax attention
    tool.write_text("#!/bin/bash\nsleep 100 & wait\n")
    monkeypatch.setitem(sanitizer._TOOLS, "memcheck", 0.5)  # type: ignore[arg-type]
    with pytest.raises(sanitizer.Skipped, match="not finished"):
        sanitizer._run_under(TINY, "memcheck", "triton")


class Graph:
    """In the place of a CUDA graph: a replay computes anew, or not at all."""

    def __init__(self, inputs: Any, backend: str, stale: bool) -> None:
        self.inputs, self.backend, self.stale = inputs, backend, stale
        self.static = inputs.backward(backend)

    def replay(self) -> None:
        if not self.stale:
            out, grads = self.inputs.backward(self.backend)
            self.static[0].copy_(out)
            for name, grad in grads.items():
                self.static[1][name].copy_(grad)


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("case", graphs._CASES, ids=str)
def test_a_replay_that_reads_old_gates_is_found(
    case: Any, stale: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(inputs: Any, backend: str) -> Any:
        graph = Graph(inputs, backend, stale)
        return graph, graph.static

    monkeypatch.setattr(Settings, "on_gpu", True)
    monkeypatch.setattr(graphs, "_capture", capture)
    monkeypatch.setattr(graphs, "_no_synchronisation", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    row = graphs._replayed(TINY, case, False, "cpu")
    assert row["verdict"] == (FAILED if stale else PASSED), row["detail"]
    if stale:
        assert row["detail"].startswith("replay 1: ")
