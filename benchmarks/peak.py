"""Peak memory of a call, beyond what it returns.

On CUDA it is the count of PyTorch's allocator. On the CPU, where kernels also allocate outside of PyTorch,
it is the resident set of this process, measured as precisely as the machine allows.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.utils._pytree as pytree

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): resets VmHWM to the current resident set


@dataclass(frozen=True)
class Peak:
    """Bytes: `extra` at the peak, without the result and memory in use before; `result` itself.

    `how`: "cuda" (the allocator's count), "peak" (VmHWM: exact to a few pages) or "sampled"
    (every millisecond by a thread, which misses shorter peaks).
    """

    extra: int
    result: int
    how: str


def peak_memory(function: Callable[[], object], device: torch.device | str | None = None) -> Peak:
    """Call `function` once and measure its peak memory on `device` (None: the default one), without its result.

    Call it once before, so that code, thread pools and caches exist already. Memory that the
    C library keeps from earlier calls is returned first, since its reuse would not be seen.
    """
    device = torch.get_default_device() if device is None else torch.device(device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = function()
        torch.cuda.synchronize(device)
        peak, how = torch.cuda.max_memory_allocated(device), "cuda"
    elif _resettable():
        _trim()
        before = _status("VmRSS")
        _CLEAR_REFS.write_text(_RESET_PEAK)
        result = function()
        peak, how = _status("VmHWM"), "peak"
    else:
        _trim()
        before = _status("VmRSS")
        with _Sampler() as sampler:
            result = function()
        peak, how = sampler.peak, "sampled"
    held = _bytes(result)
    return Peak(max(0, peak - before - held), held, how)


def _bytes(result: object) -> int:
    """Bytes of the storages of the tensors in `result`, each counted once."""
    storages = {
        leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes()
        for leaf in pytree.tree_leaves(result)
        if isinstance(leaf, torch.Tensor)
    }
    return sum(storages.values())


def _resettable() -> bool:
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _trim() -> None:
    """Return free pages to the system; glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status(field: str) -> int:
    """A field of /proc/self/status in bytes; 0 on a system without procfs."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(s.split()[1]) * 1024 for s in lines if s.startswith(f"{field}:")), 0)


class _Sampler:
    """The largest resident set seen by a thread while the block runs."""

    def __init__(self) -> None:
        self.peak = _status("VmRSS")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._look()
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.is_set():
            self._look()
            time.sleep(1e-3)

    def _look(self) -> None:
        self.peak = max(self.peak, _status("VmRSS"))
