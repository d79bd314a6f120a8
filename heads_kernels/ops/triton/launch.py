"""How a kernel is launched: on the device of its tensors, with the tiles that were chosen for it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from heads_kernels.ops.triton.tiles import Tiles


def launch(
    kernel: Any, programs: int, like: Tensor, tiles: Tiles, *args: Any, **constants: Any
) -> None:
    """Run `programs` programs of `kernel` on the device and the current stream of `like`."""
    if programs == 0:
        return
    elsewhere = like.is_cuda and like.device.index != torch.cuda.current_device()
    with torch.cuda.device(like.device) if elsewhere else contextlib.nullcontext():
        kernel[(programs,)](*args, **constants, **tiles.launch_options)
