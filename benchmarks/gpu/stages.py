"""The stages in their order, each with what it may cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Stage:
    """A module of this folder with `items(settings)`: a callable by name for each thing to do.

    least     share of the suite's minutes that earlier stages leave for it
    item_s    seconds that one item may take before its process is ended
    parallel  several workers at once; times are taken by one
    """

    module: str
    least: float
    item_s: float
    parallel: bool = True


#: Shares are heuristic, for 8.5 minutes on 16 cores: compiling kernels is most of `accuracy`, and most of
#: `timing` is spent on baselines that plan or compile.
STAGES: Final[dict[str, Stage]] = {
    "machine": Stage("benchmarks.gpu.machine", 0.0, 60, parallel=False),
    "determinism": Stage("benchmarks.gpu.determinism", 0.06, 60),
    "graphs": Stage("benchmarks.gpu.graphs", 0.04, 60),
    "poison": Stage("benchmarks.gpu.poison", 0.04, 60),
    "compile": Stage("benchmarks.gpu.compiled", 0.04, 90),
    "accuracy": Stage("benchmarks.gpu.accuracy", 0.25, 60),
    "statistics": Stage("benchmarks.gpu.statistics", 0.04, 60),
    "warmup": Stage("benchmarks.gpu.warmup", 0.08, 90),
    "timing": Stage("benchmarks.gpu.timing", 0.32, 90, parallel=False),
    "memory": Stage("benchmarks.gpu.memory", 0.03, 60, parallel=False),
    "sanitizer": Stage("benchmarks.gpu.sanitizer", 0.0, 100, parallel=False),
}
#: Of `benchmarks.tune`, which asks for items of its own.
TUNING: Final[dict[str, Stage]] = {"tuning": Stage("benchmarks.gpu.tuning", 0.0, 120)}
#: Items of these are named operator/.../backend, and say whether a backend is verified.
CHECKS: Final = ("determinism", "graphs", "poison", "compile", "accuracy", "statistics")
