"""Builds `heads_kernels._cpu`, the library of ops beside it, and `heads_kernels._cuda` where there is nvcc, from csrc/
by csrc/build.py.

HEADS_KERNELS_CUDA=0 leaves the CUDA kernels out, 1 fails without nvcc. What was built stands in
heads_kernels/build.json. The rest of the package is in pyproject.toml.
"""

import json
import os
import shutil
import sys
from glob import glob
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT))

from csrc import build  # noqa: E402

PACKAGE = "heads_kernels"
LIBRARY = f"{PACKAGE}.libheads_kernels"


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
        (folder / "build.json").write_text(json.dumps(self.information(), indent=1) + "\n")

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

    def information(self) -> dict[str, object]:
        """What `heads_kernels.build_info` returns."""
        cuda = {"nvcc": self.cuda, "architectures": build.architectures()}
        return {
            "version": self.distribution.get_version(),
            "commit": commit(),
            "cpu": {
                "compiler": build.output_of(*build.cxx(), "--version").partition("\n")[0],
                "levels": list(build.levels()),
            },
            "cuda": cuda if self.nvcc else {"missing": self.cuda},
        }


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
        top, head = build.output_of(
            "git", "-C", ROOT, "rev-parse", "--show-toplevel", "HEAD"
        ).split()
    except (OSError, ValueError):  # no git, or no checkout
        return None
    return head if Path(top) == ROOT else None


class SelfTest(Command):
    """`setup.py selftest --into FOLDER`: the CPU kernels without Python; with `--emulator` the emulator."""

    description = "build a program that tests without Python"
    user_options = [  # noqa: RUF012 (setuptools' own form)
        ("into=", None, "folder of the program"),
        ("emulator", None, "of the emulator of CUDA, not of the CPU kernels"),
    ]

    def initialize_options(self) -> None:
        self.into = "build/selftest"
        self.emulator = False

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        (build.emulator_selftest if self.emulator else build.cpu_selftest)(Path(self.into))


class Emulator(Command):
    """`setup.py emulator`: `heads_kernels._cuda_emulated` in place, for tests without a GPU."""

    description = "build the CUDA kernels for the emulator"
    user_options = [  # noqa: RUF012
        ("into=", None, "folder of the module, in place of the package's"),
        ("dtype=", None, "the one whose kernels are compiled: bf16, fp16 or float; default all"),
    ]

    def initialize_options(self) -> None:
        self.into = ""
        self.dtype = ""

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        name = self.get_finalized_command("build_ext").get_ext_filename("_cuda_emulated")
        module = build.emulated_module(Path(self.into or build.EMULATOR), self.dtype)
        install(module, Path(self.into or PACKAGE, name))


headers = sorted(glob("csrc/**/*.h", recursive=True))
setup(
    ext_modules=[
        Extension(f"{PACKAGE}._cpu", sorted(glob("csrc/cpu/*.cpp")), depends=headers),
        Extension(LIBRARY, sorted(glob("csrc/cpu/*.cpp")), depends=headers),
        Extension(f"{PACKAGE}._cuda", sorted(glob("csrc/cuda/*.cu")), depends=headers),
    ],
    cmdclass={"build_ext": BuildModules, "selftest": SelfTest, "emulator": Emulator},
)
