"""NaN and infinity in what a mask hides reach no output and no gradient."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from benchmarks.gpu.determinism import differences
from benchmarks.gpu.settings import FAILED, PASSED, Items, Row, Settings, must_serve, word
from heads_kernels.testing import CASES, ENTMAX, Case, hide

_NAMES: Final = (
    "padded",
    "padded_causal",
    "padded_left",
    "holes",
    "packed_causal",
    "lower_right_blind_rows",
)


def items(settings: Settings) -> Items:
    names = _NAMES[:1] if settings.tiny else _NAMES
    return {
        f"{case.operator}/{case}/{word(dtype)}/{bad}/{backend}": partial(
            _hidden, settings, case, dtype, bad, backend
        )
        for dtype in settings.dtypes()[:2]
        for case in (*CASES, *ENTMAX)
        if case.name in names
        for bad in ((torch.nan,) if settings.tiny else (torch.nan, torch.inf))
        for backend in settings.backends(case.operator)
    }


def _hidden(settings: Settings, case: Case, dtype: torch.dtype, bad: float, backend: str) -> Row:
    inputs = case.make(dtype, settings.device)
    must_serve(inputs, backend)
    poisoned, places = hide(inputs, bad)
    got = poisoned.backward(backend)
    wrong = differences(got, inputs.backward(backend))
    wrong += [
        f"d{name} of what is hidden" for name, place in places.items() if got[1][name][place].any()
    ]
    return {"verdict": FAILED if wrong else PASSED, "detail": "; ".join(wrong)}
