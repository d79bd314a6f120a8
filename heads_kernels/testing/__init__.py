"""Named cases, the accuracy rule and timers, for tests, benchmarks and new kernels."""

from heads_kernels.testing.accuracy import (
    Report,
    check,
    compare,
    reference,
)
from heads_kernels.testing.case import Case, CollaborativeCase, EntmaxCase, GatedCase
from heads_kernels.testing.cases import CASES, COLLABORATIVE, ENTMAX, GATED, find
from heads_kernels.testing.inputs import Inputs
from heads_kernels.testing.memory import Peak, peak_memory
from heads_kernels.testing.plain import plain
from heads_kernels.testing.poison import dirty_allocator, hide, surrounded
from heads_kernels.testing.timing import Timing, time_in_turn

__all__ = [
    "CASES",
    "COLLABORATIVE",
    "ENTMAX",
    "GATED",
    "Case",
    "CollaborativeCase",
    "EntmaxCase",
    "GatedCase",
    "Inputs",
    "Peak",
    "Report",
    "Timing",
    "check",
    "compare",
    "dirty_allocator",
    "find",
    "hide",
    "peak_memory",
    "plain",
    "reference",
    "surrounded",
    "time_in_turn",
]
