"""Every wrapper of an instruction (csrc/cuda/hardware.h) against what its documentation says, on the GPU.

The kernels' other tests run on emulated instructions, which were read from the same documentation:
here the reading itself is checked.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from typing import Final

from benchmarks.gpu.pool import ROOT
from benchmarks.gpu.settings import FAILED, PASSED, Items, Row, Settings, Skipped

_SECONDS: Final = 100  # less than the stage gives an item
_TESTS: Final = ROOT / "tests" / "ops" / "test_cuda_wrappers.py"


def items(settings: Settings) -> Items:
    return {"wrappers": partial(_run, settings)}


def _run(settings: Settings) -> Row:
    if find_spec("pytest") is None:
        raise Skipped("pytest is not installed")
    if find_spec(f"heads_kernels.{'_cuda' if settings.on_gpu else '_cuda_emulated'}") is None:
        raise Skipped("the CUDA kernels are not built")
    # tests/conftest.py asks for packages that this machine may lack.
    chosen = ["-m", "gpu"] if settings.on_gpu else ["-k", "round_robin"]
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", str(_TESTS), *chosen]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return {"verdict": FAILED, "detail": f"not finished in {_SECONDS} s"}
    lines = done.stdout.strip().splitlines() or [done.stderr[-500:]]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    detail = "; ".join([lines[-1], *failed])[:1500]
    return {"verdict": PASSED if done.returncode == 0 else FAILED, "detail": detail}
