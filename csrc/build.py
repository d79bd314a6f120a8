"""Compiles the C++ and CUDA sources with ninja: which files, with which flags, for which machines.

Needs Linux and a C++17 compiler with OpenMP (`CXX`, else g++; `CXXFLAGS` are added to the flags
below); nvcc for the CUDA kernels; no torch, git, network or GPU. HEADS_KERNELS_CPU=0 needs nothing:
it builds no kernels.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import NamedTuple

from setuptools.errors import CompileError, PlatformError

COMMON = shlex.split("-std=c++17 -fPIC -fvisibility=hidden -Wall -Wextra -Icsrc")
CPU = shlex.split(
    "-O3 -fno-math-errno -fno-trapping-math -ffp-contract=fast -fopenmp "
    # Scheduling before register allocation (g++'s default on aarch64) spills the inner product.
    "-fno-schedule-insns"
)
AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mprefer-vector-width=512"
# Per architecture, the baseline first: the linker keeps the first copy of an inline function that
# several objects define, and that copy must run everywhere.
LEVELS = {
    "x86_64": {
        "baseline": "-O2",  # for processors without AVX2: two thirds of the size of -O3
        "avx2": "-mavx2 -mfma",
        "avx512": AVX512,
        # With products of bfloat16; they use the level HK_PLAIN for other dtypes.
        "avx512bf16": f"{AVX512} -mavx512bf16 -DHK_PLAIN=avx512",
        "amx": f"{AVX512} -mavx512bf16 -mamx-tile -mamx-bf16 -DHK_PLAIN=avx512",
    }
}
# The same in plain C++, so that the self test runs on machines without the instructions.
EMULATED_LEVELS = {"emulated": "-DHK_EMULATE_TILES -DHK_PLAIN=baseline"}
# libgomp is torch's own copy (by soname where torch is imported first), so that both share one
# thread pool and torch.set_num_threads applies.
LINK_CPU = ["-shared", "-s", "-fopenmp", "-Wl,-rpath,$ORIGIN/../torch/lib"]
# The module takes the kernels from the library beside it: with new tags a copy in a folder of
# LD_LIBRARY_PATH, perhaps of another version, would come first.
LINK_MODULE = shlex.split("-shared -s -Wl,--disable-new-dtags -Wl,-rpath,$ORIGIN")

# The architectures with machine code. sm_86 and sm_89 run that of sm_80: theirs would differ in a
# few conversions only, and take 25 % more time and space. All other GPUs from compute capability 8.0
# on compile the PTX, which suffices for every kernel and is the source of the machine code too.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
PTX = "compute_80"
TOOLKIT = "/usr/local/cuda"  # the installer's default
OLDEST_NVCC = (12, 8)  # knows sm_100 and -compress-mode
NVCC = shlex.split(
    "-std=c++17 -O3 -Icsrc --expt-relaxed-constexpr -compress-mode=size -Xcompiler -fPIC,-fvisibility=hidden,-Wall"
)
# The driver is loaded at the first launch, so the module imports on machines without one.
LINK_CUDA = shlex.split("-shared -s -lcudart_static -lrt -ldl -lpthread -Wl,--exclude-libs,ALL")
CHECKS = ["-DHK_CHECKS"]  # the checks of the wrappers, which only tests call
EMULATOR = Path("build/emulator")


# The error of a build that cannot continue.
NO_KERNELS = (
    "HEADS_KERNELS_CPU=0 in the environment installs the package without kernels for the CPU: it is "
    "slower there, and all of it works"
)


class Unit(NamedTuple):
    """An object: `name`.o of `source`, by a compiler and its flags."""

    name: str
    source: str
    compiler: list[str]


def cxx() -> list[str]:
    if sys.platform != "linux":
        raise PlatformError(f"the kernels for the CPU compile on Linux, not on {sys.platform}. {NO_KERNELS}.")
    words = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(words[0]) is None:
        raise PlatformError(f"no C++ compiler {words[0]!r}: install g++, or set CXX to another. {NO_KERNELS}.")
    return words


def cxx_flags() -> list[str]:
    return shlex.split(os.environ.get("CXXFLAGS", ""))


def python_includes() -> list[str]:
    import pybind11

    return ["-I", sysconfig.get_path("include"), "-I", pybind11.get_include()]


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def build(folder: Path, output: str, units: list[Unit], link: list[str], ready: Sequence[Path] = ()) -> Path:
    """Compile `units` in `folder` and link them to `output` there, before the libraries that are `ready`.

    Only changed units are compiled again, so do not delete `folder` between builds; outputs in it share objects.
    """

    def shell(words: list[str]) -> str:
        return shlex.join(words).replace("$", "$$")

    objects = " ".join([*(f"{folder}/{unit.name}.o" for unit in units), *map(str, ready)])
    lines = [
        f"builddir = {folder}",
        "rule compile",
        "  command = $compiler -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in: $out",
        "rule link",
        f"  command = {shell([*cxx(), *cxx_flags()])} $in -o $out {shell(link)}",
        "  description = link $out",
        *(
            f"build {folder}/{unit.name}.o: compile {unit.source}\n  compiler = {shell(unit.compiler)}"
            for unit in units
        ),
        f"build {folder}/{output}: link {objects}",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{output}.ninja").write_text("\n".join(lines) + "\n")
    ninja = [sys.executable, "-m", "ninja", "-f", f"{folder}/{output}.ninja"]
    if subprocess.run(ninja).returncode != 0:
        raise CompileError(f"the kernels did not compile; the compiler's message is above. {NO_KERNELS}.")
    return folder / output


# ---------------------------------------------------------------------- CPU
def cpu_missing() -> str:
    """Why no kernels are built for any processor; empty if they are.

    HEADS_KERNELS_CPU=0 leaves all kernels out: the wheel has no compiled code and is for any machine.
    """
    wanted = os.environ.get("HEADS_KERNELS_CPU", "")
    if wanted not in ("", "0", "1"):
        raise PlatformError(f"HEADS_KERNELS_CPU is {wanted!r}; it is 0, 1 or not set")
    if wanted != "0":
        return ""
    if os.environ.get("HEADS_KERNELS_CUDA") == "1":
        raise PlatformError(
            "HEADS_KERNELS_CPU=0 builds a package without compiled code, but HEADS_KERNELS_CUDA=1 asks "
            "for the CUDA kernels: leave one of them out"
        )
    return "HEADS_KERNELS_CPU=0 left all kernels out"


def levels() -> dict[str, str]:
    """Flags by level, for the compiler's target; with HK_BASELINE among the flags those of any target."""
    machine = output_of(*cxx(), "-dumpmachine").partition("-")[0]
    if "-DHK_BASELINE" in cxx_flags():
        machine = "any"
    return LEVELS.get(machine, {"baseline": ""})


def cpu_kernels(more_levels: dict[str, str]) -> list[Unit]:
    """csrc/cpu/, of which level.cpp is compiled once per ISA level."""
    compiler = [*cxx(), *COMMON, *CPU, *cxx_flags()]
    units = [Unit("dispatch", "csrc/cpu/dispatch.cpp", compiler)]
    for level, simd in (levels() | more_levels).items():
        own = [f"-DHK_LEVEL={level}", *simd.split()]
        units.append(Unit(f"level_{level}", "csrc/cpu/level.cpp", [*compiler, *own]))
    return units


def cpu_module(folder: Path) -> Path:
    """`heads_kernels._cpu`: the kernels of `ops_library` for Python. It links no libtorch itself."""
    compiler = [*cxx(), *COMMON, *CPU, *cxx_flags(), *python_includes()]
    bindings = Unit("bindings", "csrc/bindings/cpu.cpp", compiler)
    return build(folder, "_cpu.so", [bindings], LINK_MODULE, [ops_library(folder)])


def ops_library(folder: Path) -> Path:
    """`libheads_kernels.so`: the CPU kernels, and the ops for PyTorch without Python.

    It is linked with an empty library that has the name of PyTorch's: the loader looks there for what torch_abi.h
    declares, and refuses the library if a function is missing.
    """
    name = "libtorch_cpu.so"
    empty = ["-shared", f"-Wl,-soname,{name}", "-x", "c++", os.devnull]
    stub = build(folder / "stub", name, [], empty)
    compiler = [*cxx(), *COMMON, "-O2", *cxx_flags()]
    ops = Unit("ops", "csrc/bindings/torch.cpp", compiler)
    link = [*LINK_CPU, "-Wl,-soname,libheads_kernels.so", "-Wl,--no-as-needed", str(stub)]
    return build(folder, "libheads_kernels.so", [ops, *cpu_kernels({})], link)


def cpu_selftest(folder: Path) -> Path:
    """The program csrc/selftest.cpp: the kernels without Python."""
    compiler = [*cxx(), *COMMON, *CPU, *cxx_flags()]
    main = Unit("selftest", "csrc/selftest.cpp", compiler)
    return build(folder, "selftest", [main, *cpu_kernels(EMULATED_LEVELS)], ["-fopenmp"])


# ---------------------------------------------------------------------- CUDA
def cuda_kernels(compiler: list[str], checks: bool = False) -> list[Unit]:
    """csrc/cuda/; with `checks` the checks of its wrappers."""
    sources = sorted(glob("csrc/cuda/*.cu")) + ["csrc/selftest/wrapper_checks.cu"] * checks
    return [Unit(Path(source).stem, source, compiler) for source in sources]


def one_dtype(dtype: str) -> list[str]:
    """The flag for CUDA kernels of this dtype alone (bf16, fp16 or float), for tests; none for all."""
    return [f"-DHK_ONLY={dtype}"] if dtype else []


def cuda_module(folder: Path, nvcc: Path, dtype: str = "") -> Path:
    """`heads_kernels._cuda`. HEADS_KERNELS_CUDA_CHECKS=1 adds the checks of the wrappers, for tests on a GPU.

    With `dtype` the kernels of this dtype alone.
    """
    target = ["-ccbin", cxx()[0], f"-gencode=arch={PTX},code=[{','.join(architectures())}]"]
    compiler = [*cxx(), *COMMON, "-O2", *cxx_flags(), *python_includes()]
    checks = os.environ.get("HEADS_KERNELS_CUDA_CHECKS") == "1"
    only = one_dtype(dtype)
    units = [
        Unit("bindings", "csrc/bindings/cuda.cpp", [*compiler, *only, *CHECKS * checks]),
        *cuda_kernels([str(nvcc), *NVCC, *target, *only], checks=checks),
    ]
    return build(folder, "_cuda.so", units, [f"-L{runtime_of(nvcc)}", *LINK_CUDA])


def emulator() -> tuple[list[str], list[Unit]]:
    """The compiler command for emulated kernels, and the units of csrc/emulator/."""
    compiler = [*cxx(), *COMMON, "-O2", "-DHK_EMULATED", *cxx_flags()]
    sources = sorted(glob("csrc/emulator/*.cpp"))
    return compiler, [Unit(Path(source).stem, source, compiler) for source in sources]


def emulated_module(folder: Path, dtype: str = "") -> Path:
    """`heads_kernels._cuda_emulated`: the CUDA kernels in plain C++, run by csrc/emulator/.

    With `dtype` those of this dtype alone.
    """
    compiler, units = emulator()
    compiler = [*compiler, *one_dtype(dtype)]
    bindings = Unit("bindings", "csrc/bindings/cuda.cpp", [*compiler, *CHECKS, *python_includes()])
    kernels = cuda_kernels([*compiler, "-x", "c++"], checks=True)
    return build(folder, "_cuda_emulated.so", [*units, bindings, *kernels], ["-shared"])


def emulator_selftest(folder: Path, source: str = "emulator", headers: Sequence[Path] = ()) -> Path:
    """A program of csrc/selftest/: "emulator" tests the emulator, "cute" the layouts of the kernels against CuTe's.

    `headers` are the folders of what "cute" includes: CuTe's headers and those of CUDA.
    """
    compiler, units = emulator()
    includes = [word for path in headers for word in ("-isystem", str(path))]
    main = Unit("selftest", f"csrc/selftest/{source}.cpp", [*compiler, *includes])
    return build(folder, "selftest", [main, *units], [])


def architectures() -> list[str]:
    """HEADS_KERNELS_CUDA_ARCHITECTURES ("sm_90 sm_100") narrows them, for developers."""
    parts = os.environ.get("HEADS_KERNELS_CUDA_ARCHITECTURES", "").split() or ARCHITECTURES
    return [*parts, PTX]


def find_nvcc() -> tuple[Path | None, str]:
    """nvcc and its version, or None and why the CUDA kernels are not built.

    HEADS_KERNELS_CUDA=0 leaves them out, 1 requires them.
    """
    wanted = os.environ.get("HEADS_KERNELS_CUDA")
    if wanted == "0":
        return None, "HEADS_KERNELS_CUDA=0 left it out"
    if cpu_missing():
        return None, "HEADS_KERNELS_CPU=0 left all kernels out"
    nvcc = _first_nvcc()
    reported = output_of(nvcc, "--version") if nvcc else ""
    version = re.search(r"release (\d+)\.(\d+), V([\d.]+)", reported)
    if version is None:
        missing = (
            f"no nvcc in CUDA_HOME, PATH, {TOOLKIT} or PyPI's nvidia-cuda-nvcc "
            "(which a build in isolation does not see)"
        )
    elif (int(version[1]), int(version[2])) < OLDEST_NVCC:
        missing = f"{nvcc} is {version[3]}, older than {'.'.join(map(str, OLDEST_NVCC))}"
    else:
        return nvcc, version[3]
    if wanted == "1":
        raise PlatformError(f"HEADS_KERNELS_CUDA=1 asks for the CUDA kernels, but {missing}")
    return None, missing


def _first_nvcc() -> Path | None:
    """CUDA_HOME first, then PATH, then the toolkit's default folder, then this Python's site-packages."""
    home = os.environ.get("CUDA_HOME")
    folders = [f"{home}/bin"] if home else []
    folders += os.environ.get("PATH", os.defpath).split(os.pathsep)
    folders += [f"{TOOLKIT}/bin", *(f"{site}/nvidia/cu13/bin" for site in sys.path)]
    found = shutil.which("nvcc", path=os.pathsep.join(folders))
    return Path(found) if found else None


def runtime_of(nvcc: Path) -> Path:
    """The folder of libcudart_static.a."""
    run = subprocess.run([nvcc, "-dryrun", "-x", "cu", os.devnull], capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.+)$", run.stderr, re.MULTILINE)
    for pattern in ("lib64", "lib", "targets/*/lib"):
        for folder in sorted(Path(top[1]).glob(pattern)) if top else []:
            if (folder / "libcudart_static.a").exists():
                return folder
    raise PlatformError(f"no libcudart_static.a belongs to {nvcc}: install the CUDA runtime's headers and libraries")
