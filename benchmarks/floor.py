"""The least time that a call can take by rates that this machine has been seen to reach.

    floor = max(FLOPs / matrix-product rate + exponentials / exp rate, bytes / copy bandwidth)

Products and exponentials run on the same ports of a core, so their times add; loads and stores run
beside them. FLOPs and exponentials are those of `Workload`: 2 per multiply-add and one exp a visible
pair of an open head, forward as backward. Bytes are those of the inputs that count (visible rows of
open heads), read once, and of the results, written once and whole, for hidden rows and closed heads
are written as zeros.

The rates are medians on the present number of threads, taken in turn with the kernels:

- torch.mm of 1024 x 1024 matrices, in float32 (float64 in a float64 run). In bfloat16 the floor
  takes the faster of torch.mm in float32 and in bfloat16 and says which. float16 takes float32's:
  where processors lack its instructions, torch.mm needs seconds.
- torch.exp between two buffers that lie in the cores' own caches
- a copy between two buffers, as many bytes in all as the call moves, so that it has the caches that
  the call has

What the floor leaves out makes real calls slower: row maxima and sums, masks, scale and gate, casts,
the mixed query of collaborative attention, packing, tiles at the border of a mask, edges of tiles,
starting threads and waiting for the last, the call itself. A kernel whose exp is faster than
torch.exp, or a call that only reads where a copy writes as well, can come out below it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from benchmarks.problems import Direction, Workload
from heads_kernels.testing import Inputs, Timing

#: Side of the matrices. On 2 cores with AVX-512 512 reaches 80 % of the rate of 1536, 1024 93 to
#: 100 % in a third of its time.
_SIDE: Final = 1024
#: Numbers a thread: two buffers of 256 KiB stay in a cache of a megabyte, and torch.exp shares out
#: no less than 32768 at a time.
_EXPS: Final = 1 << 16
#: Passes in a call: the first finds the buffers in memory, where what is timed in between pushed
#: them, and all the others find them in the caches.
_PASSES: Final = 64
#: Past this copies run at the speed of memory, whatever the size.
_MOST_BYTES: Final = 1 << 26


@dataclass(frozen=True)
class Floor:
    """Milliseconds, what they consist of, and the rates in GFLOP/s, 1e9 exp/s and GB/s.

    gap      our median time by `ms`
    bound    arithmetic or bytes
    product  dtype of the matrix products whose rate is taken
    gflops   that rate; `sgemm` is that of float32 (of float64 in a float64 run)
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
        self._flops, self._exps = workload.flops(direction), workload.exps()
        self._bytes = sum(_bytes(one, workload.open_heads, direction) for one in inputs)
        dtype = inputs[0].dout.dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._wide = _word(wide)
        self._products = [wide, dtype] if dtype == torch.bfloat16 else [wide]
        self._exp_size = _EXPS * torch.get_num_threads()
        self._copied = min(max(self._bytes // 2, 1), _MOST_BYTES)
        self.calls: dict[str, Callable[[], object]] = {
            **{f"mm {_word(product)}": _product(product) for product in self._products},
            "exp": _exp(self._exp_size, wide),
            "copy": _copy(self._copied),
        }

    def floor(self, times: Mapping[str, Timing]) -> Floor:
        """From the times of `calls` and of `ours`."""
        rates = {_word(p): 2 * _SIDE**3 / times[f"mm {_word(p)}"].median for p in self._products}
        product = max(rates, key=lambda name: rates[name])
        exps = _PASSES * self._exp_size / times["exp"].median
        bandwidth = 2 * self._copied / times["copy"].median
        arithmetic = self._flops / rates[product] + self._exps / exps
        seconds = max(arithmetic, self._bytes / bandwidth)
        return Floor(
            seconds * 1e3,
            times["ours"].median / seconds,
            "arithmetic" if seconds == arithmetic else "bytes",
            product,
            rates[product] * 1e-9,
            rates[self._wide] * 1e-9,
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

    names = ("query", "key", "value")
    out, read = inputs.dout.nbytes, size("query", rows) + size("key", keys) + size("value", keys)
    if direction == "forward":
        return round(read + out)
    gradients = sum(inputs.tensors[name].nbytes for name in names)
    return round(read + 2 * rows * share * out + gradients)  # out and dout are read


def _product(dtype: torch.dtype) -> Callable[[], object]:
    left, right, out = (torch.ones(_SIDE, _SIDE, dtype=dtype) for _ in range(3))
    return lambda: torch.mm(left, right, out=out)


def _exp(size: int, dtype: torch.dtype) -> Callable[[], object]:
    scores, out = torch.linspace(-10, 0, size, dtype=dtype), torch.ones(size, dtype=dtype)
    return lambda: [torch.exp(scores, out=out) for _ in range(_PASSES)]


def _copy(size: int) -> Callable[[], object]:
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    return lambda: target.copy_(source)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
