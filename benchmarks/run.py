"""One run: which workloads and parts, in which order, and what a failed check leaves out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import torch

from benchmarks import checks, conversion, measure, minilm, models, reading
from benchmarks.candidates import explain
from benchmarks.peak import memory
from benchmarks.report import Report
from benchmarks.results import Results
from benchmarks.settings import Settings, on_threads
from benchmarks.workloads import Workload, table

#: Parts beside the workloads, which yield tables. `--only` knows them by name.
PARTS: Final = {"memory": memory, "overhead": measure.overhead}
#: Those that a run has only where `--only` is their name: minutes each, and on the CPU.
ON_REQUEST: Final = {"models": models.measure, "reading": reading.measure, "conversion": conversion.measure}

_SENTENCES: Final = {"smoke": 4, "quick": 32, "full": 64}


class NothingToDo(Exception):
    """`--only` matches no name; the message says which there are."""


class ContextLost(Exception):
    """A kernel broke the CUDA context: this process can measure nothing more."""


def choose(settings: Settings) -> list[Workload]:
    """The synthetic workloads that are wanted; raises `NothingToDo` where `--only` matches nothing."""
    every = table(settings)
    real = minilm.NAMES if settings.device == "cpu" else ()
    names = [*(workload.name for workload in every), *real, *PARTS]
    if settings.only in ON_REQUEST:
        return []
    if not any(map(settings.wants, names)):
        known = ", ".join([*names, *ON_REQUEST])
        raise NothingToDo(f"--only {settings.only!r} matches none of {known}")
    return [workload for workload in every if settings.wants(workload.name)]


def run(chosen: list[Workload], report: Report) -> None:
    """Measure everything into `report.results`, printing each table when it is finished."""
    results = report.results
    settings = results.settings
    if settings.only in ON_REQUEST:
        _parts([settings.only], report)
    else:
        known = {workload.name: workload for workload in [*table(settings), *chosen]}
        if settings.device == "cpu" and any(map(settings.wants, minilm.NAMES)):
            real = _real(results)
            known |= {workload.name: workload for workload in real}
            chosen = [*chosen, *(workload for workload in real if settings.wants(workload.name))]
        _check(chosen, known, results)
        report.checks()
        _time(chosen, known, report)
        _parts([name for name in PARTS if settings.wants(name)], report)
    results.complete = True
    results.running = None


def _check(chosen: list[Workload], known: dict[str, Workload], results: Results) -> None:
    """Every workload, and what it is compared with, once."""
    done = {row["workload"] for row in results.checks}
    for name in _with_dense(chosen):
        step = f"checking {name}"
        if name in done or name not in known or step in results.ended:
            continue
        _step(results, step)
        try:
            found = checks.check(known[name], results.settings)
        except RuntimeError as error:
            results.failures.append(f"{step}: {type(error).__name__}: {error}")
            _must_work(results.settings)
            continue
        results.checks.append(asdict(found))
        results.failures += [f"{name}: {failure}" for failure in found.failures]
        results.failures += [f"{name}: baseline {which}: {why}" for which, why in found.wrong.items()]


def _time(chosen: list[Workload], known: dict[str, Workload], report: Report) -> None:
    """All that passed; a table is printed when nothing of it is left."""
    results, settings = report.results, report.results.settings
    checked = {row["workload"]: row for row in results.checks}
    sound = {name for name, row in checked.items() if not row["failures"]}
    left = [workload for workload in chosen if workload.name in sound]
    done = {(row["workload"], row["direction"], row["threads"]) for row in results.speed}
    while left:
        workload = left.pop(0)
        dense = known[workload.dense] if workload.dense and workload.dense in sound else None
        for threads in settings.threads(results.machine.threads):
            for direction in workload.directions:
                step = f"timing {workload.name} {direction}"
                if (workload.name, direction, threads) in done or step in results.ended:
                    continue
                _step(results, step)
                with on_threads(threads):
                    left_out = checked[workload.name]["wrong"]
                    row, wrong = measure.speed(workload, dense, direction, settings, left_out)
                results.speed += [row] if row else []
                results.failures += [f"{workload.name} {direction}: {name}: {why}" for name, why in wrong.items()]
                if wrong:
                    _must_work(settings)
        if not any(other.table == workload.table for other in left):
            report.speed(workload.table)


def _parts(names: Sequence[str], report: Report) -> None:
    for name in names:
        if name in report.results.ended:
            continue
        _step(report.results, name)
        try:
            for found in (PARTS | ON_REQUEST)[name](report.results.settings):
                report.results.add(found)
                if found.rows:
                    report.part(found)
                _step(report.results, name)
        except (minilm.Unavailable, RuntimeError) as error:
            report.results.failures.append(f"{name}: {type(error).__name__}: {error}")
            _must_work(report.results.settings)


def _step(results: Results, name: str) -> None:
    """The file is written, so that whatever ends the process here leaves what was measured before."""
    results.step(name)
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{name}", end="\r", file=sys.stderr, flush=True)


def _must_work(settings: Settings) -> None:
    if settings.place.type == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise ContextLost(str(error)) from error


def _with_dense(workloads: Sequence[Workload]) -> list[str]:
    """Names of workloads and of those that they are compared with, each once."""
    pairs = [(workload.dense, workload.name) for workload in workloads]
    return list(dict.fromkeys(name for pair in pairs for name in pair if name is not None))


def _real(results: Results) -> list[Workload]:
    try:
        return minilm.real_workloads(minilm.capture(_SENTENCES[results.settings.form]))
    except minilm.Unavailable as error:
        results.notes.append(f"No real input, synthetic workloads only: {error}")
        return []


def backends(settings: Settings) -> list[str]:
    """Which backend runs the operators and why not another, in words."""
    found: dict[str, str] = {}
    for workload in table(Settings("smoke", settings.device, settings.dtype)):
        inputs = workload.make(settings.dtype, settings.place)[0]
        found.setdefault(inputs.operator, str(explain(inputs)).replace("\n ", ";"))
    return [*found.values()]
