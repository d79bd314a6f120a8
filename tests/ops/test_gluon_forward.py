"""The forward kernel in Gluon, emulated: named cases that it serves, in three orders of its partitions.

Its launch goes to `tests/support/gluon_emulator.py`; other kernels run in Triton's interpreter. The tiles are those of
GPUs, except where several are wanted of a short call.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="pip install 'heads_kernels[triton]'")

from heads_kernels.backends import TRITON_INTERPRETED

if not TRITON_INTERPRETED:
    pytest.skip("kernels are not interpreted (TRITON_INTERPRET)", allow_module_level=True)

from heads_kernels.mask import Mask
from heads_kernels.ops.attention import Results
from heads_kernels.ops.triton import forward, gluon_forward
from heads_kernels.ops.triton.tiles import Tiles
from heads_kernels.testing import CASES, GatedCase, check, masks
from tests.support.gluon_emulator import emulated
from tests.support.gluon_machine import ORDERS

_DTYPES = (torch.bfloat16, torch.float16)
#: `make check` runs one of so many cases, each in one order; the rest has the mark `release`.
_SHARE = 3


def _tiles(call: Any) -> Tiles:
    """Of fewer keys where there are few, for several tiles of them."""
    keys = 64 if call.S <= 256 or max(call.D, call.Dv) > 128 else 128
    return Tiles(128, keys, num_warps=4, num_stages=2 if call.S % 2 else 3)


@contextmanager
def in_gluon(order: str) -> Iterator[mock.Mock]:
    """Whatever the kernel can serve goes to it, emulated; the mock is its launch."""

    def chosen(call: Any, outputs: Results) -> Tiles | None:
        return _tiles(call) if forward.served_by_warps(call, outputs) else None

    with (
        mock.patch.object(forward, "_warp_tiles", chosen),
        mock.patch.object(gluon_forward, "launch", side_effect=emulated(order)) as launched,
    ):
        yield launched


def served(case: GatedCase, dtype: torch.dtype) -> bool:
    call = case.make(dtype).parsed()
    out = torch.empty(*call.sizes[:3], call.Dv, dtype=dtype)
    return forward.served_by_warps(call, Results(out, out[:0], out[:0]))


#: Beside the named cases: several tiles of each kind for a program, and what only this kernel has.
OWN = (
    GatedCase("full tiles", 1, 2, 40, 700, D=64, Dv=64, gate="H"),
    GatedCase("causal", 1, 4, 300, 300, D=64, Dv=64, Hk=2, is_causal=True, gate="H", closed=0.5),
    GatedCase("causal, wide", 1, 1, 200, 330, D=128, Dv=128, is_causal=True, gate="BHTD"),
    GatedCase("wide", 1, 1, 130, 150, D=256, Dv=256, mask=masks.holes, gate="BHT"),
    GatedCase("odd widths", 2, 2, 260, 260, D=96, Dv=72, mask=masks.padded(260, 101), sinks=True),
    GatedCase("window", 1, 2, 300, 300, D=64, Dv=64, mask=masks.fixed(Mask(window=(70, 90)))),
    GatedCase("blocks", 2, 4, 150, 420, D=64, Dv=64, Hk=2, mask=masks.dense_blocks, gate="BHT"),
    GatedCase("softcap", 1, 2, 140, 200, D=64, Dv=64, softcap=2.0, sinks=True, is_causal=True),
    GatedCase("projected", 2, 4, 129, 129, D=64, Dv=64, layout="transposed", is_causal=True),
)  # fmt: skip


def rows() -> list[Any]:
    table = [*CASES, *OWN]
    found = []
    for case in table:
        if not isinstance(case, GatedCase) or {"model", "long"} & {*case.tags}:
            continue
        for dtype in _DTYPES:
            if dtype in case.dtypes and served(case, dtype):
                name = f"{case}-{str(dtype).removeprefix('torch.')}"
                number = zlib.crc32(name.encode())
                marks = [pytest.mark.release] if number % _SHARE else []
                for order in ORDERS:
                    chosen = order == ORDERS[number // _SHARE % len(ORDERS)]
                    others = [] if chosen else [pytest.mark.release]
                    found.append(
                        pytest.param(
                            case, dtype, order, id=f"{name}-{order}", marks=marks or others
                        )
                    )
    return found


@pytest.mark.parametrize(("gated", "dtype", "order"), rows())
@pytest.mark.parametrize("backend", ["triton"])
def test_cases(backend: str, gated: GatedCase, dtype: torch.dtype, order: str) -> None:
    with in_gluon(order) as launched:
        report = check(gated, dtype, backend, backward=False)
    assert report.ok, str(report)
    assert launched.called
