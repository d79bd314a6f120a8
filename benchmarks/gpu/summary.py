"""The short tables that stand last, readable at 100 columns."""

from __future__ import annotations

from typing import Final

from benchmarks.gpu.candidates import RIVALS
from benchmarks.gpu.goals import NOT_MEASURED, milliseconds, tflops
from benchmarks.gpu.record import Record
from benchmarks.gpu.settings import Row
from benchmarks.gpu.stages import STAGES
from benchmarks.problems import DIRECTIONS, Direction

_FAILURES: Final = 12  # printed; all are in the file
_WIDTH: Final = 110


def lines(record: Record) -> list[str]:
    """Machine, checks, times, goals, and what went wrong."""
    return [
        *_machine(record),
        *(stage_line(record, stage) for stage in STAGES if stage in record.stages),
        *_times(record),
        *_goals(record),
        *record.notes,
        *_failures(record),
    ]


def stage_line(record: Record, stage: str) -> str:
    counts = record.counts(stage)
    words = ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))
    text = f"{stage:12} {words or 'nothing to do'}; {record.seconds.get(stage, 0.0):.0f} s"
    ratios = [row["ratio"] for row in record.rows(stage) if row.get("ratio") is not None]
    return text + (f"; largest error {max(ratios):.2f} of its bound" if ratios else "")


def _machine(record: Record) -> list[str]:
    m = record.machine()
    if "device" not in m:
        return []
    v = m["versions"]
    head = (
        f"{m['device']}, heads_kernels {v['heads_kernels']} at {record.commit}, torch {v['torch']}, "
        f"Triton {v['triton']}, CUDA {v['cuda']}"
    )
    if "matmul_tflops" not in m:
        return [head]
    return [
        head,
        f"ceilings: {m['matmul_tflops']:.0f} TFLOP/s bf16 product, {m['copy_gbs']:.0f} GB/s copied",
    ]


def _times(record: Record) -> list[str]:
    rows = record.rows("timing")
    peak = record.machine().get("matmul_tflops")
    timed = [
        _time_line(row, direction, name, peak)
        for row in rows
        for direction in DIRECTIONS
        for name in row.get(direction, {}).get("times", {})
        if name not in RIVALS and not name.endswith(" whole")
    ]
    if not timed:
        return []
    head = "".join(f"{name[:5]:>6}" for name in (*RIVALS, "whole"))
    return [
        "",
        "Median ms of ours; executed TFLOP/s (backward: 5 products); part of the measured peak; then the time",
        "of each baseline by ours. whole: ours, all heads open or dense mixing. -: refused or not run.",
        f"{'':40}{'ms':>8}{'TFLOPs':>7}{'peak':>5}{head}",
        *timed,
    ]


def _time_line(row: Row, direction: Direction, name: str, peak: float | None) -> str:
    short = {"forward": "fwd", "backward": "bwd"}[direction]
    ms, rate = milliseconds(row, direction, name), tflops(row, direction, name)
    head = f"{row['name'].replace('collaborative', 'collab'):29}{short:4}{name:7}"
    if ms is None or rate is None:
        return f"{head} {row[direction]['times'][name].get('error', 'refused')}"[:_WIDTH]
    text = f"{head}{ms:8.3f}{rate:7.1f}{rate / peak if peak else 0:5.0%}"
    for other in (*RIVALS, f"{name} whole"):
        theirs = milliseconds(row, direction, other)
        text += f"{'-':>6}" if theirs is None else f"{theirs / ms:6.2f}"
    return text


def _goals(record: Record) -> list[str]:
    if not record.rows("timing") and not record.rows("memory"):
        return []
    result = ["", "Goals"]
    for outcome in record.goals():
        verdict = "met" if outcome.met else "-" if outcome.got == NOT_MEASURED else "SHORT"
        against = f" of {outcome.against}" if outcome.against else ""
        result.append(f"{verdict:6}{outcome.goal}: {outcome.got}; goal {outcome.wanted}{against}")
    return result


def _failures(record: Record) -> list[str]:
    failures = record.failures()
    result = [""] if failures else []
    result += [
        f"FAIL {' '.join(failure.split())}"[: 2 * _WIDTH] for failure in failures[:_FAILURES]
    ]
    if len(failures) > _FAILURES:
        result.append(f"FAIL and {len(failures) - _FAILURES} more, in the file")
    return result
