"""What may import or include what, and what `import heads_kernels` loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "heads_kernels"

#: A part imports itself and the parts above it in this list, never those beside or below it.
LAYERS = (
    {"checks", "flops", "build_info", "after_import"},
    {"doctor_record", "dtensor", "merge"},
    {"mask"},
    {"batch", "offset_bias"},
    {"problem"},
    {"dispatch"},
    {"ops"},
    {"functional"},
    {"nn"},
    {"heads"},
    {"analysis"},
    {"integrations"},
    {"convert"},
    {"testing"},
    {"report", "doctor"},
)
LAYER = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
TOP = len(LAYERS) - 1
#: `triton_forward` and `triton_tiles` are of one backend: the word before the first underscore.
BACKENDS = {"eager", "native", "triton", "cuda"}
#: What a user may not have: imported where it is used, never by `import heads_kernels`.
OPTIONAL = {
    "triton", "transformers", "tokenizers", "safetensors", "rich", "matplotlib", "psutil", "pytest",
    "hypothesis", "expecttest", "benchmarks", "tests",
}  # fmt: skip


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
#: By the one kind of module that imports it.
EXTENSIONS = {"_cpu": "native", "_cuda": "cuda", "_cuda_emulated": "cuda"}


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, also inside functions.

    `from package import submodule` gives the submodule.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: line {node.lineno} is a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = {*SOURCES, *(f"heads_kernels.{name}" for name in EXTENSIONS)}
            yield from (name if name in modules else str(node.module) for name in names)


def part(module: str) -> str:
    """`heads_kernels.ops.gate` is in the part "ops"; the package itself is in ""."""
    return [*module.split("."), ""][1]


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_one_way(module: str) -> None:
    own = part(module)
    if not own or own.startswith("_"):  # __init__ gathers the parts, __main__ runs them
        return
    assert own in LAYER, f"{module} is a new part of the package: give it a place in LAYERS"
    for imported in imports(SOURCES[module]):
        if imported.split(".")[0] != "heads_kernels" or part(imported) == own:
            continue
        other = part(imported)
        if other in EXTENSIONS:
            assert module.endswith(f".{EXTENSIONS[other]}"), (
                f"{module} imports {imported}; only {EXTENSIONS[other]} backends do"
            )
        elif not other:
            assert LAYER[own] == TOP, f"{module} imports the package, which imports it"
        else:
            assert LAYER[other] < LAYER[own], f"{module} imports {imported}: see LAYERS"


@pytest.mark.parametrize("module", [name for name in SOURCES if part(name) == "ops"])
def test_backends_do_not_import_their_siblings(module: str) -> None:
    folder, _, stem = module.rpartition(".")
    own = stem.split("_")[0]
    for imported in imports(SOURCES[module]):
        package, _, name = imported.rpartition(".")
        backend = name.split("_")[0]
        if package == folder and backend in BACKENDS:
            assert own == backend, (
                f"{module} imports {imported}; a backend is loaded by name, when an op runs"
            )


@pytest.mark.parametrize("module", SOURCES)
def test_only_triton_modules_import_triton(module: str) -> None:
    if any(word.split("_")[0] == "triton" for word in module.split(".")):
        return
    for imported in imports(SOURCES[module]):
        parts = imported.split(".")
        assert "triton" not in (parts[0], *parts[2:]), (
            f"{module} imports {imported}; Triton is loaded when an op runs on it"
        )


@pytest.mark.parametrize("module", SOURCES)
def test_package_stands_without_its_tests_and_benchmarks(module: str) -> None:
    roots = {name.split(".")[0] for name in imports(SOURCES[module])}
    assert not roots & {"tests", "benchmarks"}
    if part(module) == "mask":
        assert roots <= {"torch", "heads_kernels"} | sys.stdlib_module_names


def loaded_by(code: str) -> set[str]:
    """The modules that `code` loads beyond those of `import torch`, in a process of its own."""
    parts = (
        "import sys, torch; before = set(sys.modules)",
        code,
        "print(*set(sys.modules) - before)",
    )
    run = subprocess.run(
        [sys.executable, "-c", "; ".join(parts)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return set(run.stdout.split())


def test_import_needs_no_extra() -> None:
    """The operators are loaded, and neither the parts around them nor a slow module of torch."""
    modules = loaded_by("import heads_kernels")
    assert "heads_kernels.functional" in modules
    assert not {name.split(".")[0] for name in modules} & OPTIONAL
    parts = {part(name) for name in modules if name.startswith("heads_kernels.")}
    assert not parts & {"analysis", "convert", "heads", "nn", "report", "testing"}
    # The first loads Triton; the second takes longer than the package and half of PyTorch.
    assert not modules & {"torch.utils.flop_counter", "torch._dynamo"}


def test_all_that_is_public_needs_no_extra() -> None:
    modules = loaded_by("import heads_kernels as hk; [getattr(hk, name) for name in dir(hk)]")
    assert {f"heads_kernels.{name}" for name in ("analysis", "convert", "nn")} <= modules
    assert not {name.split(".")[0] for name in modules} & OPTIONAL


def test_only_bindings_know_python() -> None:
    """The kernels are plain C++: no libtorch anywhere, Python in bindings/ alone."""
    files = [
        path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".cpp", ".h", ".cu", ".cuh"}
    ]
    assert files
    for path in files:
        included = set(
            re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', path.read_text(), re.MULTILINE)
        )
        roots = {name.split("/")[0] for name in included}
        assert not roots & {"torch", "ATen", "c10"}, path
        if path.parent.name != "bindings":
            assert not roots & {"pybind11", "Python.h"}, path
