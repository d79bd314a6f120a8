"""What a backend is held to: a short selection of the named cases, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from heads_kernels.backends import CUDA_EMULATED, TRITON_INTERPRETED, Backend
from heads_kernels.parse import parse
from heads_kernels.testing import check, find
from heads_kernels.testing.row_statistics import check_statistics

_GATED, _SHARED, _SPARSE = "gated_attention", "collaborative_attention", "entmax_attention"
OPERATORS: Final = (_GATED, _SHARED, _SPARSE, "attention_statistics")
#: Operator under test, operator and name of the case; the most telling first, for time may run out.
CHECKS: Final = tuple(
    (operator, of, name)
    for operator, of, names in (
        (_GATED, _GATED, "transposed_grouped width_128"),
        (_SHARED, _SHARED, "ragged_bias gate_batch_heads"),
        ("attention_statistics", _GATED, "holes"),
        (_SPARSE, _SPARSE, "closed_batch_heads transposed"),
        (_GATED, _GATED, "sinks_all sliced"),
        (_SHARED, _SHARED, "sinks_all holes"),
        ("attention_statistics", _SHARED, "ragged_bias"),
        (_GATED, _GATED, "dense_blocks closed_batch_heads offsets decode window_causal"),
        (_SHARED, _SHARED, "offsets width_384 dense_heads decode"),
        (_SPARSE, _SPARSE, "holes bias_shared"),
        ("attention_statistics", _GATED, "softcap_bias"),
        (_GATED, _GATED, "length_1000_causal"),
        (_SHARED, _SHARED, "length_1000"),
    )
    for name in names.split()
)


def is_simulated(backend: str) -> bool:
    """Whether its kernels for GPUs run on the CPU in this process: right, and far too slow to time."""
    return (backend == "triton" and TRITON_INTERPRETED) or (backend == "cuda" and CUDA_EMULATED)


def dtypes(backend: str, device: torch.device) -> tuple[torch.dtype, ...]:
    """Those that a backend is checked in, the one of most use first."""
    if backend == "triton" and is_simulated(backend):
        return (torch.float32,)  # Triton's interpreter multiplies bfloat16 wrongly
    if device.type == "cuda":
        return torch.bfloat16, torch.float32, torch.float16
    return torch.float32, torch.bfloat16


def refusal(operator: str, row: Backend, device: torch.device) -> str:
    """Why a backend can't run on a device; empty where it can."""
    try:
        query, key = torch.zeros(2, 1, 1, 1, 16, device=device)
    except RuntimeError as error:  # all memory is in use, or the GPU is another process's alone
        return f"no tensor can be made on {device}: {str(error).partition(chr(10))[0]}"
    if operator == _SHARED:
        given: dict[str, Any] = {"query": query[0], "key": key[0], "value": key}
        given["mixing"] = torch.ones(1, 16, device=device)
    else:
        given = {"query": query, "key": key}
        if operator != "attention_statistics":
            given["value"] = key
        if operator == _SPARSE:
            given["alpha"] = 1.5
    return "; ".join(row.unsupported(parse(operator, **given)[0]))


def run_checks(
    backend: str, operators: Sequence[str], dtype: torch.dtype, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Before each check its "check" and "operator"; after it also "ratio" of the bound, and "wrong" in words or ""."""
    word = str(dtype).removeprefix("torch.")
    for operator, of, name in CHECKS:
        if operator not in operators:
            continue
        row: dict[str, Any] = {"operator": operator, "check": f"{name} in {word}"}
        yield row
        case = find(of, name)
        try:
            if operator == "attention_statistics":
                wrong, ratio = check_statistics(case.make(dtype, device), backend)
            else:
                report = check(case, dtype, backend, device=device)
                wrong = [str(q).removeprefix("FAIL ") for q in report.quantities if not q.ok]
                ratio = report.ratio
            words = "; ".join(" ".join(each.split()) for each in wrong)
        except Exception as error:
            ratio, words = 0.0, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        yield {**row, "ratio": ratio, "wrong": words}


@dataclass
class Verdict:
    """What the checks of one operator on one backend add up to."""

    refused: str = ""
    planned: int = 0
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)  # what did not end in its time
    worst: float = 0.0  # of the errors, as a part of its bound

    @property
    def word(self) -> str:
        if self.refused:
            return "can't run"
        if self.failures:
            return "failed"
        return "verified here" if self.passed else "not verified"

    def __str__(self) -> str:
        if self.refused:
            return f"can't run: {self.refused}"
        if self.failures:
            more = len(self.failures) - 1
            return f"failed: {self.failures[0]}{f'; and {more} more' if more else ''}"
        words = [f"{self.word}: {self.passed} of {self.planned} checks"]
        if self.passed:
            words[0] += f", the largest error {self.worst:.2f} of its bound"
        if self.passed < self.planned:
            words.append("there was no time for the others")
        return "; ".join([*words, *self.unfinished])

    def add(self, row: dict[str, Any]) -> None:
        """A row of `run_checks` that has a result."""
        if row["wrong"]:
            self.failures.append(f"{row['check']} ({row['wrong']})")
        else:
            self.passed += 1
            self.worst = max(self.worst, row["ratio"])
