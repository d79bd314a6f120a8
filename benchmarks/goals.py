"""What the workloads should reach. Goals are reported and never asserted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from benchmarks.candidates import BASELINES, SDPA
from benchmarks.workloads import (
    DIRECTIONS,
    GPU_LENGTHS,
    GPU_SHARED,
    GPU_VARIED,
    LONG,
    NARROW,
    PAIR_HEADS,
    REAL,
    SHARED,
    SHORT,
    WIDTHS,
    Direction,
    by_length,
    by_sharing,
)

#: What a goal is held against, and the words for it in a table. Baselines are times the gate; of "sdpa" it is the
#: fastest kernel on a GPU. Times are divided by ours; of a rate, ours is the numerator.
VERSUS: Final = {
    "eager": "eager",
    "cudnn": "cuDNN*gate",
    "sdpa": "SDPA*gate",
    "best": "best PyTorch",
    "dense": "own dense time",
    "dense rate": "own dense rate",  # FLOP/s: 1 where time falls as FLOPs do
    "float32": "own float32",  # the same numbers in float32
    "sgemm": "sgemm rate",  # of torch.mm in float32, on a GPU in the dtype of the call
    "TFLOP/s": "",
    "cuda TFLOP/s": "on cuda",  # of the backend `cuda`
}


@dataclass(frozen=True)
class Goal:
    """The least ratio that a workload should reach; `one_thread` where that is another one there."""

    workload: str
    direction: Direction
    versus: str  # one of VERSUS
    ratio: float
    one_thread: float | None = None

    def wanted(self, threads: int | None) -> float:
        """On this number of threads."""
        return self.one_thread if threads == 1 and self.one_thread is not None else self.ratio


@dataclass(frozen=True)
class Outcome:
    """A goal beside what was measured, both as a person reads them; `threads` where it is a time on a CPU."""

    goal: str
    against: str
    wanted: str
    got: str
    met: bool
    threads: int | None = None


#: Executed FLOP/s by those of the dense workload: the time is within 15 % of what it would be if it
#: fell as the FLOPs do. These are of the real lengths, sum of n_b^2; share of real tokens squared
#: would be the same only where all lengths are equal.
_RATE: Final = 1 / 1.15
#: At most 1.15 times the time in float32.
_NARROW: Final = 1 / 1.15


def _cpu_goals() -> Iterator[Goal]:
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


#: On a GPU of the H100's class, TFLOP/s: forward, backward. Of the backend `cuda`, by width.
_SHARED_RATES: Final = (250.0, 120.0)
_OF_CUDA: Final = {64: (280.0, 220.0), 128: (320.0, 220.0)}
_SHARED_OF_CUDA: Final = (250.0, 150.0)


def _gpu_goals() -> Iterator[Goal]:
    for (n, direction), D, T in product(enumerate(DIRECTIONS), _OF_CUDA, GPU_LENGTHS):
        name = f"gated_D{D}_T{T}"
        if T >= 4096:
            for kind in ("dense", "causal"):
                yield Goal(f"{name}_{kind}", direction, "cudnn", (0.75, 0.6)[n])
            yield Goal(f"{name}_dense", direction, "cuda TFLOP/s", _OF_CUDA[D][n])
        if T in GPU_VARIED:
            yield Goal(f"{name}_closed_50", direction, "dense", 1.8)
            yield Goal(f"{name}_closed_75", direction, "dense", 3.4)
            yield Goal(f"{name}_half_padded", direction, "sdpa", 1.7)
    for (n, direction), Ds, T in product(enumerate(DIRECTIONS), GPU_SHARED, (8192, 4096, 2048)):
        name = f"collaborative_Ds{Ds}_T{T}_dense"
        yield Goal(name, direction, "TFLOP/s", _SHARED_RATES[n])
        yield Goal(name, direction, "cuda TFLOP/s", _SHARED_OF_CUDA[n])
        yield Goal(name, direction, "best", 3.0)


GOALS: Final = (*_cpu_goals(), *_gpu_goals())
MEMORY_GOAL_MIB: Final = 64.0
#: Twice the length may take twice the memory, and a tenth for what does not divide evenly.
_LINEAR: Final = 2.2
OVERHEAD_GOAL_US: Final = 40.0
#: By batch and use: the time of the stock MiniLM by that of unpadded layers. Sentences as they come are half padding.
UNPADDED: Final = {
    ("as they come", "inference"): 2.0,
    ("as they come", "training step"): 1.8,
    ("no padding", "inference"): 0.98,
    ("no padding", "training step"): 0.98,
}
#: Workloads whose memory is measured on a GPU: half the length, and the whole.
GPU_MEMORY: Final = (
    ("gated_D128_T8192_causal", "gated_D128_T16384_causal"),
    ("collaborative_Ds256_T4096_dense", "collaborative_Ds256_T8192_dense"),
)


def milliseconds(row: dict[str, Any], name: str) -> float | None:
    """The median of a candidate; None where it was not timed."""
    found: float | None = row["times"].get(name, {}).get("ms")
    return found


def rate(row: dict[str, Any], name: str = "ours") -> float | None:
    """Executed GFLOP/s."""
    ms = milliseconds(row, name)
    return None if ms is None else float(row["flops"] / ms * 1e-6)


def ratio(row: dict[str, Any], versus: str) -> float | None:
    """How well ours does against that, see `VERSUS`, or against a candidate; None where it was not measured."""
    ours, own = milliseconds(row, "ours"), rate(row)
    if ours is None or own is None:
        return None
    if versus == "TFLOP/s":
        return own * 1e-3
    if versus == "cuda TFLOP/s":
        of_cuda = own if row["backend"] == "cuda" else rate(row, "cuda")
        return None if of_cuda is None else of_cuda * 1e-3
    if versus == "sgemm":
        return own / row["floor"]["sgemm"] if row.get("floor") else None
    if versus == "dense rate":
        dense = milliseconds(row, "dense")
        return None if dense is None else own / (row["dense_flops"] / dense * 1e-6)
    names = {"sdpa": SDPA, "best": tuple(BASELINES)}.get(versus, (versus,))
    times = [ms for name in names if (ms := milliseconds(row, name)) is not None]
    return min(times) / ours if times else None


def outcomes(speed: list[dict[str, Any]], parts: dict[str, list[dict[str, Any]]]) -> list[Outcome]:
    """The goals of what was measured, on every number of threads."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in speed:
        rows.setdefault((row["workload"], row["direction"]), []).append(row)
    found = []
    for goal in GOALS:
        for row in rows.get((goal.workload, goal.direction), ()):
            if (got := ratio(row, goal.versus)) is not None:
                wanted = goal.wanted(row["threads"])
                found.append(Outcome(f"{goal.workload} {goal.direction}",
                    VERSUS[goal.versus], _shown(goal.versus, wanted),
                    _shown(goal.versus, got), got >= wanted, row["threads"]))  # fmt: skip
    found += _memory(parts.get("memory", []))
    for row in parts.get("models", []):
        least = UNPADDED.get((row["batch"].split(":")[0], row["use"]))
        if (row["model"], row["candidate"]) == ("MiniLM", "ours, unpadded") and least:
            got = row["times_stock"]
            found.append(Outcome(f"MiniLM unpadded, {row['batch']}, {row['use']}", "stock SDPA",
                f"{least:.2f}x", f"{got:.2f}x", got >= least))  # fmt: skip
    calls = {row["call"]: row["us"] for row in parts.get("overhead", [])}
    ours = [us for call, us in calls.items() if "_attention" in call and "gradients" not in call]
    if ours and not any(row["threads"] is None for row in speed):  # goals of a CPU
        us = max(ours)
        found.append(Outcome("overhead of a forward call, the slowest of ours", "",
            f"at most {OVERHEAD_GOAL_US:.0f} us", f"{us:.1f} us", us <= OVERHEAD_GOAL_US))  # fmt: skip
    return found


def _memory(rows: list[dict[str, Any]]) -> Iterator[Outcome]:
    """A long call forward stays below a bound; on a GPU twice the length takes twice the memory."""
    extra = {
        (row["case"], row["direction"]): row["extra"] for row in rows if row["candidate"] == "ours"
    }
    for (case, direction), peak in extra.items():
        if direction == "forward" and not any(case in pair for pair in GPU_MEMORY):
            yield Outcome(f"peak extra memory, forward, {case}", "", f"under {MEMORY_GOAL_MIB:.0f} MiB",
                f"{peak / 2**20:.1f} MiB", peak < MEMORY_GOAL_MIB * 2**20)  # fmt: skip
    for half, whole in GPU_MEMORY:
        for direction in DIRECTIONS:
            if (whole, direction) in extra:
                peak = extra[whole, direction]
                growth = peak / max(extra[half, direction], 1)
                # What a kernel does not allocate does not grow.
                yield Outcome(f"memory linear in T, {direction}, {whole}", "", f"at most {_LINEAR}x",
                    f"{growth:.2f}x, {peak / 2**20:.0f} MiB", growth <= _LINEAR or peak < 1 << 20)  # fmt: skip


def _shown(versus: str, value: float) -> str:
    """A ratio of times, a share of a rate, or a rate."""
    if versus in ("TFLOP/s", "cuda TFLOP/s"):
        return f"{value:.0f} TFLOP/s"
    return f"{value:.0%}" if versus in ("dense rate", "sgemm") else f"{value:.2f}x"
