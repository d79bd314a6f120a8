"""What Triton is asked for when a kernel is launched, beside its arguments, and how many programs share its work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="pip install 'heads_kernels[triton]'")

from heads_kernels.ops import buffers
from heads_kernels.ops.triton import tiles
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.operands import Bias, Rows, Terms
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


class Searched(Recorder):
    """A kernel that counts how often Triton looks for its compiled form, and how often that is launched."""

    arg_names = ("rows", "terms", "flags", "size", "factor", "BLOCK", "KIND")

    def __init__(self) -> None:
        super().__init__()
        self.searches = self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            self.searches += 1
            return Compiled(self)

        return run


class Compiled:
    def __init__(self, kernel: Searched) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any) -> None:
            self.kernel.launches += 1
            assert len(args) == len(self.kernel.arg_names)

        return run


def test_compiled_kernel_is_kept_for_arguments_like_its_own() -> None:
    """Whatever Triton may compile for asks it again: dtypes, alignment, None, numbers, constants and options."""
    kernel = Searched()
    memory = torch.zeros(64, dtype=torch.int32)
    words, bias = memory.view(2, 2, 4, 4), Bias(memory, 1, 0, 0, 8, 4, 1)
    tiles, terms = Tiles(32, 32, num_warps=4, num_stages=1), Terms(bias, None, 0.5, memory, None)
    rows = Rows(words, 32, 16, 4)
    base: dict[str, Any] = {"rows": rows, "terms": terms, "flags": memory, "size": 16, "factor": 0.5,
        "BLOCK": 32, "KIND": "rows", "tiles": tiles}  # fmt: skip
    odd = memory[1:]  # 4 bytes on: not a multiple of 16
    changes: list[dict[str, Any]] = [
        {},
        {"rows": rows._replace(ptr=words.view(torch.float32))},
        {"rows": rows._replace(ptr=odd)},
        {"rows": rows._replace(stride_l=1)},
        {"rows": None},
        {"terms": terms._replace(bias=None)},
        {"terms": terms._replace(bias=bias._replace(ptr=odd))},
        {"terms": terms._replace(bias=bias._replace(stride_s=0))},
        {"terms": terms._replace(far_bias=1)},
        {"terms": terms._replace(softcap=None)},
        {"terms": terms._replace(sinks=None, alpha=memory)},
        {"terms": terms._replace(sinks=odd)},
        {"flags": memory.view(torch.uint8)},
        {"flags": odd},
        {"flags": None},
        {"size": 1},
        {"size": 17},
        {"factor": None},
        {"BLOCK": 64},
        {"KIND": "heads"},
        {"tiles": replace(tiles, num_warps=8)},
        {"tiles": replace(tiles, num_stages=2)},
        {"tiles": replace(tiles, maxnreg=128)},
    ]
    for again in (False, True):
        for change in changes:
            own = base | change
            constants = {name: own[name] for name in ("BLOCK", "KIND")}
            args = [own[name] for name in kernel.arg_names if name not in constants]
            launch(kernel, 1, memory, own["tiles"], *args, **constants)
        assert (kernel.searches, kernel.launches) == (len(changes), len(changes) * again)


def test_fused_multiply_add_is_asked_for() -> None:
    """Triton 3.10 fuses only where it is asked to; 3.9 warns of it where it is not."""
    assert options_of(Tiles(32, 32, num_warps=4, num_stages=1))["enable_fp_fusion"] is True


def test_registers_are_limited_where_tiles_say_so() -> None:
    """AMD's compiler refuses the option: it is left out without a limit."""
    assert "maxnreg" not in options_of(Tiles(32, 32, num_warps=4, num_stages=1))
    assert options_of(Tiles(32, 32, num_warps=4, num_stages=1, maxnreg=128))["maxnreg"] == 128


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
