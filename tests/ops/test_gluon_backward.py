"""The backward kernel in Gluon, emulated: named cases that it serves, in three orders of its partitions.

As `test_gluon_forward`, whose cases of its own are these too.
"""

from __future__ import annotations

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

from heads_kernels.ops.attention import Gradients
from heads_kernels.ops.triton import backend as triton_backend
from heads_kernels.ops.triton import gluon_backward, specialized, tiles
from heads_kernels.ops.triton.specialized import served, specialized_backward
from heads_kernels.ops.triton.tiles import Tiles
from heads_kernels.testing import GatedCase, check, masks
from tests.ops.test_gluon_forward import rows
from tests.support.gluon_emulator import emulated
from tests.support.poison import hide


@contextmanager
def in_gluon(order: str) -> Iterator[mock.Mock]:
    """Whatever the kernel can serve goes to it, emulated; the mock is its launch."""

    def chosen(call: Any, gradients: Gradients, dout: torch.Tensor) -> Tiles | None:
        return Tiles(64, 128, num_warps=8, num_stages=2) if servable(call, dout) else None

    with (
        mock.patch.object(triton_backend, "specialized_backward", chosen),
        mock.patch.object(gluon_backward, "launch", side_effect=emulated(order)) as launched,
    ):
        yield launched


def servable(call: Any, dout: torch.Tensor) -> bool:
    narrow = max(call.D, call.Dv) <= 128 and not call.softcap and call.dense_mask is None
    return narrow and served(call, [call.query, call.key, call.value, dout])


@pytest.mark.parametrize(("gated", "dtype", "order"), rows(servable, 8))
@pytest.mark.parametrize("backend", ["triton"])
def test_cases(backend: str, gated: GatedCase, dtype: torch.dtype, order: str) -> None:
    with in_gluon(order) as launched:
        report = check(gated, dtype, backend)
    assert report.ok, str(report)
    assert launched.called


@pytest.mark.parametrize(
    "bad", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.release)]
)
@pytest.mark.parametrize("backend", ["triton"])
def test_hidden_values_reach_nothing(backend: str, bad: float) -> None:
    """Of keys that no row sees and rows that see no key, their gates and dout too."""
    case = GatedCase("poison", 2, 1, 140, 140, D=64, Dv=64, gate="BHT", mask=masks.padded(140, 70))
    inputs = case.make(torch.bfloat16)
    poisoned, places = hide(inputs, bad)
    with in_gluon("greedy"):
        (_, want), (_, got) = (each.backward(backend) for each in (inputs, poisoned))
    for name, gradient in want.items():
        assert torch.equal(got[name], gradient), name
    for name, place in places.items():
        assert not got[name][place].any(), name


def test_which_calls_it_serves() -> None:
    """Those of the forward kernel, but for caps, dense masks and wide heads, where all gradients are asked for."""

    def chosen(kind: str = "sm_90", asked_for: int = 3, **changes: Any) -> bool:
        options = {"T": 512, "S": 512, "D": 64, "Dv": 64} | changes
        case = GatedCase("call", 1, 2, options.pop("T"), options.pop("S"), **options)
        inputs = case.make(torch.bfloat16)
        call = inputs.parsed()
        nothing = torch.empty(0)
        operands = [call.query, call.key, call.value][:asked_for]
        gradients = Gradients(*operands, *[nothing] * (len(Gradients._fields) - asked_for))
        with (
            mock.patch.object(tiles, "TRITON_INTERPRETED", False),
            mock.patch.object(tiles, "_kind_of_target", return_value=kind),
        ):
            return specialized_backward(call, gradients, inputs.dout) is not None

    assert chosen()
    assert chosen(is_causal=True, gate="BHTD", sinks=True)
    assert chosen(D=96, Dv=128, mask=masks.holes)
    assert not chosen("sm_100")
    assert not chosen(asked_for=2)
    refused: tuple[dict[str, Any], ...] = (
        {"T": 16}, {"S": 511}, {"D": 256, "Dv": 256}, {"softcap": 30.0}, {"bias": "HTS"},
        {"mask": masks.dense_blocks, "T": 600},
    )  # fmt: skip
    for changes in refused:
        assert not chosen(**changes), changes
    with mock.patch.object(specialized, "HAS_ADDING_COPIES", False):
        assert not chosen()
