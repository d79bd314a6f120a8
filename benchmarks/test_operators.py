"""The same workloads under pytest-benchmark, to follow one machine over commits.

    python -m pytest benchmarks --benchmark-autosave      # then: --benchmark-compare

Times of different commits compare only on the same quiet machine; what is claimed comes from
`python -m benchmarks`, which measures the candidates in turn in one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.measure import candidates
from benchmarks.problems import DIRECTIONS, Direction, Workload, standard

WORKLOADS = standard()


@pytest.mark.parametrize("candidate", ["ours", "eager", "sdpa"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("workload", WORKLOADS, ids=[workload.name for workload in WORKLOADS])
def test_speed(benchmark: Any, workload: Workload, direction: Direction, candidate: str) -> None:
    benchmark.group = f"{workload.name} {direction}"
    call = candidates(workload.make(torch.float32), direction)[candidate]
    with torch.set_grad_enabled(direction == "backward"):
        benchmark(call)
