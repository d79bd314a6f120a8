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


#: Shares are heuristic, for 8.5 minutes on 16 cores. A call with gradients compiles six kernels, 15 s of one
#: core: `accuracy` has about 400 of those and takes two runs whole, the second one from Triton's cache.
STAGES: Final[dict[str, Stage]] = {
    "machine": Stage("benchmarks.gpu.machine", 0.0, 60, parallel=False),
    "wrappers": Stage("benchmarks.gpu.wrappers", 0.02, 120),
    "determinism": Stage("benchmarks.gpu.determinism", 0.08, 120),
    "graphs": Stage("benchmarks.gpu.graphs", 0.05, 120),
    "poison": Stage("benchmarks.gpu.poison", 0.05, 120),
    "compile": Stage("benchmarks.gpu.compiled", 0.05, 120),
    "accuracy": Stage("benchmarks.gpu.accuracy", 0.18, 120),
    "statistics": Stage("benchmarks.gpu.statistics", 0.06, 120),
    "warmup": Stage("benchmarks.gpu.warmup", 0.11, 120),
    "timing": Stage("benchmarks.gpu.timing", 0.32, 120, parallel=False),
    "memory": Stage("benchmarks.gpu.memory", 0.04, 60, parallel=False),
    "sanitizer": Stage("benchmarks.gpu.sanitizer", 0.0, 200, parallel=False),
}
#: Of `benchmarks.tune`, which asks for items of its own.
TUNING: Final[dict[str, Stage]] = {"tuning": Stage("benchmarks.gpu.tuning", 0.0, 120)}
#: Items of these are named operator/.../backend, and say whether a backend is verified.
CHECKS: Final = ("determinism", "graphs", "poison", "compile", "accuracy", "statistics")
