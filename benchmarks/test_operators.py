"""The same workloads under pytest-benchmark, to follow one machine over commits.

    python -m pytest benchmarks --benchmark-autosave      # then: --benchmark-compare

Times of different commits compare only on the same quiet machine; what is claimed comes from `python -m benchmarks`,
which measures the candidates in turn in one process.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from benchmarks import checks
from benchmarks.candidates import RIVALS, NotRun, candidate
from benchmarks.settings import Settings
from benchmarks.workloads import DIRECTIONS, Direction, table

_ON_GPU = torch.cuda.is_available()
SETTINGS = Settings("quick", "cuda", torch.bfloat16) if _ON_GPU else Settings("quick", "cpu", torch.float32)
WORKLOADS = {workload.name: workload for workload in table(SETTINGS)}


@cache
def checked(name: str) -> checks.Check:
    return checks.check(WORKLOADS[name], SETTINGS)


@pytest.mark.parametrize("name", ["ours", *RIVALS[SETTINGS.device]])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_speed(benchmark: Any, workload: str, direction: Direction, name: str) -> None:
    found = checked(workload)
    assert not found.failures
    assert name not in found.wrong
    benchmark.group = f"{workload} {direction}"
    inputs = WORKLOADS[workload].make(SETTINGS.dtype, SETTINGS.place)
    try:
        call = candidate(name, WORKLOADS[workload], inputs, direction)
    except NotRun as reason:
        pytest.skip(str(reason))

    def finished() -> None:
        call()
        if _ON_GPU:
            torch.cuda.synchronize()

    with torch.set_grad_enabled(direction == "backward"):
        benchmark(finished)
