"""What `import heads_kernels` loads, and what C++ files include; `make lint` checks what Python modules import."""

import re

from tests.support.commands import ROOT, python

#: What a user may not have: imported where it is used, never by `import heads_kernels`.
OPTIONAL = {
    "triton", "transformers", "tokenizers", "safetensors", "rich", "jinja2", "matplotlib", "psutil",
    "pytest", "hypothesis", "expecttest", "benchmarks", "tests",
}  # fmt: skip


LOADED = """
import sys, torch
before = set(sys.modules)
import heads_kernels as hk
print(*set(sys.modules) - before)
[getattr(hk, name) for name in dir(hk)]
print(*set(sys.modules) - before)
"""


def test_imports_need_no_extra() -> None:
    """Of the package: it loads operators, no parts around them and no slow module of torch; its names load the rest."""
    lean, whole = (set(line.split()) for line in python("-c", LOADED).stdout.splitlines())
    for modules in (lean, whole):
        assert not {name.split(".")[0] for name in modules} & OPTIONAL
    assert "heads_kernels.functional" in lean
    parts = {name.split(".")[1] for name in lean if name.startswith("heads_kernels.")}
    assert not parts & {"analysis", "convert", "heads", "nn", "report", "testing"}
    # The first loads Triton; the second takes longer than the package and half of PyTorch.
    assert not lean & {"torch.utils.flop_counter", "torch._dynamo"}
    assert {f"heads_kernels.{name}" for name in ("analysis", "convert", "nn")} <= whole


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
