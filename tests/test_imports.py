"""What `import heads_kernels` loads, and what C++ files include; `make lint` checks what Python modules import."""

from __future__ import annotations

import re

from tests.support.commands import ROOT, python

#: What a user may not have: imported where it is used, never by `import heads_kernels`.
OPTIONAL = {
    "triton", "transformers", "tokenizers", "safetensors", "rich", "jinja2", "matplotlib", "psutil",
    "pytest", "hypothesis", "expecttest", "benchmarks", "tests",
}  # fmt: skip


def loaded_by(code: str) -> set[str]:
    """The modules that `code` loads beyond those of `import torch`, in a process of its own."""
    code = (
        f"import sys, torch; before = set(sys.modules); {code}; print(*set(sys.modules) - before)"
    )
    return set(python("-c", code).stdout.split())


def test_import_needs_no_extra() -> None:
    """The operators are loaded, and neither the parts around them nor a slow module of torch."""
    modules = loaded_by("import heads_kernels")
    assert "heads_kernels.functional" in modules
    assert not {name.split(".")[0] for name in modules} & OPTIONAL
    parts = {name.split(".")[1] for name in modules if name.startswith("heads_kernels.")}
    assert not parts & {"analysis", "convert", "heads", "nn", "report", "testing"}
    # The first loads Triton; the second takes longer than the package and half of PyTorch.
    assert not modules & {"torch.utils.flop_counter", "torch._dynamo"}


def test_all_that_is_public_needs_no_extra() -> None:
    modules = loaded_by("import heads_kernels as hk; [getattr(hk, name) for name in dir(hk)]")
    assert {f"heads_kernels.{name}" for name in ("analysis", "convert", "nn")} <= modules
    assert not {name.split(".")[0] for name in modules} & OPTIONAL


def test_only_bindings_know_python() -> None:
    """The kernels are plain C++: no libtorch anywhere, Python in bindings/ alone."""
    suffixes = {".cpp", ".h", ".cu", ".cuh"}
    files = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in suffixes]
    assert files
    for path in files:
        included = re.findall(r'^\s*#\s*include\s*[<"]([^>"/]+)', path.read_text(), re.MULTILINE)
        foreign = {"torch", "ATen", "c10"}
        if path.parent.name != "bindings":
            foreign |= {"pybind11", "Python.h"}
        assert not foreign & set(included), path
