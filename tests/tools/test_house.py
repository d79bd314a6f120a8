"""The house: import directions, what an import loads, README examples, metadata, C++ includes."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from setuptools import Distribution

import heads_kernels as hk

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "heads_kernels"

# A part imports itself and the parts below it; those of the top layer may also import each other.
LAYERS = (
    {"errors", "flops", "build_info"},
    {"checks"},
    {"mask", "batch", "offset_bias"},
    {"problem"},
    {"dispatch"},
    {"ops"},
    {"functional"},
    {"nn", "convert", "heads", "integrations", "report", "testing"},
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
    if not own or own.startswith(
        "_"
    ):  # __init__ gathers the parts; _version and the like hold no code
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
            allowed = LAYER[other] < LAYER[own] or LAYER[own] == LAYER[other] == TOP
            assert allowed, f"{module} imports {imported}, which is not below it"


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


def test_import_needs_no_extra() -> None:
    """No optional package is loaded, beyond those that torch's own modules load (its FLOP counter: triton)."""
    code = (
        "import sys, torch.utils.flop_counter; before = set(sys.modules); "
        "import heads_kernels; print(*set(sys.modules) - before)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    modules = run.stdout.split()
    loaded = {name.split(".")[0] for name in modules}
    assert "heads_kernels" in loaded
    assert not loaded & OPTIONAL
    assert "torch._dynamo" not in modules  # longer to load than the package and half of PyTorch


# ---------------------------------------------------------------------- examples of the documentation
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def examples(document: Path) -> list[pytest.param]:
    text = document.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    headings = [
        re.findall(r"^#+ (.+)$", text[: block.start()], re.MULTILINE)[-1] for block in blocks
    ]
    return [
        pytest.param(
            document,
            block[1],
            text[: block.start()].count("\n") + 1,
            id=f"{document.stem}-{number}-{heading}",
        )
        for number, (block, heading) in enumerate(zip(blocks, headings, strict=True))
    ]


@pytest.mark.parametrize(
    ("document", "code", "line"),
    [example for document in DOCUMENTS for example in examples(document)],
)
def test_example_of_the_documentation_runs(
    document: Path, code: str, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # The blank lines make a traceback point at the line of the document.
    exec(compile("\n" * line + code, str(document), "exec"), {"__name__": "__main__"})


def test_readme_has_examples() -> None:
    assert len(examples(DOCUMENTS[0])) >= 6


# ---------------------------------------------------------------------- metadata
def test_version_is_told_once() -> None:
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert hk.__version__ == declared[1] == importlib.metadata.version("heads_kernels")
    assert f"## {declared[1]}" in (ROOT / "CHANGELOG.md").read_text()


def test_types_are_packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    project = Distribution({"src_root": str(ROOT)})
    project.parse_config_files(["pyproject.toml"])
    assert "py.typed" in project.package_data["heads_kernels"]
    assert (PACKAGE / "py.typed").exists()


def test_everything_public_is_there() -> None:
    assert sorted(hk.__all__) == hk.__all__
    for name in hk.__all__:
        assert hasattr(hk, name)


def test_no_address_of_an_index_or_machine() -> None:
    """Where packages come from is the business of the machine that installs them."""
    for name in (
        "pyproject.toml", "constraints.txt", "Makefile", "setup.py", "csrc/build.py", ".ci/run",
    ):  # fmt: skip
        text = (ROOT / name).read_text()
        assert "://" not in text, name
        assert "index-url" not in text, name


# ---------------------------------------------------------------------- csrc
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
