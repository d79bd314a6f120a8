"""Output buffers of kernels, and partial sums on the GPU.

The dtype and memory order of an output are the same for kernels and for the fakes used in tracing.

On the GPU one program computes each tile of a gradient: a tile of keys of `dkey` and `dvalue`, of query rows of
`dquery`, and a tile or a diagonal of tiles of the gradient of a bias. Each pass recomputes the scores, so no atomics
are needed; `triton/gluon_backward.py` adds to `dquery` in a fixed order instead. If there are too few tiles to fill the
GPU, the sums over heads or keys are split over programs, and their float32 parts are added in order.
"""

from __future__ import annotations

import functools
import math
from typing import Final

import torch
from torch import Tensor

from heads_kernels.backends import FARTHEST_ROW

#: Queries of at most this many rows are short (decoding): the fewest rows that tensor cores multiply.
SHORT_QUERY: Final = 16
#: Fewest tiles of keys per split: with fewer, computing does not hide the loads. Heuristic.
_LEAST_TILES: Final = 4
#: Programs per multiprocessor. With one, 133 programs on 132 multiprocessors would take as long as 264. With three, at
#: most a quarter of the time is lost that way, and the parts stay small. Heuristic.
_WAVES: Final = 3


def empty_heads(like: Tensor, B: int, H: int, L: int, W: int) -> Tensor:
    """An empty `[B, H, L, W]` in the memory order of `like` `[B, H, rows, width]`.

    That is a contiguous `[B, H, L, W]`, or a transposed `[B, L, H, W]` if projections gave `like` that order: the
    reshape to `[B, L, H * W]` after attention then copies nothing.
    """
    if like.stride(1) < like.stride(2):
        return like.new_empty((B, L, H, W)).transpose(1, 2)
    return like.new_empty((B, H, L, W))


def empty_gradient(tensor: Tensor) -> Tensor:
    """A buffer for the gradient of `tensor`, dense and in its memory order.

    Rows are contiguous even where the strides do not define an order (a view whose rows overlap).
    """
    like = torch.empty_like(tensor)
    return like if like.stride(-1) == 1 else tensor.new_empty(tensor.shape)


def contiguous_rows(tensor: Tensor) -> Tensor:
    """The tensor, copied if its rows are not contiguous (such as an expanded gradient) or too far apart."""
    near = tensor.stride(-1) == 1 and tensor.stride(-2) < FARTHEST_ROW
    return tensor if near else tensor.contiguous()


def splits_of(count: int, programs: int, like: Tensor) -> int:
    """The number of programs over which a sum of `count` terms (heads) is split, so that no multiprocessor idles.

    There are `programs` such sums. Each split has `cdiv(count, splits)` terms, the last one the rest; none is empty.
    """
    if count <= 1:
        return 1
    wanted = max(1, min(count, -(-programs_wanted(like.device) // max(programs, 1))))
    return max(1, -(-count // -(-count // wanted)))


def key_splits(T: int, programs: int, tiles: int, like: Tensor) -> int:
    """The number of programs that the keys of a tile of query rows are split over in the forward pass; 1: no split.

    There are `programs` tiles of query rows, and each sees up to `tiles` tiles of keys. Only a short query, with one
    tile per head, leaves most of a GPU idle. The result depends only on sizes and the kind of device, so the same call
    gives the same bits. On the CPU (interpreter, emulator, ahead-of-time compilation) it is that of one tile of rows,
    with splits of at least one tile of keys, so that short sequences are split too.
    """
    if T > SHORT_QUERY:
        return 1
    if like.device.type != "cuda":
        return splits_of(tiles, 1, like)
    return splits_of(-(-tiles // _LEAST_TILES), programs, like)


def split_attended(out: Tensor, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 buffers for the partial results of each split of `out` [B, H, T, Dv].

    `acc` [splits, B, H, T, Dv], before the division by `row_sum`, and `row_max` and `row_sum` [splits, B, H, T].
    """
    row_max, row_sum = out.new_empty((2, splits, *out.shape[:3]), dtype=torch.float32)
    return out.new_empty((splits, *out.shape), dtype=torch.float32), row_max, row_sum


def split_parts(grad: Tensor, splits: int, dtype: torch.dtype | None = None) -> Tensor:
    """A buffer for the sum of every split: float32 `[splits * B, ...]`, or `grad` itself if there is one split.

    If `dtype` is not that of `grad`, the buffer is always separate.
    """
    if grad.numel() == 0 or (splits == 1 and dtype in (None, grad.dtype)):
        return grad
    return grad.new_empty((splits * grad.shape[0], *grad.shape[1:]), dtype=torch.float32)


def sum_parts(parts: Tensor, grad: Tensor, splits: int) -> None:
    """Fill `grad` with the sum of the splits' `parts`, in their order."""
    if parts is not grad:
        grad.copy_(parts.view(splits, *grad.shape).sum(0))


@functools.cache
def programs_wanted(device: torch.device) -> int:
    """The number of programs that keeps the GPU busy; 4 if kernels run on the CPU, so that splits occur there too."""
    if device.type != "cuda":
        return 4
    return _WAVES * int(torch.cuda.get_device_properties(device).multi_processor_count)


def programs_in_turn(count: int, of_example: int, device: torch.device) -> int:
    """The number of programs that take turns with `count` tiles, `of_example` of each example.

    It has no common factor with `of_example`: else some programs would have all tiles of a head, or the last of each.
    """
    programs = min(count, programs_wanted(device))
    while programs < count and math.gcd(programs, of_example) > 1:
        programs -= 1
    return programs
