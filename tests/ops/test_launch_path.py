"""Triton's launcher passes every argument of every kernel to the parameter of its PTX that it is meant for.

Kernels are compiled for sm_90 and launched on a driver that records the launch (`tests/support/stub_driver.c`), so no
GPU is needed: what ahead-of-time compiling does not see are nested tuples of operands, arguments that are None or 1,
and the sizes of a launch.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

import heads_kernels.ops
from heads_kernels.backends import TRITON_INTERPRETED

triton = pytest.importorskip("triton", reason="pip install 'heads_kernels[triton]'")
if TRITON_INTERPRETED:
    pytest.skip("kernels are interpreted (TRITON_INTERPRET)", allow_module_level=True)

from triton.runtime.jit import JITFunction  # noqa: E402 (needs triton)

from heads_kernels.ops.triton.backend import HAS_ADDING_COPIES  # noqa: E402 (needs triton)
from tests.ops.test_ahead_of_time import works  # noqa: E402 (needs triton)
from tests.support.commands import ROOT, python  # noqa: E402 (needs triton)

pytestmark = pytest.mark.check

STUB = ROOT / "tests" / "support" / "stub_driver.c"

#: Together they launch every kernel, with every kind of operand.
WORKS = works(", D 64", features="causal") + works(", D 64", features="bias")
WORKS += works(", D 64", features="lengths") + works("offsets, causal, Ds 256", "grouped heads, Ds 256")
WORKS += works(": D 64", ": Ds 256") + works(": decoding, D 128", ": decoding, Ds 256")


def compiler() -> str | None:
    """As Triton finds the one that it builds its own part of the driver with."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def kernels() -> set[str]:
    """Those that the package's launchers start: every other function in Triton's language is called by one."""
    found: set[str] = set()
    for module in pkgutil.walk_packages(heads_kernels.ops.__path__, "heads_kernels.ops."):
        if "triton" in module.name:
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, JITFunction) and name.endswith("_kernel"):
                    found.add(f"{value.fn.__module__}.{name}")
    if not HAS_ADDING_COPIES:  # without the backward kernel in Gluon, and what it alone needs
        alone = (".gluon_backward.", ".visible._ranges_kernel")
        found = {name for name in found if not any(each in name for each in alone)}
    return found


def test_every_argument_arrives(tmp_path: Path, kernel_cache: Path) -> None:
    if (cc := compiler()) is None:
        pytest.skip("no C compiler: gcc or clang in PATH, or CC")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        pytest.skip("no Python.h, which Triton builds its part of the driver with")
    library = tmp_path / "libcuda.so.1"
    options = shlex.split("-O1 -fPIC -shared -Wall -Wextra -Wl,-soname,libcuda.so.1")
    subprocess.run([*shlex.split(cc), *options, "-o", str(library), str(STUB)], check=True)
    (tmp_path / "libcuda.so").symlink_to(library)
    # Another test may be compiling the same kernels, from the first work on: each finds what the other has done.
    names = [work.name for work in reversed(dict.fromkeys(WORKS))]
    folders = {"TRITON_LIBCUDA_PATH": str(tmp_path), "TRITON_CACHE_DIR": str(kernel_cache)}
    run = python("-m", "tests.support.launch_path", library, *names, **folders)
    assert set(run.stdout.split()) == kernels()
