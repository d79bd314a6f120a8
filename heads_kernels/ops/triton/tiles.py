"""Which tiles a kernel runs with: frozen values of the kind of GPU, overridden by what was measured on that very one.

`heads_kernels/tuned/<gpu>.json`, written by `python -m benchmarks.tune`, holds measured tiles; what it does not hold
comes from `kinds`.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, fields, replace
from importlib import resources

import torch
from torch import Tensor
from triton.runtime import driver

from heads_kernels.ops.support import TRITON_INTERPRETED
from heads_kernels.ops.triton.chunks import MOST_CHUNKS
from heads_kernels.ops.triton.kinds import kind_of, numbers_of_kind


@dataclass(frozen=True)
class Tiles:
    """Sizes of a kernel's tiles: query rows, keys, features of a step, features of a slice; 0 where it has none."""

    block_m: int
    block_n: int
    block_d: int
    block_slice: int
    num_warps: int
    num_stages: int

    @property
    def launch_options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def tiles_for(kernel: str, like: Tensor, D: int, Dv: int, terms: bool = False) -> Tiles:
    """The tiles of `kernel` on the GPU that holds `like`, for a call of these widths in the dtype of `like`.

    D is the width of scores (`Ds` of collaborative attention), Dv that of values, 0 where there are none; `terms`
    whether scores have a bias or a cap, or the mask is dense: then tiles measured without them may not fit.
    """
    if TRITON_INTERPRETED:
        return _interpreted(like, D)
    gpu, kind = _named(like.device.index) if like.is_cuda else ("", _kind_of_target())
    return _chosen(kernel, gpu, kind, like.dtype, D, Dv, terms)


def padded(width: int) -> int:
    """The power of two that a tile of this width has: at least 16, the depth of a tensor core's product."""
    return 1 << (max(width, 16) - 1).bit_length()


def chunks_of(Ds: int, block_d: int) -> int:
    """How many chunks of a step's width `Ds` has, rounded up to a power of two."""
    return 1 << (max(2, -(-Ds // block_d)) - 1).bit_length()


@functools.cache
def _chosen(
    kernel: str, gpu: str, kind: str, dtype: torch.dtype, D: int, Dv: int, terms: bool
) -> Tiles:
    name = str(dtype).removeprefix("torch.")
    tuned = _tuned(gpu).get((kernel, name, padded(D), padded(Dv)))
    if tuned is not None and not terms:
        return tuned
    shared = "collaborative" in kernel
    width = padded(Dv if shared else max(D, Dv))
    tiles = Tiles(*numbers_of_kind(kind, kernel, dtype.itemsize == 2, width, terms))
    return _within(tiles, D) if shared else tiles


def _within(tiles: Tiles, Ds: int) -> Tiles:
    """The same with steps and slices no wider than `Ds`, and steps wide enough for the list of chunks."""
    step = max(min(tiles.block_d, padded(Ds)), padded(-(-Ds // MOST_CHUNKS)))
    return replace(tiles, block_d=step, block_slice=min(tiles.block_slice, padded(Ds)))


def _interpreted(like: Tensor, D: int) -> Tiles:
    """Tiles that leave several to a short sequence, several chunks to a narrow query, and few to what is long."""
    T = like.shape[-2]
    block_m, block_n = (16, 64) if T <= 16 else (32, 32) if T <= 128 else (128, 128)
    return Tiles(block_m, block_n, padded(-(-D // 8)), min(64, padded(D)), 4, 1)


@functools.cache
def _named(index: int) -> tuple[str, str]:
    """The name of a GPU as its file of tuned tiles has it, "nvidia-h200", and its kind."""
    name = torch.cuda.get_device_name(index).lower()
    capability = None if torch.version.hip else torch.cuda.get_device_capability(index)
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-"), kind_of(capability)


def _kind_of_target() -> str:
    """The kind that Triton compiles for where no GPU holds the tensors: kernels are compiled ahead of time then."""
    target = driver.active.get_current_target()
    return kind_of(divmod(target.arch, 10) if target.backend == "cuda" else None)


@functools.cache
def _tuned(gpu: str) -> dict[tuple[str, str, int, int], Tiles]:
    """What was measured on a GPU, by kernel, dtype and padded widths; empty where nothing was."""
    path = resources.files("heads_kernels") / "tuned" / f"{gpu}.json"
    if not gpu or not path.is_file():
        return {}
    names = [field.name for field in fields(Tiles)]
    return {
        (row["kernel"], row["dtype"], row["D"], row["Dv"]): Tiles(*(row[name] for name in names))
        for row in json.loads(path.read_text(encoding="utf-8"))["tiles"]
    }
