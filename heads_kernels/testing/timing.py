"""Timers for benchmarks: several callables measured in turn (A B C A B C ...), in one process. The speed of a machine
varies during a measurement; in turn all candidates see the same conditions, so that ratios of medians are reliable."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

#: Bytes written before a sample with a cold cache: 36 times the 60 MB of L2 of an H200.
FLUSH_BYTES = 1 << 31

#: Seconds that a GPU needs to write them, at 8 TB/s. They are written so often that the host should have launched all
#: kernels of the timed call before the first one starts: for twice the time that it needed once.
FLUSH_S = 2.5e-4
#: For 10 ms: a call that takes the host longer waits for the GPU.
_MOST_FLUSHES = 40

#: Shortest sample in seconds: 200 times the resolution of the clock and the cost of reading it
#: (about a microsecond together). Faster callables are repeated within a sample.
SAMPLE_S = 2e-4


@dataclass(frozen=True)
class Timing:
    """Seconds per call of every sample; each sample is the mean of `calls` calls."""

    samples: tuple[float, ...]
    calls: int

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def minimum(self) -> float:
        return min(self.samples)

    def __str__(self) -> str:
        return f"{_seconds(self.median)} (fastest {_seconds(self.minimum)} of {len(self.samples)})"


def time_in_turn(
    callables: Mapping[str, Callable[[], object]],
    *,
    device: torch.device | str = "cpu",
    budget_s: float = 2.0,
    warmup: int = 2,
    least: int = 5,
    most: int = 200,
    cold: bool = False,
    sample_s: float = SAMPLE_S,
) -> dict[str, Timing]:
    """Time every callable, taking turns, and return a `Timing` by name.

    Args:
        callables: what to time, by name, in the order of turns.
        device: of the tensors. On CUDA, time is measured between two events on the current stream.
        budget_s: seconds for all callables together, without warm-up. Rounds stop when it is spent, but not
            before `least` samples of each.
        warmup: calls of each before timing: compilation, caches, thread pools.
        least, most: bounds on the number of samples.
        cold: on CUDA, flush the GPU's L2 cache before every sample, which is then a single call.
        sample_s: shortest sample in seconds; faster callables are called several times within one. The first of these
            calls takes longer, since the callable before it has used the caches of the processor.
    """
    device = torch.device(device)
    flush = None
    if cold and device.type == "cuda":
        flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    calls: dict[str, int] = {}
    flushes: dict[str, int] = {}
    for name, function in callables.items():
        for _ in range(warmup):
            function()
        calls[name], flushes[name] = 1, 1
        first = _sample(function, 1, device, flush, 1)
        if flush is None:
            calls[name] = max(1, round(sample_s / max(first, 1e-9)))
        else:
            start = time.perf_counter()
            function()  # returns when its kernels are launched
            flushes[name] = min(1 + int(2 * (time.perf_counter() - start) / FLUSH_S), _MOST_FLUSHES)
    samples: dict[str, list[float]] = {name: [] for name in callables}
    stop = time.perf_counter() + budget_s
    for done in range(most):
        if done >= least and time.perf_counter() > stop:
            break
        for name, function in callables.items():
            samples[name].append(_sample(function, calls[name], device, flush, flushes[name]))
    return {name: Timing(tuple(taken), calls[name]) for name, taken in samples.items()}


def _sample(
    function: Callable[[], object], calls: int, device: torch.device, flush: Tensor | None, flushes: int
) -> float:
    """Mean seconds per call of `calls` calls, after writing `flush` `flushes` times."""
    if device.type == "cuda":
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        if flush is not None:
            for _ in range(flushes):
                flush.zero_()
        begin.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds * 1e-3 / calls
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def _seconds(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"
