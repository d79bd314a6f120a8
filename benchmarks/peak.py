"""Peak memory of a call, beyond what it returns; and the part `memory` of a run, which compares candidates by it.

On CUDA it is the count of PyTorch's allocator. On the CPU, where kernels also allocate outside of PyTorch,
it is the resident set of this process, measured as precisely as the machine allows.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
import torch.utils._pytree as pytree

from benchmarks import checks
from benchmarks.candidates import BASELINES, RIVALS, Call, NotRun, attention, further_backends
from benchmarks.goals import GPU_MEMORY
from benchmarks.measure import Column, Found, Row
from benchmarks.settings import Settings
from benchmarks.workloads import DIRECTIONS, Direction, table
from heads_kernels.testing import Inputs, find

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
    """A field of /proc/self/status in bytes."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError as error:
        raise RuntimeError("peak memory on the CPU is read from procfs, which Linux has") from error
    return next(int(s.split()[1]) * 1024 for s in lines if s.startswith(f"{field}:"))


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


# ---------------------------------------------------------------------- of candidates
_COLUMNS: Final[dict[str, Column]] = {
    "": "{case}",
    "candidate": "{candidate}",
    "pass": lambda row: "forward" if row["direction"] == "forward" else "forward and backward",
    "MiB": lambda row: "-" if row["extra"] is None else f"{row['extra'] / 2**20:,.1f}",
    "not measured": "{how}",
}


def memory(settings: Settings) -> Iterator[Found]:
    """Of a long call, which has to grow with T and not with T^2, and of a pair bias.

    Eager PyTorch keeps about two `[T, S]` matrices of all heads at once in the forward pass and about five with
    gradients. It is run where the machine has memory for 4 and 8 (`candidates.MATRICES`).
    """
    found = Found("memory", "Peak memory beyond inputs and results", _COLUMNS)
    for name, inputs in _cases(settings, found):
        for direction in DIRECTIONS:
            others = (*further_backends(inputs, settings.device), *RIVALS[settings.device])
            for candidate in ("ours", *others):
                found.rows.append(_row(name, inputs, candidate, direction))
    yield found


def _cases(settings: Settings, found: Found) -> Iterator[tuple[str, Inputs]]:
    """Calls by name. Those of a GPU are workloads, which have been checked."""
    every = {workload.name: workload for workload in table(settings)}
    if settings.device == "cuda":
        names = [name for pair in GPU_MEMORY for name in pair if name in every] or [*every][:1]
        for name in names:
            yield name, every[name].make(settings.dtype, settings.place)[0]
        return
    T = 1024 if settings.form == "smoke" else 8192
    long = replace(find("gated_attention", "long_8192"), T=T, S=T).make(settings.dtype)
    failures = checks.check_long(long)
    found.failures += [f"memory: {failure}" for failure in failures]
    if not failures:
        yield f"B1 H8 T{T} D64", long
    if "pair_bias_H4" in every:  # in all forms but quick
        yield "pair_bias_H4", every["pair_bias_H4"].make(settings.dtype, settings.place)[0]


def _row(case: str, inputs: Inputs, candidate: str, direction: Direction) -> Row:
    row: Row = {"case": case, "direction": direction, "candidate": candidate, "extra": None, "how": ""}
    try:
        step = _step(inputs, candidate, direction)
        if inputs.dout.is_cuda:
            step()  # compiles
        else:
            _step(_first_rows(inputs), candidate, direction)()  # thread pools, code
        row["extra"] = peak_memory(step, inputs.dout.device).extra
    except (NotRun, RuntimeError) as reason:
        if candidate not in BASELINES:
            raise
        row["how"] = " ".join(str(reason).split())[:60]
    return row


def _step(inputs: Inputs, candidate: str, direction: Direction) -> Call:
    leaves = inputs.requires_grad()
    call = attention(candidate, leaves, flex=False, direction=direction)

    def forward() -> object:
        with torch.no_grad():
            return call()

    def both() -> object:
        out = call()
        return out.detach(), torch.autograd.grad(out, list(leaves.tensors.values()), leaves.dout)

    return forward if direction == "forward" else both


def _first_rows(inputs: Inputs) -> Inputs:
    tensors = {n: t[:, :, :64] if t.dim() == 4 else t for n, t in inputs.tensors.items()}
    if "bias" in tensors:
        tensors["bias"] = tensors["bias"][..., :64]
    return replace(inputs, tensors=tensors, dout=inputs.dout[:, :, :64])
