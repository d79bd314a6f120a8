"""The ops of `libheads_kernels.so` in a process without the package: the same schemas, results and refusals."""

import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import heads_kernels as hk
from tests.ops.calls import QUICK, tensors
from tests.support.commands import ROOT, python
from tests.support.dispatched import Ops

COMPILER = shutil.which("g++")
OPS = ("attention", "attention_statistics")

try:
    LIBRARY = hk.integrations.cpp.library_path()
except FileNotFoundError as refusal:
    pytest.skip(str(refusal), allow_module_level=True)
pytest.importorskip("heads_kernels._cpu", reason="pip install, with a C++ compiler")
pytestmark = pytest.mark.check


def without_package(code: str, *arguments: str) -> str:
    """What `code` prints in a process that has loaded the library and cannot import the package."""
    start = f"import sys, torch; torch.ops.load_library({str(LIBRARY)!r})"
    return python("-I", "-c", f"{start}\n{code}", *arguments).stdout


def test_schemas_are_those_of_the_declarations() -> None:
    found = without_package(f"for name in {OPS}: print(getattr(torch.ops.heads_kernels, name).default._schema)")
    ops = [getattr(torch.ops.heads_kernels, name).default for name in OPS]
    assert found.splitlines() == [str(op._schema) for op in ops]


class Calls(Ops):
    """With the calls of the package's ops."""

    @property
    def recorded(self) -> list[tuple[str, Any, Any]]:
        own = [ran for ran in self.ran if ran[0].namespace == "heads_kernels"]
        assert not any(by_name for _, _, by_name, _ in own)
        detached = tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, own)
        return [(op._schema.name.partition("::")[2], args, out) for op, args, _, out in detached]


REPEAT = """
for name, arguments, expected in torch.load(sys.argv[1]):
    results = getattr(torch.ops.heads_kernels, name).default(*arguments)
    assert len(results) == len(expected)
    for found, kept in zip(results, expected):
        assert found.dtype == kept.dtype and found.stride() == kept.stride(), (name, found.stride())
        assert torch.equal(found.nan_to_num(), kept.nan_to_num()), (name, arguments)
    print(name)
"""


def repeated(calls: Calls, folder: Path) -> list[str]:
    """The names of recorded calls that gave the same bits, in the same memory order, in the library."""
    torch.save(calls.recorded, folder / "calls.pt")
    return without_package(REPEAT, str(folder / "calls.pt")).split()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_those_of_the_package(dtype: torch.dtype, tmp_path: Path) -> None:
    """With a gradient, so that what a backward pass reads is saved, in float32; without in bfloat16."""
    with Calls() as calls:
        for case in QUICK:
            case.make(dtype, requires_grad=dtype == torch.float32).call("cpu")
    assert repeated(calls, tmp_path) == ["attention"] * len(QUICK)


def test_closed_rows_are_those_of_the_package(tmp_path: Path) -> None:
    """Tiles in which a gate per token closes all rows are computed only for what is saved for the gate's gradient."""
    given = tensors("gated_attention", T=140, dtype=torch.float32)
    gate = torch.ones(2, 4, 140)
    gate[:, 1, :64] = 0
    with Calls() as calls:
        for closed_grad, saves in product((True, False), repeat=2):
            leaf = gate.clone().requires_grad_(saves)
            hk.gated_attention(**given, gate=leaf, closed_grad=closed_grad, backend="cpu")
    attended = [results[1] for _, _, results in calls.recorded]
    assert [bool(each[:, 1, :64].any()) if each.numel() else None for each in attended] == [True, None, False, None]
    assert repeated(calls, tmp_path) == ["attention"] * 4


def test_statistics_are_those_of_the_package(tmp_path: Path) -> None:
    shared = tensors("collaborative_attention", dtype=torch.float32)
    query, key = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 7, 8)
    mask = hk.Mask(key_lengths=torch.tensor([7, 3]))
    with Calls() as calls:
        hk.attention_statistics(query, key, attn_mask=mask, sinks=torch.randn(4), softcap=3.0)
        hk.attention_statistics(query, key, exclude_keys=torch.arange(7) == 0)
        hk.attention_statistics(query, key, attn_mask=mask, received=torch.rand(2, 1, 9))
        hk.attention_statistics(shared["query"], shared["key"], mixing=shared["mixing"])
    assert repeated(calls, tmp_path) == ["attention_statistics"] * 4


class Attends(torch.nn.Module):
    def forward(self, query: Tensor, lengths: Tensor) -> Tensor:
        mask = hk.Mask(causal=True, key_lengths=lengths)
        return hk.gated_attention(query, query, query, attn_mask=mask, gate=torch.arange(4.0))


def test_an_exported_program_runs_without_the_package(tmp_path: Path) -> None:
    sizes = {"query": {2: torch.export.Dim("T", min=2, max=64)}, "lengths": None}
    example = torch.randn(2, 4, 7, 8), torch.tensor([7, 3])
    program = torch.export.export(Attends(), example, dynamic_shapes=sizes)
    torch.export.save(program, tmp_path / "program.pt2")
    inputs = torch.randn(2, 4, 30, 8), torch.tensor([30, 11])
    torch.save((inputs, Attends()(*inputs)), tmp_path / "call.pt")
    without_package(
        "inputs, expected = torch.load(sys.argv[1] + '/call.pt')\n"
        "model = torch.export.load(sys.argv[1] + '/program.pt2').module()\n"
        "assert torch.equal(model(*inputs), expected)",
        str(tmp_path),
    )


REFUSE = """
import torch
tensors, U = {"query": (2, 4, 5, 8), "key": (2, 2, 7, 8), "value": (2, 2, 7, 6)}, 1 << 30
op = torch.ops.heads_kernels.attention.default
good = {argument.name: None for argument in op._schema.arguments}
good |= {name: torch.zeros(sizes) for name, sizes in tensors.items()}
good |= {"band_lo": -U, "band_hi": U, "scale": 0.5, "softcap": 0.0, "dropout_p": 0.0}
good |= {"gate_activation": "identity", "closed_grad": True, "save": False, "backend": "cpu"}
op(*good.values())
wrong = [
    ("backend", "eager"), ("gate_activation", "relu"), ("key", torch.zeros(2, 3, 7, 8)), ("gate", torch.ones(5)),
    ("gate", torch.ones(4, dtype=torch.int8)), ("dropout_p", 0.5), ("softcap", -1.0), ("band_hi", 1 << 40),
    ("query", torch.zeros(2, 4, 8, 5).mT), ("value", None), ("alpha", torch.ones(4)), ("mixing", torch.ones(4, 8)),
]
blamed = {"dropout_p": "seed", "band_hi": "band", "mixing": "query"}
for name, value in wrong:
    try:
        op(*{**good, name: value}.values())
    except (ValueError, RuntimeError) as error:  # ValueError before PyTorch 2.15
        assert str(error).startswith(blamed.get(name, name)), error
    else:
        raise AssertionError(f"{name} {value} is served")
"""


def test_what_does_not_fit_is_refused() -> None:
    without_package(REFUSE)


# ---------------------------------------------------------------------- beside the package
def test_the_package_is_not_imported_after_it() -> None:
    code = f"""
sys.path.insert(0, {str(ROOT)!r})
try:
    import heads_kernels
except ImportError as error:
    print(error)
"""
    assert "has loaded libheads_kernels.so" in without_package(code)


def test_it_adds_nothing_to_the_package() -> None:
    torch.ops.load_library(str(LIBRARY))
    query = torch.randn(1, 2, 3, 4)
    for backend in ("cpu", "eager"):
        with Calls() as calls:
            hk.gated_attention(query, query, query, backend=backend)
        assert [name for name, _, _ in calls.recorded] == ["attention"]


# ---------------------------------------------------------------------- the binary
@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_functions_are_declared_as_in_pytorch(tmp_path: Path) -> None:
    """Two declarations of a C function that differ do not compile together."""
    headers = "torch/csrc/inductor/aoti_torch/c/shim.h", "torch/csrc/stable/c/shim.h"
    source = tmp_path / "both.cpp"
    source.write_text("".join(f"#include <{header}>\n" for header in (*headers, "bindings/torch_abi.h")))
    includes = [ROOT / "csrc", Path(torch.__file__).parent / "include"]
    flags = ["-std=c++17", "-fsyntax-only", *(f"-I{folder}" for folder in includes)]
    run = subprocess.run([COMPILER, *flags, source], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
