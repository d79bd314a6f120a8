"""Full tiles through tensor descriptors: which calls take them, and that they compute what pointers do."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="pip install 'heads_kernels[triton]'")

from heads_kernels.backends import TRITON_INTERPRETED
from heads_kernels.ops.triton import forward
from heads_kernels.ops.triton.load import describable, tiles_in
from heads_kernels.ops.triton.tiles import tiles_for
from heads_kernels.testing import Case, CollaborativeCase, GatedCase, check, masks
from tests.ops.calls import on_kind_of_gpu

SIZES = (2, 3, 300, 64)


def rows(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0)).half()


def projected(*sizes: int) -> Tensor:
    """A view of what a projection gives: rows, then heads, beside other columns."""
    B, H, L, W = sizes
    return rows(B, L, 2 * H, W)[:, :, H:].transpose(1, 2)


LAYOUTS: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "contiguous": (rows, True),
    "projected": (projected, True),
    "one batch, odd stride": (lambda B, H, L, W: rows(1, H, L, W).as_strided((1, H, L, W), (7, L * W, W, 1)), True),
    "batch of stride 0": (lambda B, H, L, W: rows(1, H, L, W).expand(B, -1, -1, -1), False),
    "head of stride 0": (lambda B, H, L, W: rows(B, 1, L, W).expand(-1, H, -1, -1), False),
    "rows of an odd stride": (lambda B, H, L, W: rows(B, H, L, W + 1)[..., :W], False),
    "base of 2 bytes": (lambda B, H, L, W: rows(B * H * L * W + 1)[1:].view(B, H, L, W), False),
    "float32": (lambda *sizes: rows(*sizes).float(), False),
    "no rows": (lambda B, H, L, W: rows(B, H, 0, W), False),
}  # fmt: skip


@pytest.mark.parametrize(("layout", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_describable(layout: Callable[..., Tensor], expected: bool) -> None:
    tensor = layout(*SIZES)
    assert describable(tensor) is expected
    if expected:
        descriptor = tiles_in(tensor, 128, 64)  # Triton's own checks
        assert descriptor.block_shape == [1, 1, 128, 64]


@pytest.mark.parametrize("kernel", ["gated_attention.forward", "collaborative_attention.forward"])
@pytest.mark.parametrize("kind", ["sm_100", "sm_90", "sm_80", "other"])
def test_tiles_of_descriptors(kind: str, kernel: str) -> None:
    """They are for sm_90 and newer, without terms, and not for queries of a few rows."""

    def steps(T: int, terms: bool, descriptors: bool) -> int:
        like = torch.empty(1, 1, T, 128, dtype=torch.bfloat16)
        with on_kind_of_gpu(kind):
            return tiles_for(kernel, like, 128, 128, terms, descriptors).full_tiles

    assert steps(512, False, True) == (2 if kind in ("sm_90", "sm_100") and kernel[0] == "g" else 0)
    assert steps(512, True, True) == steps(512, False, False) == steps(1, False, True) == 0


CASES: tuple[tuple[Case, bool], ...] = (
    (GatedCase("full alone", 1, 2, 40, 128, D=16, Dv=16), True),
    (GatedCase("causal", 2, 4, 140, 300, D=40, Dv=24, Hk=2, is_causal=True, gate="H", closed=0.5), True),
    (GatedCase("odd number of full tiles", 1, 2, 40, 150, D=64, Dv=16, mask=masks.padded(127, queries=False)), True),
    (GatedCase("holes", 1, 2, 33, 300, D=16, Dv=16, mask=masks.holes), True),
    (GatedCase("transposed", 2, 2, 64, 200, D=16, Dv=8, layout="transposed"), True),
    (GatedCase("rows of an odd width", 1, 2, 40, 128, D=20, Dv=16), False),
    (GatedCase("softcap", 1, 2, 40, 128, D=16, Dv=16, softcap=5.0), False),
    (CollaborativeCase("collaborative", 1, 2, 40, 128, Ds=32, Dv=16), False),
)  # fmt: skip


@pytest.mark.skipif(not TRITON_INTERPRETED, reason="kernels are not interpreted")
@pytest.mark.parametrize(("case", "expected"), CASES, ids=lambda value: str(value))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["triton"])
def test_results(backend: str, dtype: torch.dtype, case: Case, expected: bool) -> None:
    """Interpreted steps over full tiles take two of them, so that loops have steps and tiles that are left over."""
    with (
        mock.patch.object(forward, "FEWEST_KEYS", 0),
        mock.patch.object(forward, "tiles_in", wraps=tiles_in) as described,
    ):
        report = check(case, dtype, backend)
    assert report.ok, str(report)
    assert described.called is expected
