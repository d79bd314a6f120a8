"""A process for one device: which backends refuse it, the checks of one backend in one dtype, or times.

It prints JSON, a row a line. Only such processes use a GPU, so that each finds it free where a GPU serves one process
at a time (`EXCLUSIVE_PROCESS`).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import Any, Final

import torch

from heads_kernels.doctor.checks import refusals, run_checks
from heads_kernels.doctor.speed import time_backends

#: Seconds beyond what a worker is given: to start Python and PyTorch, and for the check under way at the end.
_GRACE_S: Final = 15.0
_WORDS: Final = 200  # characters of a message that are kept


def ask(job: dict[str, Any]) -> tuple[list[dict[str, Any]], str, bool]:
    """The rows of a worker, how it ended before its time in words or "", and whether time was what ended it."""
    command = [sys.executable, "-m", __name__, json.dumps(job)]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=job["seconds"] + _GRACE_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        return _rows(late.stdout or b""), f"did not end in {late.timeout:.0f} s", True
    rows = _rows(done.stdout)
    if done.returncode == 0:
        return rows, "", False
    if done.returncode < 0:
        return rows, f"the process died of {signal.Signals(-done.returncode).name}", False
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return rows, f"the process ended with {last[:_WORDS]}", False


def _rows(output: bytes) -> list[dict[str, Any]]:
    """Whole lines of JSON; kernels and libraries may print others."""
    lines = output.decode(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def main(job: dict[str, Any]) -> None:
    """Print the rows of a job, until its time is over."""
    device = torch.device(job["device"])
    until = time.monotonic() + job["seconds"]
    if "backend" not in job and "backends" not in job:
        for row in refusals(device):
            print(json.dumps(row), flush=True)
        return
    if "backends" in job:
        for row in time_backends(job["backends"], device, job["seconds"]):
            print(json.dumps(row), flush=True)
            if time.monotonic() > until:
                return
        return
    torch.set_num_threads(job["threads"])  # workers that check share the cores
    dtype: torch.dtype = getattr(torch, job["dtype"])
    for row in run_checks(job["backend"], job["operators"], dtype, device):
        if "wrong" not in row and time.monotonic() > until:
            return
        print(json.dumps(row), flush=True)
        if device.type == "cuda" and row.get("wrong"):
            torch.cuda.synchronize(device)  # a sticky error ends the process: reported once


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
