"""The emulator of Gluon says what is wrong: the kernels with a fault in them, in every order of their partitions."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="pip install 'heads_kernels[triton]'")

from triton.experimental.gluon import language as gl

from heads_kernels.mask import Mask
from heads_kernels.ops.attention import Gradients, Results, attention_op
from heads_kernels.ops.triton import gluon_backward, gluon_forward, gluon_row_tiles, gluon_tiles
from heads_kernels.ops.triton.operands import RowLse, gate_kind, gate_of, operands_of, rows_of
from heads_kernels.ops.triton.rows import FirstPass, Reads
from heads_kernels.ops.triton.tiles import Tiles
from heads_kernels.testing import Case, CollaborativeCase, GatedCase, masks
from tests.support.gluon_emulator import Pointer, emulated, rounded
from tests.support.gluon_machine import ORDERS, Fault, Machine

#: One program with four full tiles of keys and three partial ones, and two places for tiles.
FORWARD = GatedCase("lower_right", 1, 1, 65, 400, D=64, Dv=64, mask=masks.lower_right, gate="H")
#: The same with 3 chunks of keys in each tile, and 2 places for chunks.
COLLABORATIVE = CollaborativeCase("lower_right", 1, 1, 65, 400, Ds=160, Dv=64, mask=masks.lower_right, gate="H",
    content_bias=True)  # fmt: skip
#: Four programs of two heads, with full tiles of rows and masked ones; the last rows do not see the first keys.
BACKWARD = GatedCase(
    "window", 1, 2, 200, 500, D=64, Dv=64, Hk=1, gate="H",
    mask=masks.fixed(Mask(causal="lower_right", window=(240, 0))),
)  # fmt: skip


def run_forward(
    module: ModuleType, order: str, poisoned: bool = True, case: Case = FORWARD, key_stages: int = 2
) -> Results:
    call = case.make(torch.bfloat16).parsed()
    if poisoned:  # a value of the last key, which only the last row sees
        call.value[..., -1, 3] = torch.nan
    out = torch.empty(*call.sizes[:3], call.Dv, dtype=torch.bfloat16)
    results = Results(out, torch.empty_like(out), torch.empty(call.sizes[:3]))
    with mock.patch.object(module, "launch", emulated(order)):
        tiles = Tiles(128, 64, block_d=64, num_warps=4, num_stages=2, key_stages=key_stages)
        module.specialized_pass(call, results, tiles)
    return results


def run_collaborative(
    module: ModuleType, order: str, poisoned: bool = True, key_stages: int = 2
) -> Results:
    return run_forward(module, order, poisoned, COLLABORATIVE, key_stages)


def run_backward(module: ModuleType, order: str) -> Gradients:
    """dquery, dkey and dvalue; the first pass is done here, in the formula's own words."""
    inputs = BACKWARD.make(torch.bfloat16)
    call = inputs.parsed()
    _, attended, lse = attention_op(*call, True, "eager")
    gate = call.gate.float().reshape(1, -1, 1)
    delta = gate * (inputs.dout.float() * attended.float()).sum(-1)
    in_base_2 = (lse.float() * torch.log2(torch.tensor(torch.e))).contiguous()
    reads = Reads(rows_of(inputs.dout), gate_of(call.gate), RowLse(in_base_2, None), delta)
    first = FirstPass(operands_of(call), reads, gate_kind(call.gate))
    nothing = torch.empty(0)
    asked_for = [torch.empty_like(x) for x in (call.query, call.key, call.value)]
    gradients = Gradients(*asked_for, *[nothing] * 7)
    tiles = Tiles(64, 128, num_warps=8, num_stages=2)
    with mock.patch.object(module, "launch", emulated(order)):
        module.specialized_pass(call, first, gradients, tiles)
    return gradients


OF_PASS = {
    "forward": (run_forward, (gluon_tiles, gluon_forward)),
    "collaborative": (run_collaborative, (gluon_tiles, gluon_forward)),
    "backward": (run_backward, (gluon_row_tiles, gluon_backward)),
}


def mutated(folder: Path, *changes: tuple[str, str], modules: tuple[ModuleType, ...]) -> ModuleType:
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


#: What is wrong -> lines and others in their place, and the words of the fault.
Faults = dict[str, tuple[tuple[tuple[str, str], ...], str]]

_VALUES = "mbarrier.wait(shared.value_ready.index(before), ((index - 1) // STAGES) & 1)"
_PV_ENDS = "acc, weights = warpgroup_mma_wait(num_outstanding=0, deps=(acc, weights))\n"
_FREES_V = "mbarrier.arrive(shared.value_free.index(before), count=1)\n"
_QK_ENDS = "scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))\n"
_SPACE = " " * 16
_OUT_LANDS = "store_tiles(memory.out, [b, h, first_row, 0], buffer)\n    tma.store_wait(0)"
_LANDED = "mbarrier.wait(shared.value_landed.index(stage), ((index - full) // STAGES) & 1)"
_UNCOPIED = "before its copy was waited for"
_UNSTORED = "has not waited for what another stored"

OF_FORWARD: Faults = {
    "values are not waited for": (((_VALUES, "pass"),), _UNCOPIED),
    "the next keys are not waited for": ((("index + 1 < count)", "index + 1 < 0)"),), _UNCOPIED),
    "an inspector does not wait": (((_LANDED, "pass"),), f"{_UNCOPIED}|{_UNSTORED}"),
    "values are free while a product reads them": (
        ((_PV_ENDS + _SPACE + _FREES_V, _FREES_V + _SPACE + _PV_ENDS),), "overwritten",
    ),
    "scores are used before they are waited for": (
        ((_QK_ENDS, _QK_ENDS.replace("1, deps", "2, deps")),), "still under way",
    ),
    "the last product is not waited for": (
        (("acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))", "pass"),), "under way",
    ),
    "a place for tiles is used before it is free": (
        (("(number // KEY_STAGES + 1) & 1", "(number // KEY_STAGES) & 1"),), "a deadlock",
    ),
    "one consumer frees keys for both": (
        (("key_free = barriers(KEY_STAGES, 2)", "key_free = barriers(KEY_STAGES, 1)"),), "overwritten|a deadlock",
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
        (("    fence_async_shared()\n    store_tiles(memory.out", "    store_tiles(memory.out"),),
        "without a fence_async_shared",
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
        (("query_ready = barriers(2 * CHUNKS, 1)", "query_ready = barriers(2 * CHUNKS, 0)"),),
        "not initialized|arrivals, of 0",
    ),
}  # fmt: skip

_FREES_CHUNK = "mbarrier.arrive(shared.key_free.index((number - 1) % KEY_STAGES), count=1)"
_PLACE_WAITS = (
    "            mbarrier.wait(shared.key_free.index(stage), (number // KEY_STAGES + 1) & 1)\n"
)
_STORES_CONTENT = """            if shared.content is not None:
                shared.content.index(stage).store(content)
"""
_READS_CONTENT = """    if shared.content is not None:
        scores += shared.content.index(stage).load(COLUMNS)[None, :]
"""
_FREES_LAST = "    mbarrier.arrive(shared.key_free.index(stage), count=1)\n"

OF_COLLABORATIVE: Faults = {
    "a chunk of the query is not waited for": (
        (("mbarrier.wait(shared.query_ready.index(WHO * CHUNKS + chunk), 0)", "pass"),),
        f"{_UNCOPIED}|{_UNSTORED}",
    ),
    "the mixed query is multiplied without a fence": (
        (("    fence_async_shared()\n    barrier()", "    barrier()"),), "without a fence_async_shared",
    ),
    "a chunk of keys is not waited for": (
        (("mbarrier.wait(shared.key_ready.index(number % KEY_STAGES), (number // KEY_STAGES) & 1)", "pass"),),
        f"{_UNCOPIED}|overwritten",
    ),
    "a chunk is free while a product reads it": (
        ((_FREES_CHUNK, _FREES_CHUNK.replace("number - 1", "number")),), "overwritten|arrivals, of 2|a deadlock",
    ),
    "chunks are not freed": (((_FREES_CHUNK, "pass"),), "a deadlock"),
    "turns are taken where a tile has more chunks than the ring": (
        (("in_turns = chunk_count(of) <= shared.key.shape[0]", "in_turns = True"),), "a deadlock",
    ),
    "content bias is stored before its place is free": (
        ((_PLACE_WAITS + _STORES_CONTENT, _STORES_CONTENT + _PLACE_WAITS),), "overwritten",
    ),
    "content bias is read after its place is free": (
        ((_READS_CONTENT + _FREES_LAST, _FREES_LAST + _READS_CONTENT),), f"overwritten|{_UNSTORED}",
    ),
}  # fmt: skip

_FREES = "                mbarrier.arrive(shared.free.index(stage), count=1)\n"
_DKEY_ENDS = "                dkey = warpgroup_mma_wait(num_outstanding=0, deps=(dkey,))\n"
_ADDED = "                tma.store_wait(0)\n                mbarrier.arrive(free, count=1)\n"
_IN_MEMORY = "                tma.store_wait(0, read_only=False)\n"
_RELEASED = '                gl.atomic_add(added, 1, sem="release")\n'
_PRODUCER_WAITS = "mbarrier.wait(shared.free.index(stage), phase ^ 1)\n            ready"
_READER_WAITS = "mbarrier.wait(shared.free.index(stage), phase ^ 1)\n            shared.lse"

OF_BACKWARD: Faults = {
    "keys are not waited for": (
        (("mbarrier.wait(shared.keys_ready.index(0), 0)", "pass"),), f"{_UNCOPIED}|{_UNSTORED}",
    ),
    "lse is not waited for": (
        (("mbarrier.wait(shared.terms_ready.index(stage), phase)", "pass"),), f"{_UNSTORED}|overwritten",
    ),
    "the reader does not wait for tiles": (
        (("mbarrier.wait(shared.query_ready.index(stage), phase)\n                mbarrier", "mbarrier"),), _UNCOPIED,
    ),
    "scores are used before they are waited for": (
        (("num_outstanding=1, deps=(scores,)", "num_outstanding=2, deps=(scores,)"),), "still under way",
    ),
    "the sum for dvalue is not waited for": (
        (("dquery, dvalue = warpgroup_mma_wait(num_outstanding=1, deps=(dquery, dvalue))",
          "dquery = warpgroup_mma_wait(num_outstanding=1, deps=(dquery,))"),), "still under way",
    ),
    "a tile is free while the product for dkey reads it": (
        ((_DKEY_ENDS + _FREES, _FREES + _DKEY_ENDS),), "overwritten",
    ),
    "tiles are freed twice": (((_FREES, _FREES.replace("count=1", "count=2")),), "arrivals, of 1"),
    "the producer does not wait for a place": (((_PRODUCER_WAITS, "ready"),), "overwritten|arrivals, of 1"),
    "the reader does not wait for a place": (
        ((_READER_WAITS, "shared.lse"),), f"overwritten|arrivals, of 1|{_UNSTORED}",
    ),
    "dquery is stored without a fence": (
        (("fence_async_shared()\n                mbarrier.arrive(shared.dquery", "mbarrier.arrive(shared.dquery"),),
        "without a fence_async_shared",
    ),
    "dquery is overwritten before it is added": (
        (("mbarrier.wait(shared.dquery_free.index(turn), added ^ 1)", "pass"),),
        "overwritten|arrivals, of 1|a deadlock",
    ),
    "the adder does not wait for dquery": (
        (("mbarrier.wait(ready, phase)", "pass"),),
        f"{_UNSTORED}|overwritten|arrivals, of 1|a deadlock",
    ),
    "a tile of dquery is free while a copy reads it": (
        ((_ADDED, "".join(reversed(_ADDED.splitlines(keepends=True)))),), "overwritten",
    ),
    "dquery is added in any order": (((' != before', ' < 0'),), "is added to before"),
    "the next program is signalled while the addition is under way": (((_IN_MEMORY, ""),), "is added to before"),
    "the next program is signalled before the addition is in memory": (
        ((_IN_MEMORY + _RELEASED, _RELEASED + _IN_MEMORY),), "is added to before",
    ),
    "the next program is signalled without a release": (
        ((_RELEASED, _RELEASED.replace("release", "relaxed")),), "is added to before",
    ),
    "others' additions are not acquired": (((', 0, sem="acquire"', ', 0, sem="relaxed"'),), "is added to before"),
    "the next program is not signalled": (((_RELEASED, ""),), "a deadlock"),
    "heads share their counters": ((("(own.b * sizes.H + own.h).to(gl.int64) * tiles + tile", "tile"),), "a deadlock"),
    "programs that see no key of a tile are waited for": (
        (("before = own - ", "before = own + 0 * "),), "a deadlock",
    ),
}  # fmt: skip


#: `make test` runs the first fault of each kernel in one order.
FAULTS = [
    pytest.param(of, *row, order, id=f"{of}: {fault}-{order}", marks=pytest.mark.check if more else ())
    for of, faults in (("forward", OF_FORWARD), ("collaborative", OF_COLLABORATIVE), ("backward", OF_BACKWARD))
    for more, (order, (fault, row)) in enumerate(itertools.product(ORDERS, faults.items()))
]  # fmt: skip


@pytest.mark.parametrize(("of", "changes", "words", "order"), FAULTS)
def test_faults_are_found(
    of: str, changes: tuple[tuple[str, str], ...], words: str, order: str, tmp_path: Path
) -> None:
    run, modules = OF_PASS[of]
    with pytest.raises(Fault, match=words):
        run(mutated(tmp_path, *changes, modules=modules), order)


@pytest.mark.parametrize(
    ("run", "key_stages"),
    [
        (run_forward, 2),
        (run_collaborative, 3),
        pytest.param(run_collaborative, 2, marks=pytest.mark.check),
    ],
)
@pytest.mark.parametrize("poisoned", [True, pytest.param(False, marks=pytest.mark.check)])
def test_the_forward_kernel_has_none(poisoned: bool, run: Any, key_stages: int) -> None:
    """And the order of its partitions changes no bit."""
    first, *others = (
        run(gluon_forward, order, poisoned, key_stages=key_stages) for order in ORDERS
    )
    nan = first.out.isnan()
    assert nan[0, 0, -1].all() == poisoned
    assert not nan[0, 0, :-1].any()
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def test_the_backward_kernel_has_none() -> None:
    first, *others = (run_backward(gluon_backward, order) for order in ORDERS)
    for gradient in first[:3]:
        assert gradient.isfinite().all()
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.check
def test_values_that_hidden_keys_have_matter_without_inspection(tmp_path: Path) -> None:
    """That is why there is an inspector: rows that do not see the last key are NaN then."""
    _, modules = OF_PASS["forward"]
    module = mutated(
        tmp_path,
        (", 0, 1), 1), 0) != 0:", ", 0, 1), 1), 0) != 2:"),
        ("if gl.max", "if -1 + 0 * gl.max"),
        modules=modules,
    )
    assert not run_forward(module, "greedy", poisoned=False).out.isnan().any()
    module = mutated(tmp_path, ("sums == 0.0, 0, 1)", "sums == 0.0, 0, 0)"), modules=modules)
    assert run_forward(module, "greedy").out[0, 0, :-1].isnan().any()


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
