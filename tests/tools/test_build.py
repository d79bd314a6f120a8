"""The build: which nvcc is used, what is said where it or a compiler is missing, and what is recorded."""

from pathlib import Path

import pytest
from setuptools.errors import CompileError, PlatformError

import heads_kernels as hk
from csrc import build


def compiler(folder: Path, version: str) -> Path:
    """A compiler that prints its version and can do nothing else."""
    folder.mkdir(parents=True)
    program = folder / "nvcc"
    release = ".".join(version.split(".")[:2])
    program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{version}'\n")
    program.chmod(0o755)
    return program


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No nvcc is found but those that a test makes."""
    for name in ("CUDA_HOME", "CXX", "HEADS_KERNELS_CPU", "HEADS_KERNELS_CUDA", "HEADS_KERNELS_CUDA_ARCHITECTURES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(build, "TOOLKIT", str(tmp_path / "toolkit"))
    monkeypatch.setattr(build.sys, "path", [str(tmp_path / "site")])


def test_the_order_in_which_nvcc_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = compiler(tmp_path / "site" / "nvidia" / "cu13" / "bin", "13.2.1")
    assert build.find_nvcc() == (package, "13.2.1")
    installed = compiler(tmp_path / "toolkit" / "bin", "13.0.88")
    assert build.find_nvcc() == (installed, "13.0.88")
    on_path = compiler(tmp_path / "path", "13.1.0")
    assert build.find_nvcc() == (on_path, "13.1.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert build.find_nvcc() == (on_path, "13.1.0")  # it has none
    at_home = compiler(tmp_path / "home" / "bin", "12.8.93")
    assert build.find_nvcc() == (at_home, "12.8.93")
    monkeypatch.setenv("HEADS_KERNELS_CUDA", "0")
    assert build.find_nvcc() == (None, "HEADS_KERNELS_CUDA=0 left it out")


def test_no_nvcc_or_an_old_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc, missing = build.find_nvcc()
    assert nvcc is None
    assert missing.startswith("no nvcc in CUDA_HOME, PATH, ")
    old = compiler(tmp_path / "path", "12.6.77")
    assert build.find_nvcc() == (None, f"{old} is 12.6.77, older than 12.8")
    monkeypatch.setenv("HEADS_KERNELS_CUDA", "1")
    with pytest.raises(PlatformError, match=r"HEADS_KERNELS_CUDA=1.* older than 12\.8"):
        build.find_nvcc()


def test_no_kernels_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.cpu_missing() == ""
    monkeypatch.setenv("HEADS_KERNELS_CPU", "0")
    assert build.cpu_missing() == "HEADS_KERNELS_CPU=0 left all kernels out"
    assert build.find_nvcc() == (None, "HEADS_KERNELS_CPU=0 left all kernels out")
    monkeypatch.setenv("HEADS_KERNELS_CUDA", "1")
    with pytest.raises(PlatformError, match="but HEADS_KERNELS_CUDA=1 asks for the CUDA kernels"):
        build.cpu_missing()


def test_no_compiler_or_one_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message names what installs the package all the same."""
    with pytest.raises(PlatformError, match=r"no C\+\+ compiler 'g\+\+'.* HEADS_KERNELS_CPU=0 in"):
        build.cxx()
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    monkeypatch.chdir(Path(build.__file__).parent.parent)
    unit = build.Unit("dispatch", "csrc/cpu/dispatch.cpp", ["false"])
    with pytest.raises(CompileError, match=r"did not compile; .* HEADS_KERNELS_CPU=0 in"):
        build.build(tmp_path, "dispatch.so", [unit], [])
    monkeypatch.setattr(build.sys, "platform", "darwin")
    with pytest.raises(PlatformError, match=r"on Linux, not on darwin\. HEADS_KERNELS_CPU=0 in"):
        build.cxx()


def test_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(build.__file__).parent.parent)
    assert build.architectures() == [*build.ARCHITECTURES, "compute_80"]
    monkeypatch.setenv("HEADS_KERNELS_CUDA_ARCHITECTURES", "sm_90")
    assert build.architectures() == ["sm_90", "compute_80"]


def test_what_was_built_is_recorded() -> None:
    reported = hk.build_info()
    assert reported["version"] == hk.__version__
    assert "baseline" in reported["cpu"].get("levels", ["baseline"])
    assert reported["cpu"].keys() in ({"compiler", "levels"}, {"missing"})
    assert reported["cuda"].keys() in ({"nvcc", "architectures"}, {"missing"})
    reported.clear()
    assert hk.build_info()
