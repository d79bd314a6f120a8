"""The emulator of Gluon says what is wrong: the backward kernel with a fault in it, in three orders of partitions."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="pip install 'heads_kernels[triton]'")

from heads_kernels.mask import Mask
from heads_kernels.ops.attention import Gradients, attention_op
from heads_kernels.ops.triton import gluon_backward, gluon_row_tiles
from heads_kernels.ops.triton.operands import (
    RowLse,
    gate_kind,
    gate_of,
    operands_of,
    rows_of,
)
from heads_kernels.ops.triton.rows import FirstPass, Reads
from heads_kernels.ops.triton.tiles import Tiles
from heads_kernels.testing import GatedCase, masks
from tests.ops.test_gluon_emulator import mutated
from tests.support.gluon_emulator import emulated
from tests.support.gluon_machine import ORDERS, Fault

pytestmark = pytest.mark.check

#: Four programs of two heads, with full tiles of rows and masked ones; the last rows do not see the first keys.
CASE = GatedCase(
    "window", 1, 2, 200, 500, D=64, Dv=64, Hk=1, gate="H",
    mask=masks.fixed(Mask(causal="lower_right", window=(240, 0))),
)  # fmt: skip
MODULES = gluon_row_tiles, gluon_backward
TILES = Tiles(64, 128, num_warps=8, num_stages=2)


def run(module: ModuleType, order: str) -> Gradients:
    """dquery, dkey and dvalue of CASE; the first pass is done here, in the formula's own words."""
    inputs = CASE.make(torch.bfloat16)
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
    with mock.patch.object(module, "launch", emulated(order)):
        module.specialized_pass(call, first, gradients, TILES)
    return gradients


_FREES = "                mbarrier.arrive(shared.free.index(stage), count=1)\n"
_DKEY_ENDS = "                dkey = warpgroup_mma_wait(num_outstanding=0, deps=(dkey,))\n"
_ADDED = "            tma.store_wait(0)\n            mbarrier.arrive(shared.dquery_free.index(0), count=1)\n"
_IN_MEMORY = "            tma.store_wait(0, read_only=False)\n"
_RELEASED = '            gl.atomic_add(added, 1, sem="release")\n'
_PRODUCER_WAITS = "mbarrier.wait(shared.free.index(stage), phase ^ 1)\n            ready"
_READER_WAITS = "mbarrier.wait(shared.free.index(stage), phase ^ 1)\n            shared.lse"
_UNCOPIED = "before its copy was waited for"
_UNSTORED = "has not waited for what another stored"

#: What is wrong -> lines and others in their place, and the words of the fault.
FAULTS: dict[str, tuple[tuple[tuple[str, str], ...], str]] = {
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
        (("num_outstanding=1, deps=(scores,)", "num_outstanding=2, deps=(scores,)"),), "may still be under way",
    ),
    "the sum for dvalue is not waited for": (
        (("dquery, dvalue = warpgroup_mma_wait(num_outstanding=1, deps=(dquery, dvalue))",
          "dquery = warpgroup_mma_wait(num_outstanding=1, deps=(dquery,))"),), "still being computed|still under way",
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
        (("mbarrier.wait(shared.dquery_free.index(0), (stage & 1) ^ 1)", "pass"),),
        "overwritten|arrivals, of 1|a deadlock",
    ),
    "the adder does not wait for dquery": (
        (("mbarrier.wait(shared.dquery_ready.index(0), stage & 1)", "pass"),), f"{_UNSTORED}|arrivals, of 1|a deadlock",
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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, order: str, tmp_path: Path) -> None:
    changes, words = FAULTS[fault]
    with pytest.raises(Fault, match=words):
        run(mutated(tmp_path, *changes, modules=MODULES), order)


def test_the_kernel_has_none() -> None:
    """And the order of its partitions changes no bit."""
    first, *others = (run(gluon_backward, order) for order in ORDERS)
    for gradient in first[:3]:
        assert gradient.isfinite().all()
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a, b)
