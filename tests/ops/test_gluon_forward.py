"""The forward kernel in Gluon, emulated: named cases that it serves, in three orders of its partitions.

Its launch goes to `tests/support/gluon_emulator.py`; other kernels run in Triton's interpreter. The tiles are those of
GPUs, except where several are wanted of a short call.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
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
from heads_kernels.ops.triton import forward, gluon_forward, specialized, tiles
from heads_kernels.ops.triton.gluon_tiles import place_of
from heads_kernels.ops.triton.operands import Sizes
from heads_kernels.ops.triton.tiles import Tiles
from heads_kernels.testing import CASES, GatedCase, check, masks
from tests.support.gluon_emulator import emulated
from tests.support.gluon_machine import ORDERS


def _tiles(call: Any) -> Tiles:
    """Of fewer keys where there are few, for several tiles of them."""
    keys = 64 if call.S <= 256 or max(call.D, call.Dv) > 128 else 128
    return Tiles(128, keys, num_warps=4, num_stages=2 if call.S % 2 else 3)


def servable(call: Any, out: torch.Tensor) -> bool:
    return specialized.served(call, [call.query, call.key, call.value, out])


@contextmanager
def in_gluon(order: str) -> Iterator[mock.Mock]:
    """Whatever the kernel can serve goes to it, emulated; the mock is its launch."""

    def chosen(call: Any, outputs: Results) -> Tiles | None:
        return _tiles(call) if servable(call, outputs.out) else None

    with (
        mock.patch.object(forward, "specialized_forward", chosen),
        mock.patch.object(gluon_forward, "launch", side_effect=emulated(order)) as launched,
    ):
        yield launched


#: Beside the named cases: several tiles of each kind for a program, and what only this kernel has.
OWN = (
    GatedCase("full tiles", 1, 2, 40, 700, D=64, Dv=64, gate="H"),
    GatedCase("causal", 1, 4, 300, 300, D=64, Dv=64, Hk=2, is_causal=True, gate="H", closed=0.5),
    GatedCase("causal, wide", 1, 1, 200, 330, D=128, Dv=128, is_causal=True, gate="BHTD"),
    GatedCase("wide", 1, 1, 130, 150, D=256, Dv=256, mask=masks.holes, gate="BHT"),
    GatedCase("odd widths", 2, 2, 260, 260, D=96, Dv=72, mask=masks.padded(260, 101), sinks=True),
    GatedCase("window", 1, 2, 300, 300, D=64, Dv=64, mask=masks.fixed(Mask(window=(70, 90)))),
    GatedCase("windows", 1, 2, 300, 300, D=64, Dv=64, mask=masks.fixed(Mask(window=[(70, 0), (-1, 0)]))),
    GatedCase("blocks", 2, 4, 150, 420, D=64, Dv=64, Hk=2, mask=masks.dense_blocks, gate="BHT"),
    GatedCase("softcap", 1, 2, 140, 200, D=64, Dv=64, softcap=2.0, sinks=True, is_causal=True),
    GatedCase("projected", 2, 4, 129, 129, D=64, Dv=64, layout="transposed", is_causal=True),
)  # fmt: skip


def rows(serves: Callable[[Any, torch.Tensor], bool], share: int) -> list[Any]:
    """The named cases that a kernel serves, each in one order, and OWN in all; outside of a release one of `share`."""
    found = []
    for case, dtype in itertools.product((*CASES, *OWN), (torch.bfloat16, torch.float16)):
        if not isinstance(case, GatedCase) or {"model", "long"} & {*case.tags}:
            continue
        call = case.make(dtype).parsed()
        out = torch.empty(*call.sizes[:3], call.Dv, dtype=dtype)
        if dtype in case.dtypes and serves(call, out):
            name = f"{case}-{str(dtype).removeprefix('torch.')}"
            number = zlib.crc32(name.encode())
            chosen = ORDERS[number // share % len(ORDERS)]
            for order in ORDERS if case in OWN else (chosen,):
                often = number % share == 0 and order == chosen
                marks = [] if often else [pytest.mark.release]
                found.append(pytest.param(case, dtype, order, id=f"{name}-{order}", marks=marks))
    return found


@pytest.mark.parametrize(("gated", "dtype", "order"), rows(servable, 3))
@pytest.mark.parametrize("backend", ["triton"])
def test_cases(backend: str, gated: GatedCase, dtype: torch.dtype, order: str) -> None:
    with in_gluon(order) as launched:
        report = check(gated, dtype, backend, backward=False)
    assert report.ok, str(report)
    assert launched.called


#: Where a NaN or an infinity stands: in a key or in a value, hidden from some rows, from all of them, or in padding.
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend", ["triton"])
def test_hidden_numbers_that_are_not_finite(backend: str, number: float) -> None:
    mask = masks.padded(140, 70, queries=False, causal=True)
    case = GatedCase("poison", 2, 2, 140, 200, D=64, Dv=64, mask=mask)
    inputs = case.make(torch.bfloat16)
    tensors = dict(inputs.tensors)
    for name in ("key", "value"):
        tensors[name] = tensors[name].clone()
        tensors[name][1, :, 70:, 5] = number  # beyond the length
    tensors["value"][:, :, 60, 7] = number  # rows from 60 on see it
    clean = dict(tensors)
    clean["value"] = tensors["value"].nan_to_num(0.0, 0.0, 0.0)
    clean["key"] = tensors["key"].nan_to_num(0.0, 0.0, 0.0)
    with in_gluon("greedy"), torch.no_grad():
        out = replace(inputs, tensors=tensors).call(backend)
        expected = replace(inputs, tensors=clean).call(backend)
    assert torch.equal(out[:, :, :60], expected[:, :, :60])
    assert not out[:, :, 60:, 7].isfinite().any()


def test_which_calls_it_serves() -> None:
    """On sm_90, in 16 bits, where descriptors can describe every tensor and no term is missing."""

    def chosen(kind: str = "sm_90", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> bool:
        options = {"T": 512, "S": 512, "D": 64, "Dv": 64} | changes
        case = GatedCase("call", 1, 2, options.pop("T"), options.pop("S"), **options)
        call = case.make(dtype).parsed()
        if options.get("dropout_p"):
            call = call._replace(seed=torch.zeros(5, dtype=torch.int64))
        out = torch.empty(*call.sizes[:3], call.Dv, dtype=dtype)
        with (
            mock.patch.object(tiles, "TRITON_INTERPRETED", False),
            mock.patch.object(tiles, "_kind_of_target", return_value=kind),
        ):
            return specialized.specialized_forward(call, Results(out, out[:0], out[:0])) is not None

    assert chosen()
    assert chosen(dtype=torch.float16, is_causal=True, gate="BHTD", sinks=True, softcap=30.0)
    for width in (40, 96, 128, 200, 256):
        assert chosen(D=width, Dv=width)
    assert chosen(mask=masks.dense_blocks, T=600)
    for kind in ("sm_100", "sm_80", "other"):
        assert not chosen(kind)
    assert not chosen(dtype=torch.float32)
    refused: tuple[dict[str, Any], ...] = (
        {"T": 16}, {"S": 511}, {"D": 32, "Dv": 32}, {"Dv": 128}, {"D": 100, "Dv": 100}, {"dropout_p": 0.1},
        {"bias": "HTS"}, {"offsets": 9}, {"layout": "sliced"},
        {"mask": masks.fixed(Mask(window=(70, 0), first_keys=4))},
    )  # fmt: skip
    for changes in refused:
        assert not chosen(**changes), changes
    with mock.patch.object(specialized, "_HAS_GLUON", False):
        assert not chosen()


def test_places() -> None:
    """Programs of `together` heads come one tile of rows after another, the last first; every tile once."""
    T, H, pairs = 300, 3, 6
    programs = pairs * 3
    for together in (1, 2, 4, 6):
        found = []

        def collect(place: Any) -> None:
            found.append((int(place.b) * H + int(place.h), int(place.first)))  # noqa: B023 (called at once)

        launch = emulated("greedy")
        kernel = mock.Mock(fn=_places_kernel)
        launch(kernel, programs, torch.empty(0), None, Sizes(H, T, 1, 1, 1.0), together, collect)
        assert sorted(found) == sorted((p, t) for p in range(pairs) for t in (0, 128, 256))
        first_tiles = [first for _, first in found[: min(together, pairs)]]
        assert first_tiles == [256] * len(first_tiles)


def _places_kernel(sizes: Any, together: Any, collect: Any) -> None:
    TILE = SimpleNamespace(block_m=128)
    collect(place_of(sizes, together, TILE, None))
