"""What a backend is held to: a short selection of the named cases, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from heads_kernels.backends import BACKENDS, TRITON_INTERPRETED
from heads_kernels.functional import explain
from heads_kernels.testing import check, find
from heads_kernels.testing.row_statistics import check_statistics

_GATED, _SHARED = "gated_attention", "collaborative_attention"
_SPARSE, _STATISTICS = "entmax_attention", "attention_statistics"
OPERATORS: Final = (_GATED, _SHARED, _SPARSE, _STATISTICS)
#: Operator under test, operator and name of the case; the most telling first, for time may run out.
CHECKS: Final = tuple(
    (operator, of, name)
    for operator, of, names in (
        (_GATED, _GATED, "transposed_grouped width_128"),
        (_SHARED, _SHARED, "ragged_bias gate_batch_heads"),
        (_STATISTICS, _GATED, "holes"),
        (_SPARSE, _SPARSE, "closed_batch_heads transposed"),
        (_GATED, _GATED, "sinks_all sliced"),
        (_SHARED, _SHARED, "sinks_all holes"),
        (_STATISTICS, _SHARED, "ragged_bias"),
        (_GATED, _GATED, "dense_blocks closed_batch_heads offsets decode window_causal"),
        (_SHARED, _SHARED, "offsets width_384 dense_heads decode"),
        (_SPARSE, _SPARSE, "holes bias_shared"),
        (_STATISTICS, _GATED, "softcap_bias"),
        (_GATED, _GATED, "length_1000_causal"),
        (_SHARED, _SHARED, "length_1000"),
    )
    for name in names.split()
)


def dtypes(backend: str, device: torch.device) -> tuple[torch.dtype, ...]:
    """Those that a backend is checked in, the one of most use first."""
    if backend == "triton" and TRITON_INTERPRETED:
        return (torch.float32,)  # Triton's interpreter multiplies bfloat16 wrongly
    if device.type == "cuda":
        return torch.bfloat16, torch.float32, torch.float16
    return torch.float32, torch.bfloat16


def refusal(operator: str, backend: str, device: torch.device) -> str:
    """Why a backend can't run on a device; empty where it can."""
    try:
        x = torch.zeros(1, 1, 1, 16, device=device)
    except RuntimeError as error:  # all memory is in use, or the GPU is another process's alone
        return f"no tensor can be made on {device}: {str(error).partition(chr(10))[0]}"
    operands = {_SHARED: (x[0], x[0], x, x[0, 0]), _STATISTICS: (x, x)}.get(operator, (x, x, x))
    return "; ".join(explain(operator, *operands, backend=backend).refusals.get(backend, []))


def refusals(device: torch.device) -> Iterator[dict[str, Any]]:
    """For each backend but the formula, why it can't run on a device, by operator."""
    for row in BACKENDS:
        if row.name != "eager":
            words = {name: refusal(name, row.name, device) for name in OPERATORS}
            yield {
                "backend": row.name,
                "refused": {name: why for name, why in words.items() if why},
            }


def run_checks(
    backend: str, operators: Sequence[str], dtype: torch.dtype, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Before each check its name, "check"; after it also "ratio" of the bound, and "wrong" in words or ""."""
    for operator, of, name in CHECKS:
        if operator not in operators:
            continue
        row = {"check": f"{operator} {name} in {str(dtype).removeprefix('torch.')}"}
        yield row
        case = find(of, name)
        try:
            if operator == _STATISTICS:
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
    """What the checks of one backend on one device add up to."""

    refused: dict[str, str] = field(default_factory=dict)  # why not, by operator
    planned: int = 0
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)  # what did not end in its time
    worst: float = 0.0  # of the errors, as a part of its bound

    @property
    def operators(self) -> list[str]:
        """Those that are checked."""
        return [name for name in OPERATORS if name not in self.refused]

    @property
    def is_verified(self) -> bool:
        return self.passed > 0 and not self.failures

    def __str__(self) -> str:
        if not self.operators:
            return f"can't run: {self.refused[OPERATORS[0]]}"
        if self.failures:
            more = len(self.failures) - 1
            return f"failed: {self.failures[0]}{f'; and {more} more' if more else ''}"
        word = "verified here" if self.passed else "not verified"
        words = [f"{word}: {self.passed} of {self.planned} checks"]
        if self.passed:
            words[0] += f", the largest error {self.worst:.2f} of its bound"
        if self.passed < self.planned:
            words.append("there was no time for the others")
        refused = [f"not {name}: {why}" for name, why in self.refused.items()]
        return "; ".join([*words, *self.unfinished, *refused])

    def add(self, rows: Sequence[dict[str, Any]], end: str, is_late: bool) -> None:
        """Add the rows of `run_checks` in a process that ended with `end` before its time, or for lack of time."""
        done = [row for row in rows if "wrong" in row]
        self.passed += sum(not row["wrong"] for row in done)
        self.worst = max([self.worst, *(row["ratio"] for row in done if not row["wrong"])])
        self.failures += [f"{row['check']} ({row['wrong']})" for row in done if row["wrong"]]
        begun = rows[-1] if rows and rows[-1] not in done else None
        if is_late and begun:
            self.unfinished.append(f"{begun['check']} {end}")
        elif begun:
            self.failures.append(f"{begun['check']} ({end})")
        elif end and not is_late and not any(row["wrong"] for row in done):  # else already reported
            self.failures.append(end)
