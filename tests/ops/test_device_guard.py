"""The guard that makes a GPU current for a launch, against a CUDA runtime that records (no GPU is needed)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from csrc import build

pytestmark = pytest.mark.check


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    nvcc, missing = build.find_nvcc()
    if nvcc is None:
        pytest.skip(missing)
    root, output = Path(build.__file__).parent.parent, tmp_path_factory.mktemp("guard") / "guard"
    sources = (
        "cuda/launch.cu",
        "selftest/device_guard.cu",
        "selftest/recorded_runtime.cpp",
    )
    flags = "-std=c++17 -arch=sm_80 -cudart none -Icsrc --expt-relaxed-constexpr -ccbin"
    command = [nvcc, *flags.split(), build.cxx()[0], "-o", output]
    subprocess.run([*command, *(f"csrc/{source}" for source in sources)], cwd=root, check=True)
    return output


@pytest.mark.parametrize("driver", ["answers", "does not answer"])
def test_creates_no_context_on_another_device(program: Path, driver: str) -> None:
    """Restoring the device of before would, on a GPU that this process does not use."""
    arguments = [driver] if driver == "does not answer" else []
    run = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "")
