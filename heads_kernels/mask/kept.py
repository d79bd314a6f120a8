"""What masks cache on a device, and when it is still valid. Nothing here synchronises with a GPU.

The layers of a model share one mask, and computing its intervals costs as much as a short call: on a GPU about nine
small kernels for a `key_mask`.

While a CUDA graph is captured, the cache is neither filled nor read: a graph that read it would read the same values in
every replay. Results of one stream are not used on another, which would have to wait for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor

#: Most tensors that are kept, of lists of lengths and of distances for different S. Heuristic.
_TENSORS: Final = 64

CPU: Final = torch.device("cpu")


def traced() -> bool:
    """Whether this code is being compiled or transformed."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def is_watched() -> bool:
    """Whether tensors may be placeholders: traced, transformed, or in a mode such as that of fake tensors."""
    return traced() or bool(torch._C._len_torch_dispatch_stack())


def readable(tensor: Tensor) -> bool:
    """Whether its values may be read: on the CPU, not traced, not fake, not transformed."""
    return not traced() and type(tensor) is Tensor and tensor.is_cpu


def capturing(device: torch.device) -> bool:
    """Whether what runs on `device` now becomes part of a CUDA graph."""
    if device == CPU:  # faster than reading `device.type`
        return False
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def state_of(tensors: Iterable[Tensor], device: torch.device) -> object:
    """What `is_unchanged` needs to know later whether `tensors` hold the same values; None if that cannot be known.

    Call it only if `is_watched` is False. On the CPU the state is copies of the tensors. On a GPU, where comparing them
    would synchronise, it is their addresses and PyTorch's counts of writes to them.
    """
    if device == CPU:
        return [t.clone() for t in tensors] if all(map(readable, tensors)) else None
    if not _keeps(device) or not all(type(t) is Tensor and t.device.type == device.type for t in tensors):
        return None
    if any(t.is_inference() for t in tensors):  # they count no writes
        return None
    written = [(t.dtype, t.shape, t.stride(), t.data_ptr(), t._version) for t in tensors]
    return _stream(device), written


def is_unchanged(tensors: Iterable[Tensor], state: Any, device: torch.device) -> bool:
    """Whether `tensors` hold the same values as when `state_of` returned `state`, which is not None."""
    if device != CPU:
        return bool(state == state_of(tensors, device))
    return all(
        readable(t) and t.dtype == copy.dtype and torch.equal(t, copy) for t, copy in zip(tensors, state, strict=True)
    )


def lengths_on(device: torch.device, lengths: tuple[int, ...]) -> Tensor:
    """`lengths` as int64 on `device`; equal lists are copied to a GPU once."""
    if capturing(device) and not is_watched():
        return _filled(lengths, device)
    return _made(_lengths, lengths, device)


def distances_on(device: torch.device, S: int) -> Tensor:
    """int32 `[2, 1, S]` on `device`: the distance of each key from the end, S to 1, and from the start, 1 to S."""
    return _made(_distances, S, device)


def _made(make: Callable[[Any, torch.device], Tensor], of: Any, device: torch.device) -> Tensor:
    """`make(of, device)`, or what it has returned before."""
    if is_watched() or not (device == CPU or _keeps(device)) or capturing(device):
        return make(of, device)
    return _kept(make, of, device, _stream(device))


@functools.lru_cache(maxsize=_TENSORS)
def _kept(make: Callable[[Any, torch.device], Tensor], of: Any, device: torch.device, stream: int) -> Tensor:
    with torch.inference_mode(False):  # a later call may not be in it
        return make(of, device)


def _lengths(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int64, device=device)


def _distances(S: int, device: torch.device) -> Tensor:
    from_start = torch.arange(1, S + 1, dtype=torch.int32, device=device)
    return torch.stack((from_start.flip(0), from_start)).unsqueeze(1)


def _filled(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """`lengths` on `device` without a copy from the host, which a graph cannot contain: one kernel per length."""
    filled = torch.empty(len(lengths), dtype=torch.int64, device=device)
    for place, length in zip(filled.unbind(), lengths, strict=True):
        place.fill_(length)
    return filled


def _keeps(device: torch.device) -> bool:
    if device.type == "cuda":  # before CUDA is initialized, tensors on it are fake
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return device.type == "meta"


def _stream(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return stream
