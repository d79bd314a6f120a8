"""The register and shared-memory layouts of the CUDA kernels against CuTe's (csrc/selftest/cute.cpp).

CuTe is NVIDIA's own description of the instructions: fragments of `mma`, rows of `ldmatrix`. Neither
nvcc nor a GPU is needed: its headers come from PyPI's nvidia-cutlass, and those of CUDA that they
include from nvidia-cuda-cccl and Triton.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
from pathlib import Path

import pytest
from setuptools.errors import PlatformError

from csrc import build

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.check


def of_distribution(name: str, folder: str) -> Path:
    try:
        return Path(importlib.metadata.distribution(name).locate_file(folder))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed: pip install --no-deps {name}")


@pytest.fixture
def headers() -> list[Path]:
    """Folders for the compiler. Triton's are first of CUDA's, whatever else was installed beside CCCL."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        pytest.skip("triton is not installed")
    folders = [
        of_distribution("nvidia-cutlass", "cutlass_library/source/include"),
        Path(triton.origin).parent / "backends/nvidia/include",
        of_distribution("nvidia-cuda-cccl", "nvidia/cu13/include/cccl"),
    ]
    for folder in folders:
        assert folder.is_dir(), folder
    return folders


def test_layouts_are_those_of_cute(headers: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        build.cxx()
    except PlatformError as missing:
        pytest.skip(str(missing))
    monkeypatch.chdir(ROOT)
    program = build.cute_selftest(Path("build/selftest-cute"), headers)
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
