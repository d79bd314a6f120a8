"""`python -m heads_kernels doctor`: its options, the machine, the run, and how it is printed."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import math
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

import heads_kernels as hk
from heads_kernels.backends import BACKENDS, CPU_MISSING, SIMULATED, VARIABLE
from heads_kernels.doctor.checks import OPERATORS, SHAPES, Verdict, ask, dtypes

DESCRIPTION = f"""\
Checks every backend that can run on this machine, on the CPU and on one GPU of each kind: forward and backward of named
cases against the formula in float64, then two shapes against PyTorch's SDPA, in under a minute. The last line is the
{VARIABLE} that leaves out backends that failed and prefers the fastest; nothing is written.

Exit status: 0; 1 where a backend that can run failed; 2 for a bad option.
"""

#: The part of the time that is for checks; times have the rest.
_CHECKS: Final = 0.6
#: Seconds to open a device.
_START_S: Final = 30.0
#: CU_DEVICE_ATTRIBUTE_COMPUTE_MODE and CU_COMPUTEMODE_EXCLUSIVE_PROCESS of the CUDA driver.
_COMPUTE_MODE, _EXCLUSIVE_PROCESS = 20, 3


def add_options(parser: argparse.ArgumentParser) -> None:
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
    names: dict[str, None] = {}
    for each in found:
        timed = [name for row in each.speed[:1] for name in row["seconds"] if name != "sdpa"]
        product = {name: math.prod(row["seconds"][name] for row in each.speed) for name in timed}
        names |= dict.fromkeys(sorted(timed, key=product.__getitem__))
    names |= dict.fromkeys(row.name for row in BACKENDS)
    return [name for name in names if name not in failed]


def _print_device(each: Examined) -> None:
    is_gpu = each.device.type == "cuda"
    print(f"\n{each.device}: {torch.cuda.get_device_name(each.device) if is_gpu else _cpu()}")
    for name, verdict in each.verdicts.items():
        print(f"  {name:8} {verdict}")
    if each.speed:
        print("  time of forward and backward (speed relative to SDPA)")
    for row in each.speed:
        sdpa = row["seconds"]["sdpa"]
        times = [f"{n} {1e3 * s:.3g} ms ({sdpa / s:.2f}x)" for n, s in row["seconds"].items()]
        print(f"    {row['shape']}: {', '.join(times)}")
    if len(each.speed) < len(SHAPES):
        print(f"  times of {len(each.speed)} of {len(SHAPES)} shapes: {each.untimed or 'no time'}")


# ---------------------------------------------------------------------- the run
def examine(seconds: int) -> list[Examined]:
    """Check every backend on every device, then time those that are verified."""
    gpus = {torch.cuda.get_device_name(n): n for n in reversed(range(torch.cuda.device_count()))}
    devices = [torch.device("cpu"), *(torch.device("cuda", n) for n in sorted(gpus.values()))]
    found = [_planned(device) for device in devices]
    jobs = [
        (verdict, {"device": str(each.device), "backend": name, "operators": verdict.operators,
            "dtype": str(dtype).removeprefix("torch.")})
        for each in found
        for name, verdict in each.verdicts.items() if verdict.operators
        for dtype in dtypes(name, each.device)
    ]  # fmt: skip
    cores = os.cpu_count() or 1
    at_once = 1 if any(map(_is_exclusive, devices)) else max(1, min(len(jobs), cores))
    shared = {
        "seconds": _CHECKS * seconds / max(1, math.ceil(len(jobs) / at_once)),
        "threads": max(1, cores // at_once),
    }
    with ThreadPoolExecutor(at_once) as pool:
        ended = pool.map(ask, [{**job, **shared} for _, job in jobs])
        for (verdict, _), result in zip(jobs, ended, strict=True):
            verdict.add(*result)
    for each in found:
        simulated = SIMULATED if each.device.type == "cpu" else ()
        timed = [n for n, v in each.verdicts.items() if v.is_verified and n not in simulated]
        each.untimed = "no backend is verified and not simulated"
        if timed:
            budget = (1 - _CHECKS) * seconds / len(found)
            job = {"device": str(each.device), "backends": timed, "seconds": budget}
            each.speed, each.untimed, _ = ask(job)
    return found


def _planned(device: torch.device) -> Examined:
    """Every backend but the formula, with the reasons against it."""
    rows, end, _ = ask({"device": str(device), "seconds": _START_S})
    if end:  # no backend can run on this device
        names = [row.name for row in BACKENDS if row.name != "eager"]
        rows = [{"backend": name, "refused": dict.fromkeys(OPERATORS, end)} for name in names]
    return Examined(device, {row["backend"]: Verdict(row["refused"]) for row in rows})


# ---------------------------------------------------------------------- the machine
def installed() -> dict[str, str]:
    """Versions, and what the kernels were built for, by name."""
    built = hk.build_info()
    cpu, cuda = built.get("cpu", {}), built.get("cuda", {})
    return {
        "heads_kernels": f"{hk.__version__} {(built.get('commit') or '')[:12]}".strip(),
        "PyTorch": torch.__version__,
        "Python": platform.python_version(),
        "CPU kernels": ", ".join(cpu.get("levels", [])) or cpu.get("missing", "none built"),
        "CUDA kernels": ", ".join(cuda.get("architectures", [])) or cuda.get("missing", "none built"),
    }


def machine() -> dict[str, str]:
    """The same, Triton's version, the processor, the driver and the GPUs."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:  # not there, or a build by another name
        triton = "not installed"
    level = "none" if CPU_MISSING else importlib.import_module("heads_kernels._cpu").level()
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return {
        **installed(),
        "Triton": triton,
        "CPU": f"{_cpu()}, {os.cpu_count()} cores, kernels for {level}",
        "driver": _line("/proc/driver/nvidia/version") or "none of NVIDIA",
        "GPUs": ", ".join(gpus) or "none",
    }


def _cpu() -> str:
    """The processor's name as Linux has it, else the machine's architecture."""
    return _line("/proc/cpuinfo", "model name").partition(": ")[2] or platform.machine()


def _line(file: str, start: str = "") -> str:
    """The first line of a file that starts so, if there is one."""
    try:
        lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(start)), "")


def _is_exclusive(device: torch.device) -> bool:
    """Whether a GPU serves one process at a time (compute mode EXCLUSIVE_PROCESS)."""
    if device.type != "cuda":
        return False
    driver, mode = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(mode), _COMPUTE_MODE, device.index)
    return mode.value == _EXCLUSIVE_PROCESS
