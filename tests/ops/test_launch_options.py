"""What Triton is asked for when a kernel is launched, beside its arguments, and how many programs share its work."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="pip install 'heads_kernels[triton]'")

from heads_kernels.ops import buffers
from heads_kernels.ops.triton import tiles
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.tiles import Tiles, tiles_for


class Recorder:
    """Stands in for a kernel: `kernel[grid](...)` keeps its keywords."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.options.update(options)


def options_of(tiles: Tiles) -> dict[str, Any]:
    kernel = Recorder()
    launch(kernel, 1, torch.empty(0), tiles)
    return kernel.options


def test_fused_multiply_add_is_asked_for() -> None:
    """Triton 3.10 fuses only where it is asked to; 3.9 warns of it where it is not."""
    assert options_of(Tiles(32, 32, 0, 0, 4, 1))["enable_fp_fusion"] is True


def test_registers_are_limited_where_tiles_say_so() -> None:
    """AMD's compiler refuses the option: it is left out without a limit."""
    assert "maxnreg" not in options_of(Tiles(32, 32, 0, 0, 4, 1))
    assert options_of(Tiles(32, 32, 0, 0, 4, 1, maxnreg=128))["maxnreg"] == 128


def test_heads_are_split_into_several_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many programs as multiprocessors leave most of them idle while a second wave of a few runs."""
    monkeypatch.setattr(buffers, "_programs_wanted", lambda device: 3 * 132)
    like = torch.empty(0)
    assert buffers.splits_of(32, 150, like) == 3  # 450 programs, not 150
    assert buffers.splits_of(32, 400, like) == 1
    assert buffers.splits_of(2, 10, like) == 2


@pytest.mark.parametrize("kind", ["sm_100", "sm_90", "sm_80", "other"])
@pytest.mark.parametrize("kernel", ["gated_attention.forward", "collaborative_attention.queries"])
def test_short_queries_have_short_tiles(kernel: str, kind: str) -> None:
    with (
        mock.patch.object(tiles, "TRITON_INTERPRETED", False),
        mock.patch.object(tiles, "_kind_of_target", return_value=kind),
    ):
        rows = {
            T: tiles_for(kernel, torch.empty(1, 1, T, 64, dtype=torch.bfloat16), 64, 64).block_m
            for T in (1, 16, 17)
        }
    assert rows[1] == rows[16] == 16
    assert rows[17] > 16
