"""Builds `heads_kernels._cpu`, the library beside it, which has the kernels, and `heads_kernels._cuda` where there is
nvcc, from csrc/ by csrc/build.py.

HEADS_KERNELS_CUDA=0 leaves the CUDA kernels out, 1 fails without nvcc. HEADS_KERNELS_CPU=0 leaves all kernels out: the
wheel is for any machine (py3-none-any). What was built stands in heads_kernels/build.json. The rest of the package is
in pyproject.toml.
"""

import json
import os
import shutil
import sys
from glob import glob
from pathlib import Path

from setuptools import Command, Distribution, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT))

from csrc import build, hub  # noqa: E402

PACKAGE = "heads_kernels"
LIBRARY = f"{PACKAGE}.libheads_kernels"
MISSING = build.cpu_missing()  # why there is nothing to compile; empty where there is


class BuildModules(build_ext):
    """The modules and the library, and build.json beside them."""

    def run(self) -> None:
        self.nvcc, self.cuda = build.find_nvcc()
        if self.nvcc is None:
            print(f"{PACKAGE} without its CUDA kernels: {self.cuda}", file=sys.stderr)
            (left_out,) = (ext for ext in self.extensions if ext.name == f"{PACKAGE}._cuda")
            self.extensions.remove(left_out)
            # Remove the module of an earlier build.
            Path(self.get_ext_fullpath(left_out.name)).unlink(missing_ok=True)
        super().run()
        package = self.get_finalized_command("build_py").get_package_dir(PACKAGE)
        folder = Path(package) if self.inplace else Path(self.build_lib, PACKAGE)
        write_information(folder, self.distribution, self.nvcc, self.cuda)

    def build_extension(self, ext: Extension) -> None:
        if ext.name == f"{PACKAGE}._cuda":
            module = build.cuda_module(Path("build/cuda"), self.nvcc)
        elif ext.name == LIBRARY:
            module = build.ops_library(Path("build/cpu"))
        else:
            module = build.cpu_module(Path("build/cpu"))
        install(module, Path(self.get_ext_fullpath(ext.name)))

    def get_ext_filename(self, fullname: str) -> str:
        """The library is no module: its name says nothing about Python."""
        name = super().get_ext_filename(fullname)
        is_library = fullname.rpartition(".")[2] == LIBRARY.rpartition(".")[2]
        return str(Path(name).with_name("libheads_kernels.so")) if is_library else name


class BuildPython(build_py):
    """The files of Python; without any kernels build.json too, and no module of an earlier build."""

    def run(self) -> None:
        super().run()
        if not MISSING:
            return
        package = self.get_package_dir(PACKAGE)
        folder = Path(package) if self.editable_mode else Path(self.build_lib, PACKAGE)
        for module in [
            *folder.glob("_cpu.*.so"),
            *folder.glob("_cuda.*.so"),
            *folder.glob("lib*.so"),
        ]:
            module.unlink()
        write_information(folder, self.distribution, *build.find_nvcc())


def write_information(folder: Path, package: Distribution, nvcc: Path | None, cuda: str) -> None:
    """build.json: what `heads_kernels.build_info` returns."""
    cpu = {"missing": MISSING}
    if not MISSING:
        compiler = build.output_of(*build.cxx(), "--version").partition("\n")[0]
        cpu = {"compiler": compiler, "levels": list(build.levels())}
    information = {
        "version": package.get_version(),
        "commit": commit(),
        "cpu": cpu,
        "cuda": {"nvcc": cuda, "architectures": build.architectures()} if nvcc else {"missing": cuda},
    }
    (folder / "build.json").write_text(json.dumps(information, indent=1) + "\n")


def install(module: Path, target: Path) -> None:
    """Replace the module atomically: a running process keeps the old one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_suffix(".new")
    shutil.copy2(module, new)
    new.replace(target)


def commit() -> str | None:
    """HEADS_KERNELS_COMMIT, or the commit checked out here, or None."""
    if given := os.environ.get("HEADS_KERNELS_COMMIT"):
        return given
    try:
        top, head = build.output_of("git", "-C", ROOT, "rev-parse", "--show-toplevel", "HEAD").split()
    except (OSError, ValueError):  # no git, or no checkout
        return None
    return head if Path(top) == ROOT else None


class IntoFolder(Command):
    """A command that writes a folder, which `--into` names."""

    user_options = [("into=", None, "the folder")]  # noqa: RUF012 (setuptools' own form)
    folder = ""  # without --into

    def initialize_options(self) -> None:
        self.into = self.folder

    def finalize_options(self) -> None:
        pass


class SelfTest(IntoFolder):
    """`setup.py selftest --into FOLDER`: the CPU kernels without Python; with `--emulator` the emulator."""

    description = "build a program that tests without Python"
    user_options = [  # noqa: RUF012
        *IntoFolder.user_options,
        ("emulator", None, "of the emulator of CUDA, not of the CPU kernels"),
    ]
    folder = "build/selftest"

    def initialize_options(self) -> None:
        super().initialize_options()
        self.emulator = False

    def run(self) -> None:
        (build.emulator_selftest if self.emulator else build.cpu_selftest)(Path(self.into))


class Emulator(IntoFolder):
    """`setup.py emulator`: `heads_kernels._cuda_emulated` in place, for tests without a GPU."""

    description = "build the CUDA kernels for the emulator"
    user_options = [  # noqa: RUF012
        *IntoFolder.user_options,
        ("dtype=", None, "the one whose kernels are compiled: bf16, fp16 or float; default all"),
    ]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.dtype = ""

    def run(self) -> None:
        name = self.get_finalized_command("build_ext").get_ext_filename("_cuda_emulated")
        module = build.emulated_module(Path(self.into or build.EMULATOR), self.dtype)
        install(module, Path(self.into or PACKAGE, name))


class Cuda(Emulator):
    """`setup.py cuda --into FOLDER`: what nvcc makes of the CUDA kernels, for tests; nothing where there is none."""

    description = "build the CUDA kernels in a folder, where there is nvcc"
    folder = "build/cuda"

    def run(self) -> None:
        nvcc, missing = build.find_nvcc()
        if nvcc is None:
            print(f"no CUDA kernels in {self.into}: {missing}", file=sys.stderr)
        else:
            build.cuda_module(Path(self.into), nvcc, self.dtype)


class Hub(IntoFolder):
    """`setup.py hub`: the operators as a kernel for Hugging Face's Kernel Hub."""

    description = "write the folder of the Kernel Hub"
    folder = "build/hub"

    def run(self) -> None:
        hub.write(Path(self.into), self.distribution.get_version(), commit() or "0" * 7)


headers = sorted(glob("csrc/**/*.h", recursive=True))
sources = {
    "_cpu": "csrc/cpu/*.cpp",
    LIBRARY.rpartition(".")[2]: "csrc/cpu/*.cpp",
    "_cuda": "csrc/cuda/*.cu",
}
setup(
    ext_modules=[
        Extension(f"{PACKAGE}.{name}", sorted(glob(files)), depends=headers)
        for name, files in sources.items()
        if not MISSING
    ],
    cmdclass={
        "build_py": BuildPython,
        "build_ext": BuildModules,
        "selftest": SelfTest,
        "emulator": Emulator,
        "cuda": Cuda,
        "hub": Hub,
    },
)
