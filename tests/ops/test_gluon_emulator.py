"""The emulator of Gluon says what is wrong: the forward kernel with a fault in it, in every order of its partitions."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="pip install 'heads_kernels[triton]'")

from triton.experimental.gluon import language as gl

from heads_kernels.ops.attention import Results
from heads_kernels.ops.triton import gluon_forward, gluon_tiles
from heads_kernels.ops.triton.tiles import Tiles
from heads_kernels.testing import GatedCase, masks
from tests.support.gluon_emulator import Pointer, emulated, rounded
from tests.support.gluon_machine import ORDERS, Fault, Machine

pytestmark = pytest.mark.check

#: One program with four full tiles of keys and three partial ones, and two places for tiles.
CASE = GatedCase("lower_right", 1, 1, 65, 400, D=64, Dv=64, mask=masks.lower_right, gate="H")
TILES = Tiles(128, 64, num_warps=4, num_stages=2)


def run(module: ModuleType, order: str, poisoned: bool = False) -> Results:
    call = CASE.make(torch.bfloat16).parsed()
    if poisoned:  # a value of the last key, which only the last row sees
        call.value[..., -1, 3] = torch.nan
    out = torch.empty(*call.sizes[:3], call.Dv, dtype=torch.bfloat16)
    results = Results(out, torch.empty_like(out), torch.empty(call.sizes[:3]))
    with mock.patch.object(module, "launch", emulated(order)):
        module.specialized_pass(call, results, TILES)
    return results


def mutated(
    folder: Path, *changes: tuple[str, str], modules: tuple[ModuleType, ...] = (gluon_tiles, gluon_forward)
) -> ModuleType:  # fmt: skip
    """The last of a kernel's modules, of which each may import those before it, with other lines in them."""
    own = {module.__name__: f"{folder.name}_{module.__name__.rpartition('.')[2]}" for module in modules}  # fmt: skip
    sources = {}
    for module in modules:
        assert module.__file__ is not None
        text = Path(module.__file__).read_text(encoding="utf-8")
        for name, mutant in own.items():
            text = text.replace(f"from {name} import", f"from {mutant} import")
        sources[module] = text
    for old, changed in changes:
        assert any(old in text for text in sources.values()), old
        sources = {module: text.replace(old, changed) for module, text in sources.items()}
    for module, text in sources.items():
        found = load(folder, own[module.__name__], text)
    return found


def load(folder: Path, name: str, text: str) -> ModuleType:
    """A module of this text; the file stays, for Triton reads it."""
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_VALUES = "mbarrier.wait(shared.value_ready.index(before), ((index - 1) // STAGES) & 1)"
_PV_ENDS = "acc, weights = warpgroup_mma_wait(num_outstanding=0, deps=(acc, weights))\n"
_FREES_V = "mbarrier.arrive(shared.value_free.index(before), count=1)\n"
_QK_ENDS = "scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))\n"
_SPACE = " " * 16
_OUT_LANDS = "store_tiles(out_tiles, [b, h, first_row, 0], buffer)\n    tma.store_wait(0)"
_LANDED = "mbarrier.wait(shared.value_landed.index(stage), ((index - full) // STAGES) & 1)"
_UNCOPIED = "before its copy was waited for"
_UNSTORED = "has not waited for what another stored"

#: What is wrong -> lines and others in their place, and the words of the fault.
FAULTS: dict[str, tuple[tuple[tuple[str, str], ...], str]] = {
    "values are not waited for": (((_VALUES, "pass"),), _UNCOPIED),
    "the next keys are not waited for": ((("pred=after < count", "pred=after < 0"),), _UNCOPIED),
    "an inspector does not wait": (((_LANDED, "pass"),), f"{_UNCOPIED}|{_UNSTORED}"),
    "values are free while a product reads them": (
        ((_PV_ENDS + _SPACE + _FREES_V, _FREES_V + _SPACE + _PV_ENDS),), "overwritten",
    ),
    "scores are used before they are waited for": (
        ((_QK_ENDS, _QK_ENDS.replace("1, deps", "2, deps")),), "may still be under way",
    ),
    "the last product is not waited for": (
        (("acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))", "pass"),), "under way",
    ),
    "a place for tiles is used before it is free": (
        (("free = (index // STAGES + 1) & 1", "free = (index // STAGES) & 1"),), "a deadlock",
    ),
    "one consumer frees keys for both": (
        (("key_free = barriers(STAGES, 2)", "key_free = barriers(STAGES, 1)"),), "overwritten|a deadlock",
    ),
    "a turn is passed on twice": (
        (("shared.turns.index(1 - WHO), count=1", "shared.turns.index(1 - WHO), count=2"),), "arrivals, of 1",
    ),
    "too few bytes are expected": (
        (("KEY_BYTES: gl.constexpr = 2 *", "KEY_BYTES: gl.constexpr = 1 *"),), "bytes more than it expects",
    ),
    "too many bytes are expected": (
        (("VALUE_BYTES: gl.constexpr = 2 *", "VALUE_BYTES: gl.constexpr = 4 *"),), "a deadlock",
    ),
    "partial values are not inspected": (
        (("landed = shared.value_landed.index(stage)", "landed = shared.value_ready.index(stage)"),), "a deadlock",
    ),
    "poison is read before it is written": (
        (("mbarrier.wait(shared.value_ready.index(stage), (index // STAGES) & 1)", "pass"),),
        f"{_UNSTORED}|overwritten",
    ),
    "the output is stored without a fence": (
        (("    fence_async_shared()\n    store_tiles(out", "    store_tiles(out"),), "without a fence_async_shared",
    ),
    "the output is written while a copy reads the rows before the gate": (
        (("tma.store_wait(0)\n    columns", "pass\n    columns"),), "while a copy reads it",
    ),
    "a program ends before its output is stored": (
        ((_OUT_LANDS, _OUT_LANDS.replace("tma.store_wait(0)", "pass")),), "ends while",
    ),
    "keys are asked for beyond the last tile": (
        (("for index in range(count):", "for index in range(count + 1):"),),
        "nobody waited|a deadlock|middle of a phase",
    ),
    "a barrier is not initialized": (
        (("query_ready = barriers(2, 1)", "query_ready = barriers(2, 0)"),), "not initialized|arrivals, of 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, order: str, tmp_path: Path) -> None:
    changes, words = FAULTS[fault]
    with pytest.raises(Fault, match=words):
        run(mutated(tmp_path, *changes), order, poisoned=True)


@pytest.mark.parametrize("poisoned", [False, True])
def test_the_kernel_has_none(poisoned: bool) -> None:
    """And the order of its partitions changes no bit."""
    first, *others = (run(gluon_forward, order, poisoned) for order in ORDERS)
    nan = first.out.isnan()
    assert nan[0, 0, -1].all() == poisoned
    assert not nan[0, 0, :-1].any()
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def test_values_that_hidden_keys_have_matter_without_inspection(tmp_path: Path) -> None:
    """That is why there is an inspector: rows that do not see the last key are NaN then."""
    module = mutated(
        tmp_path,
        (", 0, 1), 1), 0) != 0:", ", 0, 1), 1), 0) != 2:"),
        ("if gl.max", "if -1 + 0 * gl.max"),
    )
    assert not run(module, "greedy").out.isnan().any()
    module = mutated(tmp_path, ("sums == 0.0, 0, 1)", "sums == 0.0, 0, 0)"))
    assert run(module, "greedy", poisoned=True).out[0, 0, :-1].isnan().any()


def test_addresses_are_checked() -> None:
    rows = torch.zeros(4, 4)[1:3]
    inside = Pointer(rows) + np.arange(8)
    assert inside.places(None)[1].tolist() == list(range(4, 12))
    assert (inside + 8).places(np.zeros(8, bool))[2].sum() == 0
    for off in (-5, 9):
        with pytest.raises(Fault, match="outside of a tensor"):
            (inside + off).places(None)


def test_numbers_are_rounded_to_nearest() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for dtype, name in ((torch.bfloat16, gl.bfloat16), (torch.float16, gl.float16)):
        assert rounded(values.numpy(), name).tolist() == values.to(dtype).tolist()


@pytest.mark.parametrize("order", ORDERS)
def test_orders(order: str) -> None:
    """Three partitions that wait for nobody: each to its end, or a step each."""
    machine, steps = Machine(order), []

    def part(number: int) -> None:
        for _ in range(3):
            steps.append(number)
            machine.wait_until(lambda: True, "nothing")

    machine.specialize([(part, (number,)) for number in range(3)])
    assert steps == ([0, 1, 2] * 3 if order == "round" else sorted([0, 1, 2] * 3))
