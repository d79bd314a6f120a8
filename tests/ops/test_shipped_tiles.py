"""The tiles that GPUs get, in the interpreter, which has smaller ones of its own for all other tests."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from heads_kernels.backends import TRITON_INTERPRETED
from heads_kernels.testing import Case, CollaborativeCase, GatedCase, check, masks

if not TRITON_INTERPRETED:
    pytest.skip("kernels are not interpreted (TRITON_INTERPRET)", allow_module_level=True)

from heads_kernels.ops.triton import tiles

CASES: tuple[Case, ...] = (
    GatedCase("grouped", 1, 4, 200, 210, D=64, Dv=64, Hk=2, gate="H", closed=0.5, is_causal=True),
    GatedCase("wide", 1, 1, 140, 150, D=256, Dv=200, gate="BHTD", mask=masks.holes),
    GatedCase("decoding", 2, 4, 1, 300, D=64, Dv=64, Hk=2, gate="BH", mask=masks.holes),
    CollaborativeCase("few rows", 1, 2, 16, 140, Ds=256, Dv=64, content_bias=True),
    CollaborativeCase(
        "chunks", 1, 2, 90, 140, Ds=256, Dv=64, content_bias=True, gate="H", mixing="chunks"
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", ["sm_90", "sm_80", "other"])
@pytest.mark.parametrize("backend", ["triton"])
def test_tiles_of_a_kind(backend: str, kind: str, case: Case) -> None:
    with (
        mock.patch.object(tiles, "TRITON_INTERPRETED", False),
        mock.patch.object(tiles, "_kind_of_target", return_value=kind),
    ):
        report = check(case, torch.bfloat16, backend)
    assert report.ok, str(report)
