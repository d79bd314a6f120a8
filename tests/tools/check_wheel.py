"""What a wheel holds, and what it does where torch is all that is installed besides: `python check_wheel.py WHEEL`.

For the Python that the wheel is installed in; needs no compiler, nvcc, GPU or pytest. `make test-wheel` and every build
of a release run it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from torch._subclasses import FakeTensorMode

import heads_kernels as hk
from heads_kernels import _cpu, testing

PACKAGE = Path(__file__).parents[2] / "heads_kernels"
MODULES = ("_cpu", "_cuda", "libheads_kernels")
LARGEST = 15e6  # bytes
POOL = b"$ORIGIN/../torch/lib"  # where _cpu and the library of ops look for OpenMP and torch
OPERATORS = {"gated_attention": "closed_heads", "collaborative_attention": "ragged_bias"}


def built(path: Path) -> bool:
    return path.suffix in {".so", ".pyc"} or path.name == "build.json"


def holds_the_package(wheel: Path) -> str:
    """Every file of the package, the modules and what the build wrote down; no more, no library of others."""
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and not built(path)]
    wanted = {path.relative_to(PACKAGE.parent).as_posix() for path in files}
    wanted.add("heads_kernels/build.json")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        information = json.loads(archive.read("heads_kernels/build.json"))
        linked = [
            archive.read(name) for name in names if re.search(r"/(_cpu|libheads).*\.so$", name)
        ]
    held = {name for name in names if ".dist-info/" not in name}
    modules = {name for name in held if name.endswith(".so")}
    assert sorted(name.split("/")[-1].split(".")[0] for name in modules) == list(MODULES), modules
    assert held - modules == wanted, sorted((held - modules) ^ wanted)
    assert "manylinux" in wheel.name, wheel.name
    assert all(POOL in each for each in linked), "the repair took the path to torch's libraries"
    size = wheel.stat().st_size
    assert size < LARGEST, f"{size} bytes"
    return f"{wheel.name}: {size / 1e6:.2f} MB, {information}"


def is_what_runs(wheel: Path) -> str:
    """The package comes from the wheel, not from the tree."""
    name, version = wheel.name.split("-")[:2]
    place = Path(hk.__file__).parent
    assert place != PACKAGE
    assert name == place.name
    assert hk.build_info()["version"] == hk.__version__ == version
    return f"{place}, Python {sys.version.split()[0]}, torch {torch.__version__}"


def is_accurate() -> str:
    """Both operators, forward and backward, on the CPU kernels against eager."""
    reports = [
        testing.check(testing.find(operator, case), dtype, "cpu")
        for operator, case in OPERATORS.items()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for report in reports:
        assert report.ok, report
    worst = max(report.ratio for report in reports)
    return f"level {_cpu.level()}, {worst:.2f} of the bound at the worst"


def explains(device: str) -> hk.Choice:
    with FakeTensorMode():
        query = torch.empty(2, 4, 16, 32, device=device)
        return hk.explain(hk.gated_attention, query, query, query)


def serves_cpu_tensors() -> str:
    choice = explains("cpu")
    assert choice.backend == "cpu", choice
    assert choice.refusals["cuda"] == ["tensors are on cpu; it serves CUDA tensors"], choice
    return str(choice)


def answers_cuda_tensors() -> str:
    """The extension is there and is asked; without a driver or a GPU it says so in words."""
    choice = explains("cuda:0")
    assert choice.backend is not None, choice
    (reason,) = choice.refusals.get("cuda", [""])
    assert "not built" not in reason, choice
    if not Path("/dev/nvidia0").exists():
        assert "driver" in reason or "GPU" in reason, choice
    return str(choice)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def openmp() -> set[Path]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split()[-1]).resolve() for line in lines if "libgomp" in line}


def shares_the_pool() -> str:
    """torch's OpenMP is the only one, and `torch.set_num_threads` holds: no call starts threads of its own."""
    place = Path(torch.__file__).parent / "lib"
    torch.set_num_threads(5)
    torch.zeros(1 << 20).exp()
    started = threads()
    query = torch.randn(2, 8, 256, 64)
    hk.gated_attention(query, query, query, backend="cpu")
    assert threads() == started >= 5, f"{started} threads, then {threads()}"
    (library,) = openmp()
    assert library.parent == place, library
    return f"{started} threads, {library}"


def loads_without_the_package() -> str:
    """The library of ops, in a process that does not import the package."""
    library = hk.integrations.cpp.library_path()
    code = f"import torch; torch.ops.load_library({str(library)!r}); print(torch.ops.heads_kernels.attention)"
    run = [sys.executable, "-c", code]
    return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    (wheel,) = map(Path, sys.argv[1:])
    print(holds_the_package(wheel))
    print(is_what_runs(wheel))
    for check in (
        is_accurate,
        serves_cpu_tensors,
        answers_cuda_tensors,
        shares_the_pool,
        loads_without_the_package,
    ):
        print(check())


if __name__ == "__main__":
    main()
