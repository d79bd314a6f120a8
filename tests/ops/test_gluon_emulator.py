"""The emulator of Gluon says what is wrong: the kernels with a fault in them, in every order of their partitions."""

import ast
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="pip install 'heads_kernels[triton]'")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heads_kernels.call import Call
from heads_kernels.mask import Mask
from heads_kernels.ops.attention import Gradients, Results, attention_op
from heads_kernels.ops.triton import (
    gluon_backward,
    gluon_forward,
    gluon_row_tiles,
    gluon_shared_backward,
    gluon_tiles,
    visible,
)
from heads_kernels.ops.triton.operands import RowLse, cells_of, operands_of, rows_of
from heads_kernels.ops.triton.rows import FirstPass, Reads
from heads_kernels.ops.triton.tiles import Tiles
from heads_kernels.testing import Case, CollaborativeCase, GatedCase, Inputs, masks
from tests.support.examples import module_at
from tests.support.gluon_emulator import Pointer, emulated, rounded
from tests.support.gluon_machine import ORDERS, Fault, Machine

#: One program with four full tiles of keys and three partial ones, and two places for tiles.
FORWARD = GatedCase("lower_right", 1, 1, 65, 400, D=64, Dv=64, mask=masks.lower_right, gate="H")
#: The same with 3 chunks of keys in each tile, and 2 places for chunks.
COLLABORATIVE = CollaborativeCase("lower_right", 1, 1, 65, 400, Ds=160, Dv=64, mask=masks.lower_right, gate="H",
    content_bias=True)  # fmt: skip
#: No partial tiles.
FULL = GatedCase("full", 1, 1, 65, 256, D=64, Dv=64)
#: Four programs of two heads, with full tiles of rows and masked ones; the last rows do not see the first keys.
BACKWARD = GatedCase(
    "window", 1, 2, 200, 500, D=64, Dv=64, Hk=1, gate="H",
    mask=masks.fixed(Mask(causal="lower_right", window=(240, 0))),
)  # fmt: skip
#: Two programs each way, of two heads; every tile of rows is full or masked for one of them.
SHARED_BACKWARD = CollaborativeCase(
    "window", 1, 2, 200, 330, Ds=64, Dv=64, Hv=1, gate="H", content_bias=True,
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


run_collaborative = partial(run_forward, case=COLLABORATIVE)


def run_backward(module: ModuleType, order: str, D: int = 64) -> Gradients:
    """dquery, dkey and dvalue.

    Only in heads wider than 64, products read the values from shared memory.
    """
    call, first = first_pass_of(replace(BACKWARD, D=D, Dv=D).make(torch.bfloat16))
    nothing = torch.empty(0)
    asked_for = [torch.empty_like(x) for x in (call.query, call.key, call.value)]
    gradients = Gradients(*asked_for, *[nothing] * 7)
    tiles = Tiles(64, 128, num_warps=8, num_stages=2)
    with mock.patch.object(module, "launch", emulated(order)):
        module.specialized_pass(call, first, gradients, tiles)
    return gradients


def run_shared_backward(
    module: ModuleType,
    order: str,
    mixing: torch.dtype = torch.float32,
    spoil: Callable[[Call], None] | None = None,
) -> Gradients:
    """Its gradients, where the last row sees a key that is not finite; the mixing has numbers of 16 bits.

    With `spoil`, that key is finite; it changes operands after the first pass.
    """
    inputs = SHARED_BACKWARD.make(torch.bfloat16)
    if spoil is None:
        inputs.tensors["key"][..., -1, 3] = torch.nan
    inputs.tensors["mixing"] = inputs.tensors["mixing"].to(torch.bfloat16).to(mixing)
    call, first = first_pass_of(inputs)
    if spoil is not None:
        spoil(call)
    given = call.query, call.key, call.value, call.mixing, call.content_bias
    gradients = Gradients(*map(torch.empty_like, given), *[torch.empty(0)] * 5)
    gradients = gradients._replace(dmixing=torch.empty(call.B, call.H, call.D))
    tiles = Tiles(64, 128, num_warps=4, num_stages=2)
    run = emulated(order)
    with mock.patch.object(module, "launch", run), mock.patch.object(visible, "launch", run):
        module.specialized_pass(call, first, gradients, tiles)
    return gradients


def first_pass_of(inputs: Inputs) -> tuple[Call, FirstPass]:
    """The call, and its first pass in the formula's own words."""
    call = inputs.parsed()
    _, attended, lse = attention_op(*call, True, "eager")
    gate = call.gate.float().reshape(1, -1, 1)
    delta = gate * (inputs.dout.float() * attended.float()).sum(-1)
    in_base_2 = (lse.float() * torch.log2(torch.tensor(torch.e))).contiguous()
    reads = Reads(rows_of(inputs.dout), cells_of(call.gate), RowLse(in_base_2, None), delta.nan_to_num(0.0))
    return call, FirstPass(operands_of(call), reads)


OF_PASS = {
    "forward": (run_forward, (gluon_tiles, gluon_forward)),
    "full": (partial(run_forward, case=FULL), (gluon_tiles, gluon_forward)),
    "collaborative": (run_collaborative, (gluon_tiles, gluon_forward)),
    "backward": (run_backward, (gluon_row_tiles, gluon_backward)),
    "backward, wide": (partial(run_backward, D=128), (gluon_row_tiles, gluon_backward)),
    "shared backward": (run_shared_backward, (gluon_shared_backward,)),
}


def sources(modules: Sequence[ModuleType], *changes: tuple[str, str]) -> dict[ModuleType, str]:
    """The text of a kernel's modules with other lines in them."""
    texts = {module: inspect.getsource(module) for module in modules}
    for old, changed in changes:
        assert any(old in text for text in texts.values()), old
        texts = {module: text.replace(old, changed) for module, text in texts.items()}
    return texts


def loaded(folder: Path, texts: dict[ModuleType, str]) -> ModuleType:
    """The last of these modules, of which each may import those before it; the files stay, for Triton reads them."""
    own = {module.__name__: f"{folder.name}_{module.__name__.rpartition('.')[2]}" for module in texts}
    for module, text in texts.items():
        for name, mutant in own.items():
            text = text.replace(f"from {name} import", f"from {mutant} import")
        name = own[module.__name__]
        path = folder / f"{name}.py"
        path.write_text(text, encoding="utf-8")
        found = module_at(path, name)
    return found


#: Calls by which partitions wait for each other, for copies and for products.
SYNCHRONIZING = re.compile(r"(wait|arrive|expect|fence_async_shared|\batomic_add)$")
#: Statements with another purpose: waits for turns are for speed, the wait before the loop over chunks is for the
#: compiler, and `ticket` gives a program its number.
FOR_OTHER_REASONS = ("shared.turns.index(WHO)", "chunks is not None:\n        scores =", "ticket =")


def synchronizing(module: ModuleType) -> Iterator[tuple[int, int]]:
    """The first and last lines of the statements that are such a call."""
    text = inspect.getsource(module)
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr | ast.Assign) and isinstance(node.value, ast.Call):
            first, last = node.lineno, node.end_lineno or node.lineno
            here = "\n".join(lines[first - 2 : last])
            called = ast.unparse(node.value.func)
            if SYNCHRONIZING.search(called) and not any(each in here for each in FOR_OTHER_REASONS):
                yield first, last


#: `make test` runs the first of each module.
REMOVED = [
    pytest.param(module, *lines, id=f"{module.__name__}-{number}", marks=pytest.mark.check if number else ())
    for module in (gluon_tiles, gluon_forward, gluon_row_tiles, gluon_backward, gluon_shared_backward)
    for number, lines in enumerate(synchronizing(module))
]  # fmt: skip


@pytest.mark.parametrize(("module", "first", "last"), REMOVED)
def test_every_statement_that_synchronizes_is_needed(module: ModuleType, first: int, last: int, tmp_path: Path) -> None:
    """Without it, some order of the partitions of some call has a fault."""
    runs = [(run, modules) for run, modules in OF_PASS.values() if module in modules]
    texts = sources(runs[0][1])
    lines = texts[module].splitlines(keepends=True)
    indentation = len(lines[first - 1]) - len(lines[first - 1].lstrip())
    lines[first - 1 : last] = [" " * indentation + "pass\n"]
    mutant = loaded(tmp_path, texts | {module: "".join(lines)})

    def in_every_order() -> None:
        for (run, _), order in itertools.product(runs, ORDERS):
            run(mutant, order)

    with pytest.raises(Fault):
        in_every_order()


_PV_ENDS = "acc, weights = warpgroup_mma_wait(num_outstanding=0, deps=(acc, weights))\n"
_FREES_V = "mbarrier.arrive(shared.value_free.index(before), count=1)\n"
_SPACE = " " * 16
_PLACE_WAITS = "            mbarrier.wait(shared.key_free.index(stage), (number // KEY_STAGES + 1) & 1)\n"
_STORES_CONTENT = """            if shared.content is not None:
                shared.content.index(stage).store(content)
"""
_READS_CONTENT = """    if shared.content is not None:
        scores += shared.content.index(stage).load(COLUMNS)[None, :]
"""
_FREES_LAST = "    mbarrier.arrive(shared.key_free.index(stage), count=1)\n"
_RELEASED = '                gl.atomic_add(added, 1, sem="release")\n'
_EARLY = "is added to before"

#: By pass, what else is wrong -> a line, another in its place, and the words of the fault.
FAULTS = {
    ("forward", "values are free while a product reads them"): (
        _PV_ENDS + _SPACE + _FREES_V, _FREES_V + _SPACE + _PV_ENDS, "overwritten",
    ),
    ("forward", "a place for tiles is used before it is free"): (
        "(number // KEY_STAGES + 1) & 1", "(number // KEY_STAGES) & 1", "a deadlock",
    ),
    ("forward", "one consumer frees keys for both"): (
        "key_free=barriers(KEY_STAGES, 2)", "key_free=barriers(KEY_STAGES, 1)", "overwritten|a deadlock",
    ),
    ("forward", "a turn is passed on twice"): (
        "shared.turns.index(1 - WHO), count=1", "shared.turns.index(1 - WHO), count=2", "arrivals, of 1",
    ),
    ("forward", "keys are asked for beyond the last tile"): (
        "for index in range(count):", "for index in range(count + 1):", "nobody waited|a deadlock|middle of a phase",
    ),
    ("forward", "a barrier is not initialized"): (
        "query_ready=barriers(2 * CHUNKS, 1)", "query_ready=barriers(2 * CHUNKS, 0)",
        "not initialized|arrivals, of 0",
    ),
    ("collaborative", "turns are taken where a tile has more chunks than the ring"): (
        "in_turns = chunk_count(of) <= shared.key.shape[0]", "in_turns = True", "a deadlock",
    ),
    ("collaborative", "content bias is stored before its place is free"): (
        _PLACE_WAITS + _STORES_CONTENT, _STORES_CONTENT + _PLACE_WAITS, "overwritten",
    ),
    ("collaborative", "content bias is read after its place is free"): (
        _READS_CONTENT + _FREES_LAST, _FREES_LAST + _READS_CONTENT,
        "overwritten|has not waited for what another stored",
    ),
    ("backward", "dquery is added in any order"): (" != before", " < 0", _EARLY),
    ("backward", "the next program is signalled without a release"): (
        _RELEASED, _RELEASED.replace("release", "relaxed"), _EARLY,
    ),
    ("shared backward", "one consumer frees tiles for both"): (
        "free=barriers(STAGES + 1, 2)", "free=barriers(STAGES + 1, 1)", "overwritten|a deadlock|arrivals, of 1",
    ),
    ("shared backward", "products are used before they end"): (
        "0 if column == 0 else 2 if BY_KEYS else 1", "3", "still under way",
    ),
    ("shared backward", "a tile is loaded beyond the last one"): (
        "range(visit.count):\n            first", "range(1 + visit.count):\n            first",
        "nobody waited|a deadlock|middle of a phase|overwritten|outside of a tensor",
    ),
    ("backward", "others' additions are not acquired"): (', 0, sem="acquire"', ', 0, sem="relaxed"', _EARLY),
}  # fmt: skip


@pytest.mark.check
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("of", "name"), FAULTS)
def test_faults_are_found(of: str, name: str, order: str, tmp_path: Path) -> None:
    run, modules = OF_PASS[of]
    line, changed, words = FAULTS[of, name]
    with pytest.raises(Fault, match=words):
        run(loaded(tmp_path, sources(modules, (line, changed))), order)


@pytest.mark.parametrize(
    ("run", "key_stages"),
    [(run_forward, 2), (run_collaborative, 3), pytest.param(run_collaborative, 2, marks=pytest.mark.check)],
)
@pytest.mark.parametrize("poisoned", [True, pytest.param(False, marks=pytest.mark.check)])
def test_the_forward_kernel_has_none(poisoned: bool, run: Any, key_stages: int) -> None:
    """And the order of its partitions changes no bit."""
    first, *others = (run(gluon_forward, order, poisoned, key_stages=key_stages) for order in ORDERS)
    nan = first.out.isnan()
    assert nan[0, 0, -1].all() == poisoned
    assert not nan[0, 0, :-1].any()
    for other in others:
        torch.testing.assert_close(other, first, rtol=0.0, atol=0.0, equal_nan=True)


def test_the_backward_kernels_have_none() -> None:
    first, *others = (run_backward(gluon_backward, order) for order in ORDERS)
    for gradient in first[:3]:
        assert gradient.isfinite().all()
    for other in others:
        torch.testing.assert_close(other, first, rtol=0.0, atol=0.0)
    first, *others = (run_shared_backward(gluon_shared_backward, order) for order in ORDERS)
    assert first.dquery[:, :-1].isfinite().all()
    assert first.dquery[:, -1].isnan().all()
    for other in others:
        torch.testing.assert_close(other, first, rtol=0.0, atol=0.0, equal_nan=True)


def test_mixing_of_16_bits_gives_the_same_bits() -> None:
    """As the same numbers in float32: the preparer multiplies pairs."""
    run = partial(run_shared_backward, gluon_shared_backward, "greedy")
    wide, narrow = map(run, (torch.float32, torch.bfloat16))
    torch.testing.assert_close(narrow, wide, rtol=0.0, atol=0.0, equal_nan=True)


_times = gluon_shared_backward._times  # the emulator looks for names of this module


@gluon.jit
def _times_kernel(tile, factors, product, COUNT: gl.constexpr):
    at = gl.arange(0, COUNT, layout=gl.BlockedLayout([1], [32], [4], [0]))
    found = _times(gl.load(tile + at), gl.load(factors + at), gl.bfloat16, False)
    gl.store(product + at, found)


def test_products_of_two_parts_are_rounded_to_a_neighbour() -> None:
    """Two in a hundred at most to the other one of the two; with factors of one part it would be every fourth."""
    tile, factors = torch.randn(4096).to(torch.bfloat16), torch.randn(4096)
    product = torch.empty_like(tile)
    emulated("greedy")(_times_kernel, 1, tile, None, tile, factors, product, COUNT=4096)
    exact = tile.double() * factors.double()
    neighbours = exact.to(torch.bfloat16).view(torch.int16)
    assert (product.view(torch.int16) - neighbours).abs().max() <= 1
    assert (product.view(torch.int16) != neighbours).sum() <= 4096 // 50


def test_what_is_not_finite_reaches_only_what_sees_it() -> None:
    """A query row in a feature that heads do not mix, so that its lse is finite; an infinite key, whose lse may be."""
    seen_by_first = SHARED_BACKWARD.S - SHARED_BACKWARD.T + 1

    def spoil_query(call: Call) -> None:
        assert call.mixing is not None
        call.mixing[:, :16] = 0.0
        call.query[:, 0, 3] = torch.inf

    def spoil_key(call: Call) -> None:
        call.key[:, -1, 3] = -torch.inf

    for order in ORDERS:
        gradients = run_shared_backward(gluon_shared_backward, order, spoil=spoil_query)
        assert gradients.dkey[:, seen_by_first:].isfinite().all()
        assert gradients.dquery[:, 1:].isfinite().all()
        gradients = run_shared_backward(gluon_shared_backward, order, spoil=spoil_key)
        assert gradients.dquery[:, :-1].isfinite().all()
        assert gradients.dquery[:, -1].isnan().all()


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
