"""What is installed, what was built, and what it runs on."""

from __future__ import annotations

import importlib
import os
import platform

import torch

import heads_kernels as hk
from heads_kernels import doctor_record


def installed() -> dict[str, str]:
    """Versions, and what the kernels were built for, by name."""
    built = hk.build_info()
    cuda = built.get("cuda", {})
    return {
        "heads_kernels": f"{hk.__version__} {(built.get('commit') or '')[:12]}".strip(),
        "PyTorch": torch.__version__,
        "Python": platform.python_version(),
        "CPU kernels": ", ".join(built.get("cpu", {}).get("levels", [])) or "none built",
        "CUDA kernels": ", ".join(cuda.get("architectures", []))
        or cuda.get("missing", "none built"),
    }


def machine() -> dict[str, str]:
    """The same, Triton's version, the processor, the driver and the GPUs."""
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return {
        **installed(),
        "Triton": doctor_record.triton_version() or "not installed",
        "CPU": f"{doctor_record.cpu_name()}, {os.cpu_count()} cores, kernels for {cpu_level()}",
        "driver": doctor_record.driver_version(),
        "GPUs": ", ".join(gpus) or "none",
    }


def cpu_level() -> str:
    """The instruction-set level that the CPU kernels use here."""
    try:
        level: str = importlib.import_module("heads_kernels._cpu").level()
    except ImportError as error:
        return f"none ({error})"
    return level


def devices() -> list[torch.device]:
    """The CPU, and one GPU of each name."""
    gpus = {torch.cuda.get_device_name(n): n for n in reversed(range(torch.cuda.device_count()))}
    return [torch.device("cpu"), *(torch.device("cuda", n) for n in sorted(gpus.values()))]
