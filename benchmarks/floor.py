"""The least time that a call can take by the most that this machine does.

    floor = max(FLOPs / product rate + exponentials / exp rate, bytes / copy bandwidth)

Products and exponentials run on the same ports of a core, so their times add; loads and stores run beside them. FLOPs
are those of `workloads.flops`, and every visible pair of an open head takes one exponential, forward and backward.
Bytes are those of the inputs that count (visible rows of open heads), read once, and of the whole results, written
once: hidden rows and closed heads are written as zeros.

The rates are the highest that were seen, on the present number of threads and the instruction-set
level in use, taken in turn with the kernels:

- multiply-adds of registers (csrc/cpu/peak.h), as the kernels have them for the dtype: pairs of
  bfloat16 or tiles at the levels that have them, double in float64, else float
- the kernels' own exp, of registers too
- a copy between two buffers, as many bytes in all as the call moves, so that it has the caches that
  the call has

What the floor leaves out makes real calls slower: row maxima and sums, masks, gates, casts, packing, borders of tiles,
starting threads, the call itself. A call that only reads, where a copy writes as well, can come out below it where
bytes are the bound.

Beside it stands the rate of torch.mm, 1024 x 1024 in float32 (float64 in a float64 run): what a vendor's library makes
of the same processor, which may be far from the most (MKL on AMD: half). On a GPU the product rate is that of torch.mm,
8192 x 8192 of random numbers in the dtype of the call, and exponentials are left out: they run beside the tensor cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from benchmarks.settings import word
from benchmarks.workloads import Direction, flops
from heads_kernels.testing import Inputs, Timing

#: Side of torch.mm's matrices. On 2 cores with AVX-512 512 reaches 80 % of the rate of 1536, 1024 93
#: to 100 % in a third of its time.
_SIDE: Final = 1024
#: Of a GPU's: 2 ms on an H100.
_GPU_SIDE: Final = 8192
#: Steps of a thread: half a millisecond of products and one of powers at AVX-512, of which starting
#: the threads is a hundredth.
_STEPS: Final = {"products": 100_000, "powers": 50_000}
#: Past this copies run at the speed of memory, whatever the size; a GPU has its L2 cache flushed.
_MOST_BYTES: Final = 1 << 26


@dataclass(frozen=True)
class Floor:
    """Milliseconds, what they consist of, and the rates in GFLOP/s, 1e9 exp/s and GB/s.

    gap      our median time by `ms`
    bound    arithmetic or bytes
    product  dtype of the operands
    gflops   the most of their products; `sgemm` is what torch.mm makes in float32 (float64 in a
             float64 run)

    In runs kept before there was a peak, `gflops` is the rate of torch.mm in `product`.
    """

    ms: float
    gap: float
    bound: str
    product: str
    gflops: float
    sgemm: float
    gexps: float | None
    gbytes: float


class Yardstick:
    """What is timed beside a workload, and the floor that follows."""

    def __init__(self, inputs: tuple[Inputs, ...], direction: Direction):
        self._flops, self._exps = flops(inputs, direction), sum(map(_exps, inputs))
        self._bytes = sum(_bytes(one, direction) for one in inputs)
        self._dtype, place = inputs[0].dout.dtype, inputs[0].dout.device
        self._copied = max(self._bytes // 2, 1)
        self._counts: dict[str, int] = {}  # of products and powers in a call
        self.calls: dict[str, Callable[[], object]] = {}
        wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        if place.type == "cuda":
            self._side, wide = _GPU_SIDE, self._dtype
        else:
            self._side, self._copied = _SIDE, min(self._copied, _MOST_BYTES)
            self.calls = {name: partial(self._run, name) for name in _STEPS}
        self.calls |= {"copy": _copy(self._copied, place), "sgemm": _product(self._side, wide, place)}

    def _run(self, name: str) -> None:
        from heads_kernels import _cpu  # runs without a floor need no extension

        run = _cpu.run_products if name == "products" else _cpu.run_powers
        self._counts[name] = run(self._dtype, _STEPS[name], torch.get_num_threads())

    def floor(self, times: Mapping[str, Timing]) -> Floor:
        """From the times of `calls` and of `ours`."""
        sgemm = 2 * self._side**3 / times["sgemm"].median
        product, exps = sgemm, math.inf
        if "products" in times:
            product = 2 * self._counts["products"] / times["products"].minimum
            exps = self._counts["powers"] / times["powers"].minimum
        bandwidth = 2 * self._copied / times["copy"].minimum
        arithmetic = self._flops / product + self._exps / exps
        seconds = max(arithmetic, self._bytes / bandwidth)
        return Floor(
            seconds * 1e3,
            times["ours"].median / seconds,
            "arithmetic" if seconds == arithmetic else "bytes",
            word(self._dtype),
            product * 1e-9,
            sgemm * 1e-9,
            None if exps == math.inf else exps * 1e-9,
            bandwidth * 1e-9,
        )


def _exps(inputs: Inputs) -> int:
    """Exponentials of a pass in either direction: one a visible pair of an open head."""
    problem = inputs.parsed()
    is_open = problem.open_heads()
    return int((problem.visible_pairs().to(is_open.device) * is_open).sum())


def _bytes(inputs: Inputs, direction: Direction) -> int:
    """Bytes that a call has to read and write."""
    problem = inputs.parsed()
    visible = problem.intervals.to_dense(problem.T, problem.S, problem.query.device)
    rows, keys = (float(visible.any(dim).float().mean()) for dim in (-1, -2))
    share = float(problem.open_heads().float().mean())

    def size(name: str, part: float) -> float:
        tensor = inputs.tensors[name]
        return tensor.nbytes * part * (share if tensor.dim() == 4 else 1.0)

    names = ("query", "key", "value", "bias")
    out, read = inputs.dout.nbytes, size("query", rows) + size("key", keys) + size("value", keys)
    read += size("bias", rows) if "bias" in inputs.tensors else 0
    if direction == "forward":
        return round(read + out)
    gradients = sum(inputs.tensors[name].nbytes for name in names if name in inputs.tensors)
    return round(read + 2 * rows * share * out + gradients)  # out and dout are read


def _product(side: int, dtype: torch.dtype, place: torch.device) -> Callable[[], object]:
    left, right, out = torch.randn(3, side, side, device=place).to(dtype)
    return lambda: torch.mm(left, right, out=out)


def _copy(size: int, place: torch.device) -> Callable[[], object]:
    source, target = torch.ones(2, size, dtype=torch.uint8, device=place)
    return lambda: target.copy_(source)
