"""What the workloads should reach. Goals are reported and never asserted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.problems import DIRECTIONS, Direction
from benchmarks.shapes import (
    LONG,
    NARROW,
    PAIR_HEADS,
    REAL,
    SHARED,
    SHORT,
    WIDTHS,
    by_length,
    by_sharing,
)

#: eager, sdpa     PyTorch's time by ours; sdpa is SDPA times the gate
#: best            the better of the two, by ours
#: dense           our own time for the dense workload by ours
#: dense rate      our FLOP/s by those of the dense workload: 1 where time falls as FLOPs do
#: float32         our own time for the same numbers in float32 by ours
#: sgemm           our FLOP/s by those of torch.mm in float32
Versus = Literal["eager", "sdpa", "best", "dense", "dense rate", "float32", "sgemm"]


@dataclass(frozen=True)
class Goal:
    """The least ratio that a workload should reach; `one_thread` where that is another one there."""

    workload: str
    direction: Direction
    versus: Versus
    ratio: float
    one_thread: float | None = None

    def wanted(self, threads: int) -> float:
        """On this number of threads."""
        return self.one_thread if threads == 1 and self.one_thread is not None else self.ratio


#: Executed FLOP/s by those of the dense workload: the time is within 15 % of what it would be if it
#: fell as the FLOPs do. These are of the real lengths, sum of n_b^2; share of real tokens squared
#: would be the same only where all lengths are equal.
_RATE: Final = 1 / 1.15
#: At most 1.15 times the time in float32.
_NARROW: Final = 1 / 1.15


def _goals() -> Iterator[Goal]:
    for name in (by_length(T, D) for D in WIDTHS for T in LONG):
        yield Goal(f"{name}_dense", "forward", "sdpa", 1.5, one_thread=1.15)
        yield Goal(f"{name}_causal", "forward", "best", 2.0)
        yield Goal(f"{name}_dense", "backward", "best", 1.3)
        yield Goal(f"{name}_causal", "backward", "best", 2.0)
    for D in WIDTHS:
        yield Goal(f"{by_length(2048, D)}_dense", "forward", "sgemm", 0.8)
    for B, T in SHORT:
        yield Goal(f"gated_T{T}_B{B}_padded", "forward", "best", 1.5)
    yield Goal("minilm_open", "forward", "best", 1.5)
    for direction in DIRECTIONS:
        yield Goal("gated_closed_50", direction, "dense", 1.9)
        yield Goal("gated_closed_75", direction, "dense", 3.7)
        yield Goal("gated_half_padded", direction, "dense rate", _RATE)
        for percent in REAL:
            yield Goal(f"gated_real_{percent}", direction, "dense rate", _RATE)
    for model in ("bert_base", "minilm"):
        for Ds in SHARED:
            dense, ragged = by_sharing(model, Ds)
            yield Goal(dense, "forward", "best", 3.0)
            yield Goal(dense, "backward", "best", 2.0)
            for direction in DIRECTIONS:
                yield Goal(ragged, direction, "dense rate", _RATE)
    for H in PAIR_HEADS:
        yield Goal(f"pair_bias_H{H}", "forward", "sdpa", 1.6)
        yield Goal(f"pair_bias_H{H}", "backward", "sdpa", 2.3)
        yield Goal(f"pair_bias_H{H}", "backward", "eager", 4.0)
    yield Goal("t5_base", "forward", "sdpa", 1.5)
    yield Goal("mask_random", "forward", "sdpa", 1.3)
    yield Goal("mask_blocks", "forward", "dense rate", _RATE)
    for base in NARROW:
        for direction in DIRECTIONS:
            yield Goal(f"{base}_bfloat16", direction, "float32", _NARROW)


GOALS: Final = tuple(_goals())
MEMORY_GOAL_MIB: Final = 64.0
OVERHEAD_GOAL_US: Final = 40.0
