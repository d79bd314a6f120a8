"""What the workloads should reach. Goals are reported and never asserted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import Any, Final

from benchmarks.candidates import BASELINES, SDPA
from benchmarks.workloads import DIRECTIONS

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
    """The least ratios that workloads should reach in each direction, None where there is no goal.

    workloads    patterns of names, with spaces between them
    versus       one of VERSUS
    one_thread   forward, where it is another one there
    """

    workloads: str
    versus: str
    forward: float | None
    backward: float | None = None
    one_thread: float | None = None

    def wanted(self, row: dict[str, Any]) -> float | None:
        """For a row of times."""
        if not any(fnmatchcase(row["workload"], pattern) for pattern in self.workloads.split()):
            return None
        if row["direction"] == "backward":
            return self.backward
        return self.one_thread if self.one_thread and row["threads"] == 1 else self.forward


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

_DENSE: Final = "gated_dense gated_T512_D128_dense gated_T2048_*_dense"
_CAUSAL: Final = "gated_causal gated_T512_D128_causal gated_T2048_*_causal"
_SHARED: Final = "collaborative_dense collaborative_bert_base_*[0-9] collaborative_minilm_*[0-9]"
_RAGGED: Final = "collaborative_ragged collaborative_bert_base_*_ragged collaborative_minilm_*_ragged"
#: On a GPU, by width and mask.
_LONG: Final = "gated_D{0}_T4096_{1} gated_D{0}_T8192_{1} gated_D{0}_T16384_{1}"
_LONG_SHARED: Final = "collaborative_Ds256_T*_dense collaborative_Ds512_T*_dense"

GOALS: Final = (
    Goal(_DENSE, "sdpa", 1.5, one_thread=1.15),
    Goal(_DENSE, "best", None, 1.3),
    Goal(_CAUSAL, "best", 2.0, 2.0),
    Goal("gated_T2048_*_dense", "sgemm", 0.8),
    Goal("gated_T*_B*_padded minilm_open", "best", 1.5),
    Goal("gated_closed_50", "dense", 1.9, 1.9),
    Goal("gated_closed_75", "dense", 3.7, 3.7),
    Goal("gated_half_padded gated_real_*", "dense rate", _RATE, _RATE),
    Goal(_SHARED, "best", 3.0, 2.0),
    Goal(_RAGGED, "dense rate", _RATE, _RATE),
    Goal("pair_bias_H*", "sdpa", 1.6, 2.3),
    Goal("pair_bias_H*", "eager", None, 4.0),
    Goal("t5_base", "sdpa", 1.5),
    Goal("mask_random", "sdpa", 1.3),
    Goal("mask_blocks", "dense rate", _RATE),
    Goal("gated_*_bfloat16 collaborative_*_bfloat16", "float32", _NARROW, _NARROW),
    # A GPU of the H100's class.
    Goal(_LONG.format("*", "dense"), "cudnn", 0.95, 0.9),
    Goal(_LONG.format("*", "causal"), "cudnn", 0.95, 0.9),
    Goal(_LONG.format(64, "dense"), "cuda TFLOP/s", 280, 220),
    Goal(_LONG.format(128, "dense"), "cuda TFLOP/s", 320, 220),
    Goal("gated_D*_closed_50", "dense", 1.9, 1.8),
    Goal("gated_D*_closed_75", "dense", 3.4, 3.4),
    Goal("gated_D*_half_padded", "sdpa", 1.7, 1.7),
    Goal(_LONG_SHARED, "TFLOP/s", 450, 120),
    Goal(_LONG_SHARED, "cuda TFLOP/s", 250, 150),
    Goal(_LONG_SHARED, "best", 3.0, 3.0),
)
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
    found = []
    for goal, row in product(GOALS, speed):
        wanted, got = goal.wanted(row), ratio(row, goal.versus)
        if wanted is not None and got is not None:
            found.append(Outcome(f"{row['workload']} {row['direction']}", VERSUS[goal.versus],
                _shown(goal.versus, wanted), _shown(goal.versus, got), got >= wanted, row["threads"]))  # fmt: skip
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
    extra = {(row["case"], row["direction"]): row["extra"] for row in rows if row["candidate"] == "ours"}
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
