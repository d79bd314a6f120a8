"""The same call gives the same bits, forward and backward, also from memory full of NaN."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
from torch import Tensor

from benchmarks.gpu.accuracy import REAL
from benchmarks.gpu.settings import FAILED, PASSED, Items, Row, Settings, must_serve, word
from heads_kernels.testing import CASES, ENTMAX, Case, dirty_allocator

Result = tuple[Tensor, dict[str, Tensor]]

_NAMES: Final = ("closed_batch_heads", "gate_strided_elements", "padded_causal", "grouped", "length_1000_causal",
    "dropout_everything", "ragged_bias", "zero_chunks", "padded", "length_1000")  # fmt: skip
_TIMES: Final = 3


def items(settings: Settings) -> Items:
    found = [case for case in (*CASES, *ENTMAX) if case.name in _NAMES]
    if settings.tiny:
        found = [case for case in (*CASES, *ENTMAX) if case.name in ("small_causal", "small_bias")]
    else:
        found = [*REAL, *found]
    return {
        f"{case.operator}/{case}/{word(dtype)}/{backend}": partial(
            _twice, settings, case, dtype, backend
        )
        for dtype in settings.dtypes()[:1]
        for case in found
        for backend in settings.backends(case.operator)
    }


def _twice(settings: Settings, case: Case, dtype: torch.dtype, backend: str) -> Row:
    inputs = case.make(dtype, settings.device)
    must_serve(inputs, backend)
    want = inputs.backward(backend)
    for name, tensor in {"out": want[0], **want[1]}.items():
        if not tensor.isfinite().all():
            return {"verdict": FAILED, "detail": f"{name} is not finite"}
    largest = 1 << 20 if settings.tiny else 1 << 26  # bytes: an output of the real cases
    for _ in range(_TIMES):
        dirty_allocator(want[0], largest)
        wrong = differences(inputs.backward(backend), want)
        if wrong:
            return {"verdict": FAILED, "detail": "; ".join(wrong)}
    return {"verdict": PASSED}


def differences(got: Result, want: Result) -> list[str]:
    """Which results differ in a bit, and in how many elements."""
    pairs = {"out": (got[0], want[0])}
    pairs.update((f"d{name}", (got[1][name], grad)) for name, grad in want[1].items())
    return [
        f"{name}: {int((_bits(a) != _bits(b)).sum())} of {b.numel()} elements differ"
        for name, (a, b) in pairs.items()
        if not torch.equal(_bits(a), _bits(b))
    ]


def _bits(tensor: Tensor) -> Tensor:
    """As integers, for which NaN equals itself and 0 is not -0."""
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(width)
