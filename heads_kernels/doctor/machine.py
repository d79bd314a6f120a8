"""What is installed, what was built, and what it runs on."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

import heads_kernels as hk


def installed() -> dict[str, str]:
    """Versions, and what the kernels were built for, by name."""
    built = hk.build_info()
    cpu, cuda = built.get("cpu", {}), built.get("cuda", {})
    return {
        "heads_kernels": f"{hk.__version__} {(built.get('commit') or '')[:12]}".strip(),
        "PyTorch": torch.__version__,
        "Python": platform.python_version(),
        "CPU kernels": ", ".join(cpu.get("levels", [])) or cpu.get("missing", "none built"),
        "CUDA kernels": ", ".join(cuda.get("architectures", []))
        or cuda.get("missing", "none built"),
    }


def machine() -> dict[str, str]:
    """The same, Triton's version, the processor, the driver and the GPUs."""
    built = hk.build_info().get("cuda", {}).get("architectures", [])
    gpus = [
        torch.cuda.get_device_name(n)
        + compiled_by_driver(torch.cuda.get_device_capability(n), built)
        for n in range(torch.cuda.device_count())
    ]
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:  # not there, or a build by another name
        triton = "not installed"
    return {
        **installed(),
        "Triton": triton,
        "CPU": f"{_cpu()}, {os.cpu_count()} cores, kernels for {_cpu_level()}",
        "driver": (_lines("/proc/driver/nvidia/version") or ["none of NVIDIA"])[0],
        "GPUs": ", ".join(gpus) or "none",
    }


def compiled_by_driver(capability: tuple[int, int], architectures: Sequence[str]) -> str:
    """What to add to the name of a GPU for which the CUDA kernels have no machine code, only PTX; else "".

    Machine code runs on GPUs of the same major capability and of the same or a later minor one.
    """
    major, minor = capability
    parts = [int(name.removeprefix("sm_")) for name in architectures if name.startswith("sm_")]
    if not parts or 10 * major + minor < min(parts):
        return ""
    if any(part // 10 == major and part % 10 <= minor for part in parts):
        return ""
    return f" (sm_{major}{minor}: the driver compiles the CUDA kernels at their first use, and caches them)"


def device_name(device: torch.device) -> str:
    """A GPU's name, or the processor's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()


def devices() -> list[torch.device]:
    """The CPU, and one GPU of each name."""
    gpus = {torch.cuda.get_device_name(n): n for n in reversed(range(torch.cuda.device_count()))}
    return [torch.device("cpu"), *(torch.device("cuda", n) for n in sorted(gpus.values()))]


def is_exclusive(device: torch.device) -> bool:
    """Whether a GPU serves one process at a time (compute mode EXCLUSIVE_PROCESS)."""
    if device.type != "cuda":
        return False
    exclusive, attribute = (
        3,
        20,
    )  # CU_COMPUTEMODE_EXCLUSIVE_PROCESS, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
    driver, mode = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(mode), attribute, device.index)
    return mode.value == exclusive


def _cpu() -> str:
    """The processor's name as Linux has it, else the machine's architecture."""
    names = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.machine()


def _cpu_level() -> str:
    """The instruction-set level that the CPU kernels use here."""
    try:
        level: str = importlib.import_module("heads_kernels._cpu").level()
    except ImportError as error:
        return f"none ({error})"
    return level


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
