"""One run: which parts, in which order, and what a failed check leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

import heads_kernels as hk
from benchmarks import checks, decoding, measure, minilm, problems, shapes
from benchmarks.goals import GOALS
from benchmarks.measure import Effort, Speed
from benchmarks.problems import DIRECTIONS, Direction, Workload
from benchmarks.report import Report
from benchmarks.results import Results

#: Names beside those of workloads that `--only` knows.
PARTS = ("memory", "overhead", "decoding")

#: By form. Quick: 9 samples or more make a median that a few disturbed ones do not move, and the seconds
#: keep the whole run under 4 minutes on 2 cores. Full has seven times the measurements and 17 minutes.
EFFORT = {"smoke": Effort(0.02, 2), "quick": Effort(2.0, 9), "full": Effort(1.5, 9)}
#: In full, of workloads without a goal: points of a series, which a plot draws.
_POINT = Effort(0.6, 5)
_HAVE_GOALS = frozenset(goal.workload for goal in GOALS)

_SENTENCES = {"smoke": 4, "quick": 32, "full": 64}

Step = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    form: str
    dtype: torch.dtype
    only: str | None = None
    floor: bool = False

    def wants(self, name: str) -> bool:
        """Whether `--only` leaves this name in: a part of it, or a pattern with * and ?."""
        return self.only is None or fnmatchcase(name, f"*{self.only}*")


class NothingToDo(Exception):
    """`--only` matches no name; the message says which there are."""


def synthetic(form: str) -> list[Workload]:
    """The named workloads of a form; those of MiniLM come by capturing it."""
    if form == "smoke":
        return [*problems.standard(64), *shapes.score_terms(8), *shapes.entmax(8)]
    return shapes.full() if form == "full" else shapes.quick()


def choose(settings: Settings) -> list[Workload]:
    """The synthetic workloads that are wanted; raises `NothingToDo` where `--only` matches nothing."""
    every = synthetic(settings.form)
    names = [*(workload.name for workload in every), *minilm.NAMES, *PARTS]
    if not any(map(settings.wants, names)):
        raise NothingToDo(f"--only {settings.only!r} matches none of {', '.join(names)}")
    return [workload for workload in every if settings.wants(workload.name)]


def steps(settings: Settings, chosen: list[Workload]) -> int:
    """How many steps `run` takes: the model, a check of each workload and its timings, the parts."""
    real = sum(map(settings.wants, minilm.NAMES))
    timings = len(DIRECTIONS) * real + sum(len(workload.directions) for workload in chosen)
    if settings.form == "full" and torch.get_num_threads() > 1:
        timings *= 2
    parts = sum(map(settings.wants, PARTS[:2]))
    if settings.wants("decoding"):
        parts += len(decoding.cases(settings.form))
    return bool(real) + len(_with_dense(chosen)) + real + timings + parts


def run(settings: Settings, chosen: list[Workload], report: Report, step: Step) -> None:
    """Measure everything into `report.results`, printing each part when it is finished.

    `step` is called with the name of what comes next.
    """
    results = report.results
    known = {workload.name: workload for workload in [*synthetic(settings.form), *chosen]}
    if any(map(settings.wants, minilm.NAMES)):
        step("MiniLM")
        real = _real(settings, results)
        known.update((workload.name, workload) for workload in real)
        chosen = [*chosen, *(workload for workload in real if settings.wants(workload.name))]

    failed = set()
    for name in _with_dense(chosen):
        step(f"checking {name}")
        check = checks.check(known[name], settings.dtype)
        results.checks.append(check)
        results.failures += [f"{name}: {failure}" for failure in check.failures]
        if check.failures:
            failed.add(name)
    sound = [workload for workload in chosen if workload.name not in failed]
    report.checks()

    own_threads = torch.get_num_threads()
    try:
        for workload, threads in _turns(sound, settings.form, own_threads):
            torch.set_num_threads(threads)
            dense = known.get(workload.dense) if workload.dense else None
            if dense is not None and dense.name in failed:
                dense = None
            point = settings.form == "full" and workload.name not in _HAVE_GOALS
            effort = _POINT if point else EFFORT[settings.form]
            for direction in workload.directions:
                step(f"timing {workload.name} {direction}")
                results.speed.append(_speed(settings, workload, dense, direction, effort))
            _print_finished(report, sound, workload, threads == 1 or settings.form != "full")
    finally:
        torch.set_num_threads(own_threads)
    if sound:
        results.notes.append(_LEGEND)
    if any(row.disturbed for row in results.speed):
        results.notes.append(_DISTURBED)
    if any("collaborative" in workload.name for workload in sound):
        results.notes.append(_break_even())
    if settings.wants("memory"):
        step("memory")
        _memory(settings, results)
        report.memory()
    if settings.wants("overhead"):
        step("overhead")
        results.overhead += measure.overhead(EFFORT[settings.form])
        report.overhead()
    if settings.wants("decoding"):
        _decoding(settings, results, step)
        report.decoding()
    results.complete = True


def _speed(
    settings: Settings,
    workload: Workload,
    dense: Workload | None,
    direction: Direction,
    effort: Effort,
) -> Speed:
    """A row of a table. Where it was disturbed it is measured once more, and the calmer of the two stays."""

    def measured() -> Speed:
        return measure.speed(workload, dense, settings.dtype, direction, effort, settings.floor)

    row = measured()
    if row.disturbed:
        row = min(row, measured(), key=lambda row: row.spread)
    return row


_DISTURBED = (
    "spread: a median by the fastest sample, where something else ran meanwhile; measured twice. Do not "
    "quote these rows."
)
_LEGEND = (
    "GFLOP/s: executed FLOPs by our median time. x: the time to the left by ours. x dense: our own "
    "time for the dense workload of the table (all heads open, no mask, dense mixing) by ours. x f32: "
    "our own time for the same numbers in float32 by ours. x mm: our FLOP/s by those of torch.mm. gap: our "
    "time by the floor."
)


def _break_even() -> str:
    narrow, wide = (hk.convert.break_even(768, 768, Ds, 12) for Ds in (256, 384))
    return (
        "Dense mixing runs H Ds / D_k times the score FLOPs of ordinary attention: BERT-base 4 times "
        "at Ds 256 and 6 times at Ds 384. With the projections that it saves it has fewer FLOPs in "
        f"all below T {narrow} and T {wide}. Ragged mixing has no such price."
    )


def _with_dense(workloads: Sequence[Workload]) -> list[str]:
    """Names of workloads and of those that they are compared with, each once."""
    pairs = [(workload.dense, workload.name) for workload in workloads]
    return list(dict.fromkeys(name for pair in pairs for name in pair if name is not None))


def _turns(
    workloads: Sequence[Workload], form: str, threads: int
) -> Iterator[tuple[Workload, int]]:
    for workload in workloads:
        yield workload, threads
        if form == "full" and threads > 1:
            yield workload, 1


def _print_finished(
    report: Report, workloads: Sequence[Workload], done: Workload, last_turn: bool
) -> None:
    """Print the table that `done` stands in if nothing of it is left to time."""
    left = workloads[workloads.index(done) + 1 :]
    if last_turn and not any(workload.table == done.table for workload in left):
        report.speed(done.table)


def _real(settings: Settings, results: Results) -> list[Workload]:
    try:
        return minilm.real_workloads(minilm.capture(_SENTENCES[settings.form]))
    except minilm.Unavailable as error:
        results.notes.append(f"No real input, synthetic workloads only: {error}")
        return []


def _memory(settings: Settings, results: Results) -> None:
    case = problems.memory_case(1024 if settings.form == "smoke" else 8192)
    name = f"B1 H8 T{case.T} D64"
    inputs = case.make(settings.dtype)
    failures = checks.check_long(inputs)
    results.failures += [f"memory: {failure}" for failure in failures]
    if not failures:
        full = settings.form == "full"
        results.memory += measure.memory(inputs, name, eager_backward=full)
    biased = shapes.score_terms(8 if settings.form == "smoke" else 1)[0]
    if settings.form != "quick":  # of which `biased` is a workload, and checked
        (inputs,) = biased.make(settings.dtype)
        results.memory += measure.memory(inputs, biased.name, eager_backward=True)


def _decoding(settings: Settings, results: Results, step: Step) -> None:
    """Every case in its own dtype, in full on all threads and on one."""
    effort = _POINT if settings.form == "full" else EFFORT[settings.form]
    own = torch.get_num_threads()
    for case in decoding.cases(settings.form):
        step(f"decoding {case}")
        cache = decoding.Cache(case)
        failures = decoding.check(cache)
        results.failures += failures
        if failures:
            continue
        for threads in dict.fromkeys((own, 1) if settings.form == "full" else (own,)):
            torch.set_num_threads(threads)
            try:
                results.decoding += decoding.measure(cache, effort.budget_s, effort.least)
            finally:
                torch.set_num_threads(own)


def backends(settings: Settings) -> list[str]:
    """Which backend runs the two operators and why not another, in words."""
    result = []
    for workload in problems.standard(64):
        if workload.name.endswith("_dense"):
            choice = measure.explain(workload.make(settings.dtype)[0])
            result.append(str(choice).replace("\n ", ";"))
    return result
