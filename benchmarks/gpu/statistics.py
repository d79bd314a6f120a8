"""`attention_statistics` on the GPU backends against `eager` in float64 on the same inputs."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from benchmarks.gpu.settings import FAILED, PASSED, TABLES, Items, Refused, Row, Settings, word
from heads_kernels.dispatch import BackendName, choose
from heads_kernels.problem import Problem
from heads_kernels.testing import CASES, Case, Inputs, row_statistics

OPERATOR: Final = "attention_statistics"


def items(settings: Settings) -> Items:
    found = [case for case in CASES if "model" not in case.tags and not case.dropout_p and case.S]
    if settings.tiny:
        found = [case for case in found if case.name in ("small_causal", "small_bias")]
    return {
        f"{OPERATOR}/{case.operator}-{case}/{word(dtype)}/{backend}": partial(
            _check, settings, case, dtype, backend
        )
        for dtype in settings.dtypes()
        for case in found
        for backend in settings.backends(OPERATOR)
    }


def _check(settings: Settings, case: Case, dtype: torch.dtype, backend: BackendName) -> Row:
    wrong, worst = check_statistics(case.make(dtype, settings.device), backend)
    return {
        "verdict": FAILED if wrong else PASSED,
        "detail": "; ".join(wrong),
        "ratio": round(worst, 4),
    }


def statistics_call(inputs: Inputs, backend: str) -> dict[str, Any]:
    """What `attention_statistics` takes of a call; raises `Refused` where `backend` cannot serve it."""
    given = row_statistics.statistics_arguments(inputs)
    table = TABLES[OPERATOR]
    if backend not in [row.name for row in table]:
        raise Refused(f"{OPERATOR} has no backend {backend!r}")
    choice = choose(table, Problem.statistics(**given), backend)
    if choice.backend is None:
        raise Refused("; ".join(choice.refusals[backend]))
    return given


def check_statistics(inputs: Inputs, backend: BackendName) -> tuple[list[str], float]:
    """What is wrong, and the largest error as a part of its bound; raises `Refused` as `statistics_call` does."""
    statistics_call(inputs, backend)
    return row_statistics.check_statistics(inputs, backend)
