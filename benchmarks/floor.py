"""The least time that a call can take by the most that this machine does.

    floor = max(FLOPs / product rate + exponentials / exp rate, bytes / copy bandwidth)

Products and exponentials run on the same ports of a core, so their times add; loads and stores run
beside them. FLOPs and exponentials are those of `Workload`: 2 per multiply-add and one exp a visible
pair of an open head, forward as backward. Bytes are those of the inputs that count (visible rows of
open heads), read once, and of the results, written once and whole, for hidden rows and closed heads
are written as zeros.

The rates are the highest that were seen, on the present number of threads and the instruction-set
level in use, taken in turn with the kernels:

- multiply-adds of registers (csrc/cpu/peak.h), as the kernels have them for the dtype: pairs of
  bfloat16 or tiles at the levels that have them, double in float64, else float
- the kernels' own exp, of registers too
- a copy between two buffers, as many bytes in all as the call moves, so that it has the caches that
  the call has

What the floor leaves out makes real calls slower: row maxima and sums, masks, scale and gate, casts,
the mixed query of collaborative attention, packing, loads of what is multiplied, tiles at the border
of a mask, edges of tiles, starting threads and waiting for the last, the call itself. A call that
only reads, where a copy writes as well, can come out below it where bytes are the bound.

Beside it stands the rate of torch.mm, 1024 x 1024 in float32 (float64 in a float64 run): what a
vendor's library makes of the same processor, which may be far from the most (MKL on AMD: half).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from benchmarks.problems import Direction, Workload
from heads_kernels.testing import Inputs, Timing

#: Side of torch.mm's matrices. On 2 cores with AVX-512 512 reaches 80 % of the rate of 1536, 1024 93
#: to 100 % in a third of its time.
_SIDE: Final = 1024
#: Steps of a thread: half a millisecond of products and one of powers at AVX-512, of which starting
#: the threads is a hundredth.
_PRODUCT_STEPS: Final = 100_000
_POWER_STEPS: Final = 50_000
#: Past this copies run at the speed of memory, whatever the size.
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
    gexps: float
    gbytes: float


class Yardstick:
    """What is timed beside a workload, and the floor that follows."""

    def __init__(self, workload: Workload, direction: Direction, inputs: tuple[Inputs, ...]):
        from heads_kernels import _cpu  # runs without a floor need no extension

        self._cpu = _cpu
        self._flops, self._exps = workload.flops(direction), workload.exps()
        self._bytes = sum(_bytes(one, workload.open_heads, direction) for one in inputs)
        self._dtype = inputs[0].dout.dtype
        wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        self._copied = min(max(self._bytes // 2, 1), _MOST_BYTES)
        self._products = self._powers = 0  # of a call
        self.calls: dict[str, Callable[[], object]] = {
            "products": self._run_products,
            "powers": self._run_powers,
            "copy": _copy(self._copied),
            "sgemm": _product(wide),
        }

    def _run_products(self) -> None:
        self._products = self._cpu.run_products(
            self._dtype, _PRODUCT_STEPS, torch.get_num_threads()
        )

    def _run_powers(self) -> None:
        self._powers = self._cpu.run_powers(self._dtype, _POWER_STEPS, torch.get_num_threads())

    def floor(self, times: Mapping[str, Timing]) -> Floor:
        """From the times of `calls` and of `ours`."""
        product = 2 * self._products / times["products"].minimum
        exps = self._powers / times["powers"].minimum
        bandwidth = 2 * self._copied / times["copy"].minimum
        arithmetic = self._flops / product + self._exps / exps
        seconds = max(arithmetic, self._bytes / bandwidth)
        return Floor(
            seconds * 1e3,
            times["ours"].median / seconds,
            "arithmetic" if seconds == arithmetic else "bytes",
            str(self._dtype).removeprefix("torch."),
            product * 1e-9,
            2 * _SIDE**3 / times["sgemm"].median * 1e-9,
            exps * 1e-9,
            bandwidth * 1e-9,
        )


def _bytes(inputs: Inputs, open_heads: int, direction: Direction) -> int:
    """Bytes that a call has to read and write."""
    problem = inputs.problem()
    visible = problem.intervals.to_dense(problem.T, problem.S, problem.query.device)
    rows, keys = (float(visible.any(dim).float().mean()) for dim in (-1, -2))
    share = open_heads / max(problem.H, 1)

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


def _product(dtype: torch.dtype) -> Callable[[], object]:
    left, right, out = (torch.ones(_SIDE, _SIDE, dtype=dtype) for _ in range(3))
    return lambda: torch.mm(left, right, out=out)


def _copy(size: int) -> Callable[[], object]:
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    return lambda: target.copy_(source)
