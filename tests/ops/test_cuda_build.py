"""What the CUDA kernels show without a GPU: their resources, layouts as CuTe's, the guard of the current device.

CuTe is NVIDIA's own description of the instructions: fragments of `mma`, rows of `ldmatrix` (cute.cpp). It needs no
nvcc: its headers come from PyPI's nvidia-cutlass, and those of CUDA that they include from nvidia-cuda-cccl and Triton.
"""

import importlib.metadata
import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
from setuptools.errors import PlatformError

import heads_kernels as hk
from benchmarks.static import cuda_resources
from benchmarks.static.cuda_resources import Kernel
from csrc import build
from tests.support.commands import ROOT
from tests.support.examples import module_at

pytestmark = pytest.mark.check


# ---------------------------------------------------------------------- resources
@pytest.fixture(scope="module")
def module() -> Path:
    """The file that HK_CUDA names, which may have the kernels of one dtype; else the extension of the package."""
    named = os.environ.get("HK_CUDA")
    path = Path(named) if named else cuda_resources.module()
    if path is None or not path.is_file():
        pytest.skip("no CUDA kernels were built; `make check-suite` builds them where there is nvcc")
    return path


@pytest.fixture(scope="module")
def kernels(module: Path) -> list[Kernel]:
    tool = cuda_resources.cuobjdump()
    if tool is None:
        pytest.skip("no cuobjdump: pip install triton")
    return cuda_resources.read(module, tool)


def test_it_is_imported_without_a_driver(module: Path) -> None:
    assert module_at(module, "built._cuda").unsupported_device(999)


def test_every_kernel_keeps_to_its_bounds(kernels: list[Kernel]) -> None:
    broken = [f"{kernel}: {'; '.join(kernel.broken())}" for kernel in kernels if kernel.broken()]
    assert not broken, "\n".join(broken)


def test_every_part_has_every_kernel(kernels: list[Kernel]) -> None:
    by_part: dict[str, set[tuple[object, ...]]] = {}
    for kernel in kernels:
        by_part.setdefault(kernel.part, set()).add((kernel.name, kernel.dtype, kernel.numbers))
    in_place = "HK_CUDA" not in os.environ
    stated = hk.build_info()["cuda"]["architectures"] if in_place else build.architectures()
    assert sorted(by_part) == sorted(part for part in stated if part.startswith("sm_"))
    assert len(set(map(frozenset, by_part.values()))) == 1
    assert {name for name, _, _ in next(iter(by_part.values()))} == {
        "GatedForward", "GatedKeys", "GatedQueries", "GatedDecode", "CollaborativeForward", "CollaborativeKeys",
        "CollaborativeQueries", "AttentionCombine", "AttentionRows", "BiasGradient", "Received", "Statistics",
    }  # fmt: skip


# ---------------------------------------------------------------------- layouts
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
    program = build.emulator_selftest(Path("build/selftest-cute"), "cute", headers)
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


# ---------------------------------------------------------------------- the guard
@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("HEADS_KERNELS_CUDA", raising=False)  # 0 leaves the kernels out
        nvcc, missing = build.find_nvcc()
    if nvcc is None:
        pytest.skip(missing)
    output = tmp_path_factory.mktemp("guard") / "guard"
    sources = ("cuda/launch.cu", "selftest/device_guard.cu", "selftest/recorded_runtime.cpp")
    flags = "-std=c++17 -arch=sm_80 -cudart none -Icsrc --expt-relaxed-constexpr -ccbin"
    command = [nvcc, *flags.split(), build.cxx()[0], "-o", output]
    subprocess.run([*command, *(f"csrc/{source}" for source in sources)], cwd=ROOT, check=True)
    return output


@pytest.mark.parametrize("driver", ["answers", "does not answer"])
def test_creates_no_context_on_another_device(guard: Path, driver: str) -> None:
    """Restoring the device of before would, on a GPU that this process does not use."""
    arguments = [driver] if driver == "does not answer" else []
    run = subprocess.run([guard, *arguments], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "")
