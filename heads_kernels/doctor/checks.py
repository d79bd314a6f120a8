"""What a backend is held to, a short selection of the named cases, and the processes in which it is.

A process, for one device, gives which backends refuse it, the checks of one backend in one dtype, or times against
SDPA. It prints JSON, a row a line. Only such processes use a GPU, so that each finds it free where a GPU serves one
process at a time (`EXCLUSIVE_PROCESS`).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from heads_kernels.backends import BACKENDS, TRITON_INTERPRETED
from heads_kernels.functional import explain
from heads_kernels.testing import Inputs, compare, find, reference, time_in_turn

_GATED, _SHARED = "gated_attention", "collaborative_attention"
_SPARSE, _STATISTICS = "entmax_attention", "attention_statistics"
OPERATORS: Final = (_GATED, _SHARED, _SPARSE, _STATISTICS)
#: Operator under test, operator and name of the case; the most telling first, for time may run out.
CHECKS: Final = tuple(
    (operator, of, name)
    for operator, of, names in (
        (_GATED, _GATED, "transposed_grouped width_128"),
        (_SHARED, _SHARED, "ragged_bias gate_bh_identity"),
        (_STATISTICS, _GATED, "holes"),
        (_SPARSE, _SPARSE, "closed_batch_heads transposed_grouped"),
        (_GATED, _GATED, "sinks_all sliced"),
        (_SHARED, _SHARED, "sinks_all holes"),
        (_STATISTICS, _SHARED, "ragged_bias"),
        (_GATED, _GATED, "dense_blocks closed_batch_heads offsets decode window_causal"),
        (_SHARED, _SHARED, "offsets width_384 dense_heads decode"),
        (_SPARSE, _SPARSE, "holes bias_shared"),
        (_STATISTICS, _GATED, "softcap_bias"),
        (_GATED, _GATED, "length_1000_causal"),
        (_SHARED, _SHARED, "length_1000"),
    )
    for name in names.split()
)

#: Seconds beyond what a worker is given: to start Python and PyTorch, and for the check under way at the end.
_GRACE_S: Final = 15.0
#: Cases of BERT-base at 512 tokens: what a user's model most likely is like, and what a CPU does in time.
SHAPES: Final = ("bert_base_512", "bert_base_512_causal")
#: Examples in a batch: a GPU is filled by 12 heads times this. Heuristic.
_BATCH: Final = {"cpu": 1, "cuda": 32}


def dtypes(backend: str, device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes that a backend is checked in, the most used first."""
    if backend == "triton" and TRITON_INTERPRETED:
        return (torch.float32,)  # Triton's interpreter multiplies bfloat16 wrongly
    if device.type == "cuda":
        return torch.bfloat16, torch.float32, torch.float16
    return torch.float32, torch.bfloat16


def refusals(device: torch.device) -> Iterator[dict[str, Any]]:
    """For each backend but the formula, why it can't run on a device, by operator."""
    x = torch.zeros(1, 1, 1, 16, device=device)
    operands: dict[str, tuple[torch.Tensor, ...]] = {
        _GATED: (x, x, x),
        _SHARED: (x[0], x[0], x, x[0, 0]),
        _SPARSE: (x, x, x),
        _STATISTICS: (x, x),
    }
    for row in BACKENDS:
        if row.name != "eager":
            reasons = {
                name: explain(name, *tensors, backend=row.name).refusals.get(row.name)
                for name, tensors in operands.items()
            }
            refused = {name: "; ".join(each) for name, each in reasons.items() if each}
            yield {"backend": row.name, "refused": refused}


def run_checks(
    backend: str, operators: Sequence[str], dtype: torch.dtype, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Two rows of each check: before it its name, "check"; after it also what is "wrong" in words, or ""."""
    for operator, of, name in CHECKS:
        if operator not in operators:
            continue
        row = {"check": f"{operator} {name} in {str(dtype).removeprefix('torch.')}"}
        yield row
        try:
            inputs = find(of, name).make(dtype, device)
            report = compare(reference(inputs.statistics() if operator == _STATISTICS else inputs), backend)
            wrong = [str(q).removeprefix("FAIL ") for q in report.quantities if not q.ok]
            words = "; ".join(" ".join(each.split()) for each in wrong)
        except Exception as error:
            words = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        yield {**row, "wrong": words}


@dataclass
class Verdict:
    """What the checks of one backend on one device add up to."""

    refused: dict[str, str] = field(default_factory=dict)  # why not, by operator
    planned: int = 0  # checks of the processes that have ended
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    late: str = ""  # what did not end in its time

    @property
    def operators(self) -> list[str]:
        """Those that are checked."""
        return [name for name in OPERATORS if name not in self.refused]

    @property
    def is_verified(self) -> bool:
        return self.passed > 0 and not self.failures

    def __str__(self) -> str:
        if not self.operators:
            return f"can't run: {self.refused[OPERATORS[0]]}"
        if self.failures:
            return f"failed {len(self.failures)} of {self.planned} checks, first {self.failures[0]}"
        words = [
            f"{'verified here' if self.passed else 'not verified'}: {self.passed} of {self.planned} checks",
            "there was no time for the others" if self.passed < self.planned else "",
            self.late,
            *(f"not {name}: {why}" for name, why in self.refused.items()),
        ]
        return "; ".join(filter(None, words))

    def add(self, rows: Sequence[dict[str, Any]], end: str, is_late: bool) -> None:
        """Add the rows of `run_checks` in a process that ended with `end` before its time, or for lack of time."""
        wrong = {row["check"]: row["wrong"] for row in rows if "wrong" in row}
        self.planned += sum(operator in self.operators for operator, _, _ in CHECKS)
        self.passed += sum(not words for words in wrong.values())
        self.failures += [f"{check} ({words})" for check, words in wrong.items() if words]
        begun = rows[-1]["check"] if rows and rows[-1]["check"] not in wrong else ""
        if is_late:
            self.late = f"{begun} {end}".strip()
        elif begun:
            self.failures.append(f"{begun} ({end})")
        elif end and not any(wrong.values()):  # else already reported
            self.failures.append(end)


# ---------------------------------------------------------------------- processes
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
