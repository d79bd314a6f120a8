"""`python -m heads_kernels doctor`: its options, the run, and how it is printed."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from os import cpu_count
from typing import Any, Final

import torch

from heads_kernels import doctor_record
from heads_kernels.backends import BACKENDS
from heads_kernels.doctor.checks import CHECKS, OPERATORS, Verdict, dtypes, is_simulated, refusal
from heads_kernels.doctor.machine import devices, machine
from heads_kernels.doctor.speed import SHAPES, fastest_first
from heads_kernels.doctor.worker import ask
from heads_kernels.doctor_record import Found

DESCRIPTION = """\
Checks every backend that can run on this machine, on the CPU and on one GPU of each kind: forward and backward of named
cases against the formula in float64, then four shapes against PyTorch's SDPA, in under a minute. Nothing is written
without --save; with it, calls on this machine leave out backends that failed and prefer the fastest verified one.

Exit status: 0; 1 where a backend that can run failed, or the record can't be written; 2 for a bad option.
"""

#: The part of the time that is for checks; times have the rest.
_CHECKS: Final = 0.6


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `doctor`."""
    add = parser.add_argument
    add("--save", action="store_true", help="keep what is found, in the user's cache folder")
    add("--json", action="store_true", help="print one JSON object instead of words")
    add("--seconds", type=_seconds, default=30.0, metavar="N",
        help="what is not done by then is left out, and said to be; default %(default)g")  # fmt: skip


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"is {text!r}; pass a number of seconds above 0")
    return value


@dataclass
class Examined:
    """What was found about a device; `speed` has the rows of `time_backends`, `untimed` why there are none."""

    device: torch.device
    verdicts: dict[str, dict[str, Verdict]]  # by operator and backend, in the order of the tables
    speed: list[dict[str, Any]] = field(default_factory=list)
    untimed: str = ""

    def verified(self, operator: str) -> list[str]:
        """Backends by name, the fastest first."""
        verdicts = self.verdicts[operator]
        names = [name for name, verdict in verdicts.items() if verdict.word == "verified here"]
        return fastest_first(operator, names, self.speed)

    def found(self) -> dict[str, Found]:
        """What is kept of it."""
        return {
            operator: Found(
                tuple(self.verified(operator)),
                tuple(
                    (name, f"failed here: {'; '.join(verdict.failures)}")
                    for name, verdict in verdicts.items()
                    if verdict.failures
                ),
            )
            for operator, verdicts in self.verdicts.items()
        }


def run(options: argparse.Namespace) -> int:
    """Examine this machine; returns the exit status."""
    started = time.perf_counter()
    about = machine()
    if not options.json:
        _print(about)
    found = examine(options.seconds)
    saved: str | None = None
    status = int(any(v.failures for e in found for vs in e.verdicts.values() for v in vs.values()))
    if options.save:
        try:
            for each in found:
                saved = str(doctor_record.save(each.device, each.found()))
        except OSError as error:
            print(f"--save: {doctor_record.path()} can't be written: {error}", file=sys.stderr)
            status = 1
    line = summary(about, found)
    seconds = time.perf_counter() - started
    if options.json:
        print(json.dumps(_as_json(about, found, saved, line, seconds), indent=1))
        return status
    for each in found:
        _print_device(each)
    if saved:
        print(f"\nkept in {saved}; {doctor_record.VARIABLE}=0 ignores it")
    print(f"\nin {seconds:.0f} s; for a bug report:\n{line}")
    return status


# ---------------------------------------------------------------------- the run
def examine(seconds: float) -> list[Examined]:
    """Check every backend on every device, then time those that are verified."""
    found = [_planned(device) for device in devices()]
    jobs = [
        (each, {
            "device": str(each.device), "backend": backend, "dtype": str(dtype).removeprefix("torch."),
            "operators": [o for o, vs in each.verdicts.items() if backend in vs and not vs[backend].refused],
        })
        for each in found
        for backend in dict.fromkeys(name for verdicts in each.verdicts.values() for name in verdicts)
        for dtype in dtypes(backend, each.device)
    ]  # fmt: skip
    jobs = [(each, job) for each, job in jobs if job["operators"]]
    cores = cpu_count() or 1
    at_once = max(1, min(len(jobs), cores))
    shared = {
        "seconds": _CHECKS * seconds / max(1, math.ceil(len(jobs) / at_once)),
        "threads": max(1, cores // at_once),
    }
    with ThreadPoolExecutor(at_once) as pool:
        ended = pool.map(ask, [{**job, **shared} for _, job in jobs])
        for (each, job), (rows, words, late) in zip(jobs, ended, strict=True):
            _count(each, job, rows, words, late)
    for each in found:
        _time(each, (1 - _CHECKS) * seconds / len(found))
    return found


def _planned(device: torch.device) -> Examined:
    """Every backend but the formula, with what speaks against it."""
    return Examined(device, {
        operator: {
            row.name: Verdict(refused=refusal(operator, row, device))
            for row in BACKENDS if row.name != "eager"
        }
        for operator in OPERATORS
    })  # fmt: skip


def _count(
    each: Examined, job: dict[str, Any], rows: list[dict[str, Any]], words: str, late: bool
) -> None:
    """Add what the worker of a backend and dtype gave to its verdicts."""
    verdicts = {name: each.verdicts[name][job["backend"]] for name in job["operators"]}
    for name, verdict in verdicts.items():
        verdict.planned += sum(operator == name for operator, _, _ in CHECKS)
    done = [row for row in rows if "wrong" in row]
    for row in done:
        verdicts[row["operator"]].add(row)
    begun = rows[-1] if rows and "check" in rows[-1] and rows[-1] not in done else None
    if begun and late:
        verdicts[begun["operator"]].unfinished.append(f"{begun['check']} {words}")
    elif begun:
        verdicts[begun["operator"]].failures.append(f"{begun['check']} ({words})")
    elif words and not late and not any(row["wrong"] for row in done):  # else already reported
        for verdict in verdicts.values():
            verdict.failures.append(f"{job['dtype']} ({words})")


def _time(each: Examined, seconds: float) -> None:
    """Time what is verified, in one process."""
    verified = {
        name: [b for b in each.verified(name) if not (each.device.type == "cpu" and is_simulated(b))]
        for name in {operator for operator, _ in SHAPES}
    }  # fmt: skip
    if not any(verified.values()):
        each.untimed = "no backend to time: those that are verified are simulated, or there is none"
        return
    job = {"device": str(each.device), "verified": verified, "seconds": seconds}
    rows, each.untimed, _ = ask(job)
    each.speed = [row for row in rows if "seconds" in row]
    if {"late": True} in rows and len(each.speed) < len(SHAPES):
        each.untimed = f"{len(SHAPES) - len(each.speed)} shapes not timed for lack of time"


# ---------------------------------------------------------------------- words
def summary(about: dict[str, str], found: list[Examined]) -> str:
    """Everything in one line."""
    parts = [f"{name} {value}" for name, value in about.items()]
    for each in found:
        for operator, verdicts in each.verdicts.items():
            words = [f"{name} {verdict.word}" for name, verdict in verdicts.items()
                     if not verdict.refused]  # fmt: skip
            failures = [f for verdict in verdicts.values() for f in verdict.failures[:1]]
            parts.append(
                f"{each.device} {operator}: {', '.join([*words, *failures]) or 'eager alone'}"
            )
    return " | ".join(parts)


def _print(about: dict[str, str]) -> None:
    print("\n".join(f"{name:14} {value}" for name, value in about.items()), flush=True)


def _print_device(each: Examined) -> None:
    print(f"\n{each.device}: {doctor_record.device_name(each.device)}")
    for operator, verdicts in each.verdicts.items():
        print(f"  {operator}")
        for name, verdict in verdicts.items():
            print(f"    {name:8} {verdict}")
    if each.speed:
        print("  forward and backward, and how much faster than SDPA that is")
    for row in each.speed:
        sdpa = row["seconds"]["sdpa"]
        times = [f"{n} {1e3 * s:.3g} ms ({sdpa / s:.2f}x)" for n, s in row["seconds"].items()]
        print(f"    {row['operator']} {row['shape']}: {', '.join(times)}")
    if each.untimed:
        print(f"  times: {each.untimed}")


def _as_json(
    about: dict[str, str], found: list[Examined], saved: str | None, line: str, seconds: float
) -> dict[str, Any]:
    listed = [
        {
            "device": str(each.device),
            "environment": doctor_record.environment(each.device),
            "operators": {
                operator: {
                    name: {"verdict": v.word, "words": str(v), **asdict(v)}
                    for name, v in vs.items()
                }
                for operator, vs in each.verdicts.items()
            },
            "order": {operator: each.verified(operator) for operator in each.verdicts},
            "speed": each.speed,
            "untimed": each.untimed,
        }
        for each in found
    ]
    return {
        "machine": about,
        "devices": listed,
        "saved": saved,
        "seconds": seconds,
        "summary": line,
    }
