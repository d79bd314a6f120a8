"""The machine: what it is, and the two ceilings that times are held up to."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

import heads_kernels as hk
from benchmarks.gpu.settings import Items, Row, Settings
from heads_kernels.testing import time_in_turn

#: Read, never set: the card is measured as it is found.
_SMI = (
    "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
)


def items(settings: Settings) -> Items:
    return {"machine": partial(_describe, settings), "ceilings": partial(_ceilings, settings)}


def versions() -> dict[str, str | None]:
    triton: str | None = None
    if find_spec("triton") is not None:
        import triton as module

        triton = module.__version__
    return {
        "heads_kernels": hk.__version__,
        "torch": torch.__version__,
        "triton": triton,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def device_name(settings: Settings) -> str:
    return torch.cuda.get_device_name() if settings.on_gpu else platform.machine()


def _describe(settings: Settings) -> Row:
    row: Row = {
        "device": device_name(settings),
        "cores": os.cpu_count(),
        "versions": versions(),
        "build": hk.build_info(),
    }
    if settings.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        row["capability"] = list(torch.cuda.get_device_capability())
        row["memory_gib"] = round(properties.total_memory / 2**30, 1)
        row["multiprocessors"] = properties.multi_processor_count
        row["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    row["nvidia_smi"] = _nvidia_smi()
    return row


def _nvidia_smi() -> dict[str, str] | str:
    if shutil.which("nvidia-smi") is None:
        return "nvidia-smi is not on PATH"
    command = ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {error}"
    first = done.stdout.strip().partition("\n")[0]
    return dict(zip(_SMI.split(","), (value.strip() for value in first.split(",")), strict=False))


def _ceilings(settings: Settings) -> Row:
    """TFLOP/s of a bf16 matrix product of random data, GB/s read and written by a copy; medians."""
    n = 64 if settings.tiny else 8192
    numel = 1 << 12 if settings.tiny else 1 << 30  # 2 GiB of bf16: far beyond any L2
    options: dict[str, Any] = {"device": settings.device, "dtype": torch.bfloat16}
    a, b = torch.randn(2, n, n, **options)
    source, target = torch.ones(numel, **options), torch.empty(numel, **options)
    calls = {"matmul": lambda: a @ b, "copy": lambda: target.copy_(source)}
    times = time_in_turn(
        calls, device=settings.device, budget_s=0.01 if settings.tiny else 1.0, least=9
    )
    return {
        "matmul_tflops": 2 * n**3 / times["matmul"].median * 1e-12,
        "matmul": f"{n} x {n} x {n} bf16, random data",
        "copy_gbs": 2 * source.nbytes / times["copy"].median * 1e-9,
    }
