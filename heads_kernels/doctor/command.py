"""`python -m heads_kernels doctor`: its options, the run, and how it is printed."""

from __future__ import annotations

import argparse
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from os import cpu_count
from typing import Any, Final

import torch

from heads_kernels.backends import BACKENDS, SIMULATED
from heads_kernels.dispatch import VARIABLE
from heads_kernels.doctor.checks import CHECKS, OPERATORS, Verdict, dtypes
from heads_kernels.doctor.machine import device_name, devices, is_exclusive, machine
from heads_kernels.doctor.speed import SHAPES, fastest_first
from heads_kernels.doctor.worker import ask

DESCRIPTION = f"""\
Checks every backend that can run on this machine, on the CPU and on one GPU of each kind: forward and backward of named
cases against the formula in float64, then four shapes against PyTorch's SDPA, in under a minute. The last line is the
{VARIABLE} that leaves out backends that failed and prefers the fastest; nothing is written.

Exit status: 0; 1 where a backend that can run failed; 2 for a bad option.
"""

#: The part of the time that is for checks; times have the rest.
_CHECKS: Final = 0.6
#: Seconds to open a device.
_START_S: Final = 30.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `doctor`."""
    parser.add_argument("--seconds", type=int, default=30, metavar="N",
        help="what is not done by then is left out, and said to be; default %(default)s")  # fmt: skip


@dataclass
class Examined:
    """What was found about a device; `speed` has the rows of `time_backends`, `untimed` why some are not there."""

    device: torch.device
    verdicts: dict[str, Verdict]  # by backend, in the order of the table
    speed: list[dict[str, Any]] = field(default_factory=list)
    untimed: str = ""


def run(options: argparse.Namespace) -> int:
    """Examine this machine; returns the exit status."""
    started = time.perf_counter()
    print("\n".join(f"{name:14} {value}" for name, value in machine().items()), flush=True)
    found = examine(options.seconds)
    for each in found:
        _print_device(each)
    print(f"\nin {time.perf_counter() - started:.0f} s; ", end="")
    if (names := order(found)) == [row.name for row in BACKENDS]:
        print(f"the order of the table is that of this machine: {VARIABLE} need not be set")
    else:
        print(f"for the environment of processes on this machine:\n{VARIABLE}={','.join(names)}")
    return int(any(verdict.failures for each in found for verdict in each.verdicts.values()))


def order(found: list[Examined]) -> list[str]:
    """Backends without those that failed: what was timed, the fastest on its device first, then as in the table."""
    failed = {name for each in found for name, verdict in each.verdicts.items() if verdict.failures}
    timed = [name for each in found for name in fastest_first(each.speed)]
    names = dict.fromkeys([*timed, *(row.name for row in BACKENDS)])
    return [name for name in names if name not in failed]


# ---------------------------------------------------------------------- the run
def examine(seconds: int) -> list[Examined]:
    """Check every backend on every device, then time those that are verified."""
    found = [_planned(device) for device in devices()]
    jobs = [
        (verdict, {"device": str(each.device), "backend": name, "operators": verdict.operators,
            "dtype": str(dtype).removeprefix("torch.")})
        for each in found
        for name, verdict in each.verdicts.items() if verdict.operators
        for dtype in dtypes(name, each.device)
    ]  # fmt: skip
    cores = cpu_count() or 1
    at_once = max(1, min(len(jobs), cores))
    if any(is_exclusive(each.device) for each in found):
        at_once = 1
    shared = {
        "seconds": _CHECKS * seconds / max(1, math.ceil(len(jobs) / at_once)),
        "threads": max(1, cores // at_once),
    }
    with ThreadPoolExecutor(at_once) as pool:
        ended = pool.map(ask, [{**job, **shared} for _, job in jobs])
        for (verdict, _), result in zip(jobs, ended, strict=True):
            verdict.planned += sum(operator in verdict.operators for operator, _, _ in CHECKS)
            verdict.add(*result)
    for each in found:
        _time(each, (1 - _CHECKS) * seconds / len(found))
    return found


def _planned(device: torch.device) -> Examined:
    """Every backend but the formula, with the reasons against it."""
    rows, end, _ = ask({"device": str(device), "seconds": _START_S})
    if end:  # no backend can run on this device
        names = [row.name for row in BACKENDS if row.name != "eager"]
        rows = [{"backend": name, "refused": dict.fromkeys(OPERATORS, end)} for name in names]
    return Examined(device, {row["backend"]: Verdict(row["refused"]) for row in rows})


def _time(each: Examined, seconds: float) -> None:
    """Time what is verified, in one process."""
    simulated = SIMULATED if each.device.type == "cpu" else ()
    verified = [
        name for name, v in each.verdicts.items() if v.is_verified and name not in simulated
    ]
    if not verified:
        each.untimed = "no backend to time: those that are verified are simulated, or there is none"
        return
    each.speed, each.untimed, _ = ask(
        {"device": str(each.device), "backends": verified, "seconds": seconds}
    )
    if not each.untimed and len(each.speed) < len(SHAPES):
        each.untimed = f"no time for {len(SHAPES) - len(each.speed)} of {len(SHAPES)} shapes"


# ---------------------------------------------------------------------- words
def _print_device(each: Examined) -> None:
    print(f"\n{each.device}: {device_name(each.device)}")
    for name, verdict in each.verdicts.items():
        print(f"  {name:8} {verdict}")
    if each.speed:
        print("  forward and backward, and how much faster than SDPA that is")
    for row in each.speed:
        sdpa = row["seconds"]["sdpa"]
        times = [f"{n} {1e3 * s:.3g} ms ({sdpa / s:.2f}x)" for n, s in row["seconds"].items()]
        print(f"    {row['operator']} {row['shape']}: {', '.join(times)}")
    if each.untimed:
        print(f"  times: {each.untimed}")
