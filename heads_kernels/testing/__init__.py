"""Named cases, the accuracy rule and timers, for tests, benchmarks and new kernels."""

from heads_kernels.testing.accuracy import Report, check, compare, reference
from heads_kernels.testing.case import Case, CollaborativeCase, EntmaxCase, GatedCase, Inputs
from heads_kernels.testing.cases import CASES, COLLABORATIVE, ENTMAX, GATED, find
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
    "Report",
    "Timing",
    "check",
    "compare",
    "find",
    "reference",
    "time_in_turn",
]
