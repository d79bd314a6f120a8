"""A process for one device: which backends refuse it, the checks of one backend in one dtype, or times against SDPA.

It prints JSON, a row a line. Only such processes use a GPU, so that each finds it free where a GPU serves one process
at a time (`EXCLUSIVE_PROCESS`).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from heads_kernels.doctor.checks import refusals, run_checks
from heads_kernels.testing import Inputs, find, time_in_turn

#: Seconds beyond what a worker is given: to start Python and PyTorch, and for the check under way at the end.
_GRACE_S: Final = 15.0
#: Cases of BERT-base at 512 tokens: what a user's model most likely is like, and what a CPU does in time.
SHAPES: Final = ("bert_base_512", "bert_base_512_causal")
#: Examples in a batch: a GPU is filled by 12 heads times this. Heuristic.
_BATCH: Final = {"cpu": 1, "cuda": 32}


def ask(job: dict[str, Any]) -> tuple[list[dict[str, Any]], str, bool]:
    """Run a worker: its rows, how it ended early in words or "", and whether it ran out of time."""
    command = [sys.executable, "-m", __name__, json.dumps(job)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=job["seconds"] + _GRACE_S, check=False)
    except subprocess.TimeoutExpired as late:
        return _rows(late.stdout or b""), f"did not end in {late.timeout:.0f} s", True
    rows = _rows(done.stdout)
    if done.returncode == 0:
        return rows, "", False
    if done.returncode < 0:
        return rows, f"the process died of {signal.Signals(-done.returncode).name}", False
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return rows, f"the process ended with {last}", False


def _rows(output: bytes) -> list[dict[str, Any]]:
    """Whole lines of JSON; kernels and libraries may print others."""
    lines = output.decode(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


# ---------------------------------------------------------------------- in the process
def rows_of(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a job asks for: times of its "backends", checks of its "backend", or refusals."""
    device = torch.device(job["device"])
    if "backends" in job:
        yield from time_backends(job["backends"], device, job["seconds"])
    elif "backend" in job:
        torch.set_num_threads(job["threads"])  # workers that check share the cores
        dtype: torch.dtype = getattr(torch, job["dtype"])
        yield from run_checks(job["backend"], job["operators"], dtype, device)
    else:
        yield from refusals(device)


def main(job: dict[str, Any]) -> None:
    """Print the rows of a job; no check begins after its time."""
    until = time.monotonic() + job["seconds"]
    for row in rows_of(job):
        if row.keys() == {"check"} and time.monotonic() > until:
            return
        print(json.dumps(row), flush=True)
        if job["device"] != "cpu" and row.get("wrong"):
            torch.cuda.synchronize(job["device"])  # a sticky error ends the process: reported once


# ---------------------------------------------------------------------- times
def time_backends(backends: Sequence[str], device: torch.device, budget_s: float) -> Iterator[dict[str, Any]]:
    """For each "shape" the "seconds" by backend, with "sdpa" among them."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name in SHAPES:
        case = replace(find("gated_attention", name), B=_BATCH[device.type])
        inputs = case.make(dtype, device, drawn_on=device).requires_grad()
        functions: dict[str, Callable[[Inputs], Tensor]] = {
            "sdpa": sdpa,
            **{backend: partial(Inputs.call, backend=backend) for backend in backends},
        }
        calls = {who: partial(_both, inputs, function) for who, function in functions.items()}
        times = time_in_turn(calls, device=device, budget_s=budget_s / len(SHAPES), warmup=1, least=3)
        seconds = {candidate: timing.median for candidate, timing in times.items()}
        yield {"shape": name, "seconds": seconds}


def sdpa(inputs: Inputs) -> Tensor:
    """The same call by `scaled_dot_product_attention`, times the gate of each head."""
    t = inputs.tensors
    out = F.scaled_dot_product_attention(t["query"], t["key"], t["value"], is_causal=inputs.options["is_causal"])
    return out * t["gate"][:, None, None].to(out.dtype)


def _both(inputs: Inputs, function: Callable[[Inputs], Tensor]) -> object:
    return torch.autograd.grad(function(inputs), [*inputs.tensors.values()], inputs.dout)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
