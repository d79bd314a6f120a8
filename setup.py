"""Builds `heads_kernels._cpu` from csrc/ with ninja; the rest of the package is in pyproject.toml.

csrc/cpu/level.cpp and pair_level.cpp are compiled once per instruction-set level of the target;
dispatch.cpp picks one at run time. Needs a C++17 compiler with OpenMP (`CXX`, else g++; `CXXFLAGS`
are added to the flags below), and no torch, git, network or GPU.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError

FLAGS = shlex.split(
    "-std=c++17 -O3 -fno-math-errno -fno-trapping-math -ffp-contract=fast -fopenmp -fPIC "
    "-fvisibility=hidden -Wall -Wextra -Icsrc "
    # Scheduling before registers are given out (g++'s default on aarch64) spills the inner product.
    "-fno-schedule-insns"
)
AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mprefer-vector-width=512"
# Per machine, the plainest level first: of an inline function that several objects hold, the linker
# keeps the first copy, and that one must run everywhere.
LEVELS = {
    "x86_64": {"baseline": "", "avx2": "-mavx2 -mfma", "avx512": AVX512},
}
# Levels with products of bfloat16; all else is that of the level HK_PLAIN.
PAIR_LEVELS = {
    "x86_64": {
        "avx512bf16": f"{AVX512} -mavx512bf16 -DHK_PLAIN=avx512",
        "amx": f"{AVX512} -mavx512bf16 -mamx-tile -mamx-bf16 -DHK_PLAIN=avx512",
    }
}
# The same in plain C++, for the self test: it runs where the instructions do not.
EMULATED = {"emulated": "-DHK_EMULATE_TILES -DHK_PLAIN=baseline"}
KERNELS = sorted(glob("csrc/cpu/*.cpp"))
# libgomp is torch's own copy (by soname where torch is imported first), so that one pool of threads
# serves both and torch.set_num_threads holds.
LINK_MODULE = ["-shared", "-Wl,-rpath,$ORIGIN/../torch/lib"]


def build(
    folder: Path,
    output: str,
    main: str,
    main_flags: list[str],
    link: list[str],
    more_levels: dict[str, str],
) -> Path:
    """Compile `main` (with its own flags) and the kernels in `folder`; link them to `output` there.

    `more_levels` are of pair_level.cpp, with their flags. Only what changed is compiled again, so
    `folder` is kept between builds.
    """
    cxx = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(cxx[0]) is None:
        raise PlatformError(f"no C++ compiler {cxx[0]!r}: install g++, or set CXX to another")
    target = subprocess.run([*cxx, "-dumpmachine"], capture_output=True, text=True).stdout
    machine = target.partition("-")[0]
    levels = {
        "level": LEVELS.get(machine, {"baseline": ""}),
        "pair_level": PAIR_LEVELS.get(machine, {}) | more_levels,
    }
    flags = shlex.split(os.environ.get("CXXFLAGS", ""))

    units = [(Path(main).stem, main, main_flags)]  # (object, source, flags of its own)
    for source in KERNELS:
        stem = Path(source).stem
        if stem not in levels:
            units.append((stem, source, []))
        for level, simd in levels.get(stem, {}).items():
            units.append((f"level_{level}", source, [f"-DHK_LEVEL={level}", *simd.split()]))

    def shell(*words: str) -> str:
        return shlex.join(words).replace("$", "$$")

    objects = " ".join(f"{folder}/{name}.o" for name, _, _ in units)
    lines = [
        f"builddir = {folder}",
        "rule compile",
        f"  command = {shell(*cxx, *FLAGS, *flags)} $own -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in $level",
        "rule link",
        f"  command = {shell(*cxx, *flags)} $in -o $out {shell('-fopenmp', *link)}",
        "  description = link $out",
        *(
            f"build {folder}/{name}.o: compile {source}\n  own = {shell(*own)}\n  level = {name}"
            for name, source, own in units
        ),
        f"build {folder}/{output}: link {objects}",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").write_text("\n".join(lines) + "\n")
    ninja = [sys.executable, "-m", "ninja", "-f", f"{folder}/build.ninja"]
    if subprocess.run(ninja).returncode != 0:
        raise CompileError("the C++ kernels did not compile; the compiler's message is above")
    return folder / output


class BuildModule(build_ext):
    def build_extension(self, ext: Extension) -> None:
        import pybind11

        includes = ["-I", sysconfig.get_path("include"), "-I", pybind11.get_include()]
        folder = Path("build", f"{ext.name}-{sys.implementation.cache_tag}-{self.plat_name}")
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(build(folder, "_cpu.so", ext.sources[0], includes, LINK_MODULE, {}), target)


class SelfTest(Command):
    """`setup.py selftest --into FOLDER`: csrc/selftest.cpp and the kernels, without Python."""

    description = "build csrc/selftest.cpp with the kernels"
    user_options = [("into=", None, "folder of the program")]  # noqa: RUF012 (setuptools' own form)

    def initialize_options(self) -> None:
        self.into = "build/selftest"

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        build(Path(self.into), "selftest", "csrc/selftest.cpp", [], [], EMULATED)


headers = sorted(glob("csrc/**/*.h", recursive=True))
module = Extension("heads_kernels._cpu", ["csrc/bindings.cpp", *KERNELS], depends=headers)
setup(ext_modules=[module], cmdclass={"build_ext": BuildModule, "selftest": SelfTest})
