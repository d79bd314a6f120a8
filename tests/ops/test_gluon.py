"""The kernels in Gluon: named cases that they serve, of short calls too.

In Triton's interpreter their launches go to `tests/support/gluon_emulator.py`, in three orders of their partitions. The
tiles are those of GPUs, except where several are wanted of a short call. With `--device cuda` the GPU runs them.
"""

import itertools
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="pip install 'heads_kernels[triton]'")

from heads_kernels.backends import TRITON_INTERPRETED

if not (TRITON_INTERPRETED or torch.cuda.is_available()):
    pytest.skip("kernels are not interpreted (TRITON_INTERPRET)", allow_module_level=True)

from heads_kernels.mask import Mask
from heads_kernels.ops.attention import Gradients, Results
from heads_kernels.ops.triton import backend as triton_backend
from heads_kernels.ops.triton import gluon_backward, gluon_forward, gluon_shared_backward, tiles
from heads_kernels.ops.triton.gluon_tiles import place_of
from heads_kernels.ops.triton.operands import Sizes
from heads_kernels.ops.triton.tiles import Tiles
from heads_kernels.testing import CASES, Case, CollaborativeCase, GatedCase, check, masks
from tests.ops.calls import assert_hidden_reaches_nothing, on_kind_of_gpu
from tests.support.gluon_emulator import emulated
from tests.support.gluon_machine import ORDERS


def tiles_of_forward(call: Any, out: torch.Tensor) -> Tiles | None:
    """For a call that it can serve; emulated, of fewer keys where there are few, for several tiles of them."""
    tensors = [call.query, call.key, call.value, out]
    if not TRITON_INTERPRETED:
        return tiles_of_gpu("forward", call, tensors)
    if not triton_backend.served(call, tensors):
        return None
    keys = 64 if call.S <= 256 or max(call.D, call.Dv) > 128 else 128
    stages = 2 if call.S % 2 else 3
    if call.mixing is None:
        return Tiles(128, keys, num_warps=4, num_stages=stages, key_stages=stages)
    width = 64 if call.Dv <= 64 else 128
    return Tiles(128, keys, block_d=width, num_warps=4, num_stages=stages, key_stages=stages)


def tiles_of_backward(call: Any, dout: torch.Tensor) -> Tiles | None:
    tensors = [call.query, call.key, call.value, dout]
    narrow = max(call.D, call.Dv) <= (64 if call.softcap else 128) and call.dense_mask is None
    if call.mixing is not None or not narrow:
        return None
    if not TRITON_INTERPRETED:
        return tiles_of_gpu("backward", call, tensors) if triton_backend.HAS_BACKWARD else None
    return Tiles(64, 128, num_warps=8, num_stages=2) if triton_backend.served(call, tensors) else None


def tiles_of_shared_backward(call: Any, dout: torch.Tensor) -> Tiles | None:
    tensors = [call.query, call.key, call.value, dout]
    if call.mixing is None or call.D > 256 or call.Dv > 64 or call.dense_mask is not None:
        return None
    if not TRITON_INTERPRETED:
        return tiles_of_gpu("backward", call, tensors) if triton_backend.HAS_BACKWARD else None
    stages = 2 if call.S % 2 else 3
    return Tiles(64, 128, num_warps=4, num_stages=stages) if triton_backend.served(call, tensors) else None


def tiles_of_gpu(kernel: str, call: Any, tensors: list[torch.Tensor]) -> Tiles | None:
    """The tiles on this GPU, whatever the number of keys."""
    with mock.patch.object(triton_backend, "FEWEST_KEYS", 1):
        return triton_backend._tiles(kernel, call, tensors)


#: By pass: its tiles; what is replaced where the kernel is chosen; its module; one of how many cases CI runs.
KERNELS: dict[str, tuple[Any, ...]] = {
    "forward": (
        tiles_of_forward,
        (triton_backend, "specialized_forward", lambda call, results: tiles_of_forward(call, results.out)),
        gluon_forward,
        5,
    ),
    "backward": (
        tiles_of_backward,
        (triton_backend, "specialized_backward", lambda call, _, dout: tiles_of_backward(call, dout)),
        gluon_backward,
        8,
    ),
    "shared backward": (
        tiles_of_shared_backward,
        (triton_backend, "specialized_backward", lambda call, _, dout: tiles_of_shared_backward(call, dout)),
        gluon_shared_backward,
        8,
    ),
}  # fmt: skip


@contextmanager
def in_gluon(kernel: str, order: str) -> Iterator[mock.Mock]:
    """Whatever the kernel can serve goes to it, emulated unless there is a GPU; the mock is its launch."""
    _, chosen, module, _ = KERNELS[kernel]
    run = emulated(order) if TRITON_INTERPRETED else module.launch
    with mock.patch.object(*chosen), mock.patch.object(module, "launch", side_effect=run) as launched:
        yield launched


#: Beside the named cases: several tiles of each kind for a program, and what only these kernels have.
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
    CollaborativeCase("shared", 1, 2, 140, 300, Ds=256, Dv=64, content_bias=True, is_causal=True, gate="H"),
    CollaborativeCase("shared, wide", 1, 2, 130, 150, Ds=512, Dv=128, content_bias=True, mask=masks.holes, gate="BHT"),
    CollaborativeCase("shared, few features", 2, 4, 130, 260, Ds=96, Dv=64, Hv=2, mixing="ragged", gate="BHTD",
        content_bias=True, mask=masks.padded(260, 101, queries=False), sinks=True, softcap=2.0),
    CollaborativeCase("shared, grouped", 1, 4, 200, 200, Ds=96, Dv=64, Hv=2, is_causal=True, gate="H", closed=0.5,
        content_bias=True),
    CollaborativeCase("shared, window", 1, 3, 300, 300, Ds=64, Dv=64, mask=masks.fixed(Mask(window=(70, 90)))),
    CollaborativeCase("shared, holes", 2, 2, 130, 151, Ds=256, Dv=40, content_bias=True, mask=masks.holes, gate="BHT"),
    CollaborativeCase("shared, full tiles", 1, 2, 70, 384, Ds=128, Dv=64, gate="BHTD"),
    CollaborativeCase("shared, softcap", 1, 2, 140, 200, Ds=256, Dv=64, softcap=2.0, sinks=True, is_causal=True),
    CollaborativeCase("shared, values wider", 1, 2, 130, 200, Ds=64, Dv=128, mixing="zero_head", gate="H", closed=0.5),
)  # fmt: skip


def widened(case: Case) -> Case:
    """The case with heads as wide as the narrowest tiles of a GPU, if its own are narrower."""
    if isinstance(case, CollaborativeCase):
        return replace(case, Ds=max(case.Ds, 64), Dv=max(case.Dv, 64))
    return replace(case, D=64, Dv=64) if max(case.D, case.Dv) < 64 else case


def rows() -> Iterator[Any]:
    """The named cases that a kernel serves, each in one order, and OWN in all; one of some outside of a release."""
    cases = [case for case in CASES if not {"model", "long"} & {*case.tags}]
    if not TRITON_INTERPRETED:
        cases = [*map(widened, cases)]
    for case, dtype in itertools.product((*cases, *OWN), (torch.bfloat16, torch.float16)):
        call = case.make(dtype).parsed()
        out = torch.empty(*call.sizes[:3], call.Dv, dtype=dtype)
        for kernel, (tiles_of, *_, share) in KERNELS.items():
            if dtype not in case.dtypes or tiles_of(call, out) is None:
                continue
            name = f"{case.operator}-{case}-{str(dtype).removeprefix('torch.')}"
            number = zlib.crc32(name.encode())
            chosen = ORDERS[number // share % len(ORDERS)]
            for order in ORDERS if case in OWN and TRITON_INTERPRETED else (chosen,):
                often = number % share == 0 and order == chosen
                marks = [] if often else [pytest.mark.release]
                yield pytest.param(kernel, case, dtype, order, id=f"{kernel}-{name}-{order}", marks=marks)  # fmt: skip


@pytest.mark.parametrize(("kernel", "named", "dtype", "order"), list(rows()))
@pytest.mark.parametrize("backend", ["triton"])
def test_cases(backend: str, kernel: str, named: Case, dtype: torch.dtype, order: str) -> None:
    with in_gluon(kernel, order) as launched:
        report = check(named, dtype, backend, backward=kernel != "forward")
    assert report.ok, str(report)
    assert launched.called


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [GatedCase, CollaborativeCase])
@pytest.mark.parametrize("backend", ["triton"])
def test_numbers_that_are_not_finite_reach_the_rows_that_see_them(backend: str, kind: Any, number: float) -> None:
    """In a key or in a value: hidden from some rows, from all of them, or in padding."""
    mask = masks.padded(140, 70, queries=False, causal=True)
    width = {"D": 64} if kind is GatedCase else {"Ds": 64}
    inputs = kind("poison", 2, 2, 140, 200, Dv=64, mask=mask, **width).make(torch.bfloat16)
    tensors = dict(inputs.tensors)
    for name in ("key", "value"):
        tensors[name] = tensors[name].clone()
        tensors[name][1, ..., 70:, 5] = number  # beyond the length
    tensors["value"][:, :, 60, 7] = number  # rows from 60 on see it
    clean = dict(tensors)
    clean["value"] = tensors["value"].nan_to_num(0.0, 0.0, 0.0)
    clean["key"] = tensors["key"].nan_to_num(0.0, 0.0, 0.0)
    with in_gluon("forward", "greedy") as launched, torch.no_grad():
        out = replace(inputs, tensors=tensors).call(backend)
        expected = replace(inputs, tensors=clean).call(backend)
    assert launched.called
    assert torch.equal(out[:, :, :60], expected[:, :, :60])
    assert not out[:, :, 60:, 7].isfinite().any()


_HIDDEN: Any = {"Dv": 64, "mask": masks.padded(140, 70), "gate": "BHT"}
_POISONED = GatedCase("poison", 2, 1, 140, 140, D=64, **_HIDDEN)


@pytest.mark.parametrize("bad", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.release)])
@pytest.mark.parametrize(
    ("kernel", "named"),
    [
        ("forward", _POISONED),
        ("forward", CollaborativeCase("poison", 2, 1, 140, 140, Ds=64, **_HIDDEN)),
        ("backward", _POISONED),
        ("backward", replace(_POISONED, name="poison, softcap", softcap=2.0)),
        ("shared backward", CollaborativeCase("poison", 2, 1, 140, 140, Ds=64, content_bias=True, **_HIDDEN)),
    ],
)
@pytest.mark.parametrize("backend", ["triton"])
def test_hidden_values_reach_nothing(backend: str, kernel: str, named: Case, bad: float) -> None:
    """Of keys that no row sees and rows that see no key, their gates and dout too."""
    with in_gluon(kernel, "greedy") as launched:
        assert_hidden_reaches_nothing(named.make(torch.bfloat16), backend, bad)
    assert launched.called


def chosen(
    kernel: str,
    kind: str = "sm_90",
    dtype: torch.dtype = torch.bfloat16,
    asked_for: int = 3,
    closed_grad: bool = True,
    **changes: Any,
) -> bool:
    """Whether the kernel is chosen on this kind of GPU for a call that differs by `changes` from one that it serves."""
    kind_of_case, width = (CollaborativeCase, "Ds") if "Ds" in changes else (GatedCase, "D")
    options = {"T": 512, "S": 512, width: 64, "Dv": 64} | changes
    inputs = kind_of_case("call", 1, 2, options.pop("T"), options.pop("S"), **options).make(dtype)
    call = inputs.parsed()._replace(closed_grad=closed_grad)
    if options.get("dropout_p"):
        call = call._replace(seed=torch.zeros(5, dtype=torch.int64))
    nothing = torch.empty(0)
    with on_kind_of_gpu(kind):
        if kernel == "forward":
            out = torch.empty(*call.sizes[:3], call.Dv, dtype=dtype)
            results = Results(out, nothing, nothing)
            return triton_backend.specialized_forward(call, results) is not None
        operands = [call.query, call.key, call.value][:asked_for]
        gradients = Gradients(*operands, *[nothing] * (len(Gradients._fields) - asked_for))
        return triton_backend.specialized_backward(call, gradients, inputs.dout) is not None


_TERMS: Any = {"is_causal": True, "gate": "BHTD", "sinks": True, "softcap": 30.0}
_OF_SHARED: Any = {**_TERMS, "content_bias": True, "mixing": "ragged", "Hv": 1}
_MISSING: Any = (
    {"dropout_p": 0.1}, {"bias": "HTS"}, {"offsets": 9}, {"layout": "sliced"},
    {"mask": masks.fixed(Mask(window=(70, 0), first_keys=4))},
)  # fmt: skip
#: By kernel, what it needs of Triton, and calls that it serves: on sm_90, in 16 bits, where descriptors can describe
#: every tensor and no term is missing; backward where all gradients are asked for, without dense masks and wide heads.
SERVED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "forward": ("_HAS_GLUON", (
        {}, {"dtype": torch.float16, **_TERMS}, {"mask": masks.dense_blocks, "T": 600},
        *({"D": width, "Dv": width} for width in (40, 96, 128, 200, 256)),
        *({"Ds": Ds, "Dv": Dv, **_OF_SHARED} for Ds in (40, 200, 256, 384, 512) for Dv in (40, 64, 128)),
    )),
    "backward": ("HAS_BACKWARD", (
        {}, _TERMS, {"D": 96, "Dv": 128, "mask": masks.holes},
        {"Ds": 40, **_OF_SHARED}, *({"Ds": Ds, "Dv": Dv, **_OF_SHARED, "softcap": None}
            for Ds in (200, 256) for Dv in (40, 64)),
    )),
}  # fmt: skip
REFUSED: dict[str, tuple[Any, ...]] = {
    "forward": (
        *({"kind": kind} for kind in ("sm_100", "sm_80", "other")), {"dtype": torch.float32},
        {"T": 16}, {"S": 511}, {"D": 32, "Dv": 32}, {"Dv": 128}, {"D": 100, "Dv": 100}, *_MISSING,
        *({"Ds": 256} | each for each in ({"Ds": 520}, {"Ds": 32}, {"Ds": 100}, {"Dv": 32}, {"Dv": 136}, *_MISSING)),
    ),
    "backward": (
        {"kind": "sm_100"}, {"asked_for": 2}, {"T": 16}, {"S": 511}, {"D": 256, "Dv": 256},
        {"D": 72, "Dv": 72, "softcap": 30.0}, {"bias": "HTS"}, {"mask": masks.dense_blocks, "T": 600},
        *({"Ds": 256} | each for each in ({"Ds": 32}, {"Ds": 264}, {"Dv": 32}, {"Dv": 72}, {"asked_for": 2},
            {"bias": "HTS"}, {"mask": masks.dense_blocks, "T": 600})),
        {"Ds": 256, "closed_grad": False}, {"Ds": 256, "softcap": 30.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kernel", SERVED)
def test_which_calls_a_kernel_serves(kernel: str) -> None:
    needed, served = SERVED[kernel]
    for changes in served:
        assert chosen(kernel, **changes), changes
    for changes in REFUSED[kernel]:
        assert not chosen(kernel, **changes), changes
    with mock.patch.object(triton_backend, needed, False):
        assert not chosen(kernel)


def test_without_its_row_a_kernel_is_not_chosen() -> None:
    others = tuple(row for row in tiles._SPECIALIZED if row.kernels != "collaborative_attention.backward")
    try:
        with mock.patch.dict(tiles._TABLES, {"Gluon": others}):
            tiles._rows_of.cache_clear()
            assert not chosen("backward", Ds=64)
            assert chosen("backward")
    finally:
        tiles._rows_of.cache_clear()
    assert chosen("backward", Ds=64)


@pytest.mark.parametrize("gate", [None, "BHT"])
def test_rows_of_a_wider_tensor(gate: str | None) -> None:
    """Rows 40 numbers apart can be described; those of 36 that a gate makes of them can't."""
    inputs = GatedCase("apart", 1, 2, 512, 512, D=36, Dv=36, gate=gate).make(torch.bfloat16)
    query, key, value = rows = [
        torch.nn.functional.pad(inputs.tensors[name], (0, 4))[..., :36] for name in ("query", "key", "value")
    ]
    call = inputs.parsed(query=query, key=key, value=value)
    with on_kind_of_gpu("sm_90"):
        gradients = Gradients(*rows, *[torch.empty(0)] * (len(Gradients._fields) - 3))
        found = triton_backend.specialized_backward(call, gradients, value)
    assert (found is not None) == (gate is None)


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
