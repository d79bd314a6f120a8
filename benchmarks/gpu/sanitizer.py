"""compute-sanitizer over a few calls: reads and writes outside memory, and races in shared memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from typing import Final

from benchmarks.gpu import determinism
from benchmarks.gpu.pool import ROOT
from benchmarks.gpu.settings import (
    DIFFERENTIABLE,
    FAILED,
    PASSED,
    REFUSED,
    Items,
    Row,
    Settings,
    Skipped,
)

#: memcheck finds accesses outside of memory, racecheck missing barriers (its cost is larger).
_TOOLS: Final = {"memcheck": 170, "racecheck": 170}  # seconds
_CASES: Final = ("closed_batch_heads", "padded_causal", "ragged_bias", "small_causal")
_UNSUPPORTED: Final = ("not supported", "Unable to", "Failed to initialize")


def items(settings: Settings) -> Items:
    backends = sorted({name for operator in DIFFERENTIABLE for name in settings.backends(operator)})
    return {
        f"{tool}/{backend}": partial(_run, settings, tool, backend)
        for tool in _TOOLS
        for backend in backends
    }


def _run(settings: Settings, tool: str, backend: str) -> Row:
    if not settings.on_gpu:
        raise Skipped("compute-sanitizer needs a CUDA device")
    if shutil.which("compute-sanitizer") is None:
        raise Skipped("compute-sanitizer is not on PATH")
    return _run_under(settings, tool, backend)


def _run_under(settings: Settings, tool: str, backend: str) -> Row:
    """Items of `determinism` in a worker under the tool, every tensor in an allocation of its own."""
    found = {name: name.split("/") for name in determinism.items(settings)}
    names = [name for name, parts in found.items() if parts[1] in _CASES and parts[-1] == backend]
    asked = "".join(json.dumps({"stage": "determinism", "name": name}) + "\n" for name in names)
    command = [
        "compute-sanitizer", "--tool", tool, "--report-api-errors", "no", "--target-processes", "all",
        sys.executable, "-m", "benchmarks.gpu.worker", settings.to_json(),
    ]  # fmt: skip
    # A session of its own: the program under the tool is a child of the tool, and both have to end.
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, start_new_session=True,
    ) as process:  # fmt: skip

        def end(*_: object) -> None:  # this worker got a signal to end
            os.killpg(process.pid, signal.SIGKILL)
            os._exit(1)

        before = signal.signal(signal.SIGTERM, end)
        try:
            output, errors = process.communicate(asked, timeout=_TOOLS[tool])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise Skipped(f"not finished in {_TOOLS[tool]} s") from None
        finally:
            signal.signal(signal.SIGTERM, before)
    return _judge(output, errors, len(names))


def _judge(output: str, errors: str, asked: int) -> Row:
    """The verdict of the tool's summary and of the items that ran under it."""
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    ran = [row for row in rows if "name" in row]
    text = output + errors
    said = [line for line in text.splitlines() if line.startswith("=========")]
    summaries = re.findall(r"SUMMARY: (\d+) (?:error|hazard)", text)
    if any(word in " ".join(said) for word in _UNSUPPORTED):
        raise Skipped(f"it cannot run on this machine: {' '.join(said[:3])[:400]}")
    wrong = [
        f"{row['name']}: {row.get('detail')}"
        for row in ran
        if row["verdict"] not in (PASSED, REFUSED)
    ]
    if any(int(number) for number in summaries):
        wrong += said[:12]
    if not summaries or len(ran) < asked:
        wrong.append(f"{len(ran)} of {asked} items ran; {' '.join(said[-3:])} {errors[-500:]}")
    return {
        "verdict": FAILED if wrong else PASSED,
        "detail": "; ".join(wrong)[:1500],
        "items": len(ran),
    }
