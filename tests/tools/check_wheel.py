"""What a wheel holds, and what it does where torch is all that is installed besides: `python check_wheel.py WHEEL`.

For the Python that the wheel is installed in; needs no compiler, nvcc, GPU or pytest. `make test-wheel` and every
build of a release run it. What the build wrote down says which kernels are in it: those for the CPU and for CUDA, those
for the CPU, or none.
"""

import json
import os
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import torch
from torch._subclasses import FakeTensorMode

import heads_kernels as hk
from heads_kernels import testing

PACKAGE = Path(__file__).parents[2] / "heads_kernels"
CPU, CUDA = ("_cpu", "libheads_kernels"), ("_cuda",)
BUILT = hk.build_info()
MODULES = CPU * ("levels" in BUILT["cpu"]) + CUDA * ("nvcc" in BUILT["cuda"])
BACKEND = "cpu" if MODULES else "eager"  # of tensors on the CPU
#: Bytes of a wheel by the number of its modules: 10 % more than they were, but for the CUDA kernels.
LARGEST = {0: 0.6e6, 2: 2.4e6, 3: 12e6}[len(MODULES)]
#: Where a module looks for the libraries that it is linked with: _cpu beside itself, the library in torch's folder.
PLACES = {"_cpu": b"$ORIGIN\0", "libheads_kernels": b"$ORIGIN/../torch/lib"}
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
        assert json.loads(archive.read("heads_kernels/build.json")) == BUILT
        modules = {Path(name).name.split(".")[0]: name for name in names if name.endswith(".so")}
        assert sorted(modules) == sorted(MODULES), modules
        for name in set(MODULES) & set(PLACES):
            assert PLACES[name] in archive.read(modules[name]), "the repair took the path of " + name
    held = {name for name in names if ".dist-info/" not in name} - set(modules.values())
    assert held == wanted, sorted(held ^ wanted)
    assert ("manylinux" if MODULES else "py3-none-any") in wheel.name, wheel.name
    size = wheel.stat().st_size
    assert size < LARGEST, f"{size} bytes"
    return f"{wheel.name}: {size / 1e6:.2f} MB, {BUILT}"


def is_what_runs(wheel: Path) -> str:
    """The package comes from the wheel, not from the tree."""
    name, version = wheel.name.split("-")[:2]
    place = Path(hk.__file__).parent
    assert place != PACKAGE
    assert name == place.name
    assert hk.build_info()["version"] == hk.__version__ == version
    return f"{place}, Python {sys.version.split()[0]}, torch {torch.__version__}"


def is_accurate() -> str:
    """Both operators, forward and backward, on CPU tensors against eager in float64."""
    reports = [
        testing.check(testing.find(operator, case), dtype, BACKEND)
        for operator, case in OPERATORS.items()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for report in reports:
        assert report.ok, report
    worst = max(report.ratio for report in reports)
    return f"{BACKEND}, {worst:.2f} of the bound at the worst"


def explains(device: str) -> hk.Choice:
    with FakeTensorMode():
        query = torch.empty(2, 4, 16, 32, device=device)
        return hk.explain(hk.gated_attention, query, query, query)


def serves_cpu_tensors() -> str:
    choice = explains("cpu")
    assert choice.backend == BACKEND, choice
    for name in {"cpu", "cuda"} - {BACKEND}:
        built = (CPU if name == "cpu" else CUDA)[0] in MODULES
        assert built or "was not built" in choice.refusals[name][0], choice
    return str(choice)


def warns_once_without_kernels() -> str:
    """The first call of any operator on the CPU, and no other one."""
    query = torch.randn(1, 2, 4, 8)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for operator in (hk.gated_attention, hk.entmax_attention):
            operator(query, query, query)
    texts = [str(each.message) for each in found]
    assert len(texts) == (not MODULES), texts
    assert all("HEADS_KERNELS_CPU=0 left all kernels out" in text for text in texts), texts
    return "\n".join(texts) or "no warning"


def answers_cuda_tensors() -> str:
    """The extension is asked, if it is there; without a driver or a GPU it says so in words."""
    choice = explains("cuda:0")
    assert choice.backend is not None, choice
    (reason,) = choice.refusals.get("cuda", [""])
    assert ("not built" in reason) == ("_cuda" not in MODULES), choice
    if "_cuda" in MODULES and not Path("/dev/nvidia0").exists():
        assert "driver" in reason or "GPU" in reason, choice
    return str(choice)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def shares_the_pool() -> str:
    """torch's OpenMP is the only one, and `torch.set_num_threads` holds: no call starts threads of its own."""
    place = Path(torch.__file__).parent / "lib"
    torch.set_num_threads(5)
    torch.zeros(1 << 20).exp()
    started = threads()
    query = torch.randn(2, 8, 256, 64)
    hk.gated_attention(query, query, query, backend="cpu")
    assert threads() == started >= 5, f"{started} threads, then {threads()}"
    lines = Path("/proc/self/maps").read_text().splitlines()
    (library,) = {Path(line.split()[-1]).resolve() for line in lines if "libgomp" in line}
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
    of_any = (warns_once_without_kernels, is_accurate, serves_cpu_tensors, answers_cuda_tensors)
    of_kernels = (shares_the_pool, loads_without_the_package)
    for check in of_any + of_kernels * bool(MODULES):
        print(check())


if __name__ == "__main__":
    main()
