"""One kernel with tiles that are forced on it: does it compile, how long does it take, is it right?

The launchers ask `tiles_for(kernel, like, D, Dv, ...)`, which each module imports by name, and start the
kernel by `launch(kernel, programs, like, tiles, ...)`. Both are replaced in every module that has them,
so that kernels need no list here: what a call asks for is what there is to tune.
"""

from __future__ import annotations

import contextlib
import json
import pkgutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from statistics import median
from types import ModuleType
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor

import heads_kernels as hk
from benchmarks.gpu.settings import FAILED, PASSED, Items, Row, Settings, must_serve
from benchmarks.gpu.statistics import check_statistics, statistics_call
from benchmarks.gpu.workloads import tiny
from benchmarks.measure import gradients
from heads_kernels import ops
from heads_kernels.testing import Case, CollaborativeCase, GatedCase, check, masks
from heads_kernels.testing.timing import FLUSH_BYTES

Tiles = dict[str, int]  # block_m, block_n, ..., num_warps, num_stages

BACKEND: Final = "triton"
_SAMPLES: Final = 9


@dataclass(frozen=True)
class Job:
    """`what` is "probe" (which kernels run?), "try" (do `tiles` compile?), "time" or "check".

    call     name of one of `CALLS`
    tiles    forced on `kernel`; a list of them for "time", which takes turns
    """

    what: str
    call: str
    dtype: str
    kernel: str = ""
    tiles: tuple[Tiles, ...] = ()

    def to_name(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_name(cls, name: str) -> Job:
        given = json.loads(name)
        return cls(**{**given, "tiles": tuple(given["tiles"])})


@dataclass(frozen=True)
class TunedCall:
    """Calls whose times are added, dense and causal; `direction` is forward, backward or statistics."""

    direction: str
    cases: tuple[Case, ...]


def _calls() -> dict[str, TunedCall]:
    sizes: dict[str, Any] = {"B": 4, "T": 4096, "S": 4096, "layout": "transposed"}
    dense: dict[str, Case] = {}
    for D in (64, 128):
        dense[f"gated_D{D}"] = GatedCase("tuned", **sizes, H=2048 // D, D=D, Dv=D, gate="H")
    for Ds in (256, 512):
        dense[f"collaborative_Ds{Ds}"] = CollaborativeCase("tuned", **sizes, H=12, Ds=Ds, Dv=64)
    return {
        f"{name} {direction}": TunedCall(direction, (case, replace(case, is_causal=True)))
        for direction in ("forward", "backward", "statistics")
        for name, case in dense.items()
    }


CALLS: Final = _calls()


class _Jobs(dict[str, Callable[[], Row]]):
    """Every job there may be, by its name."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings

    def __missing__(self, name: str) -> Callable[[], Row]:
        job = Job.from_name(name)
        return partial(_DO[job.what], self._settings, job)


def items(settings: Settings) -> Items:
    return _Jobs(settings)


def _probe(settings: Settings, job: Job) -> Row:
    """The kernels that the call asks tiles for: `{"kernel", "D", "Dv", "tiles", "used"}` each; `used` are
    the numbers of `tiles` that the launcher reads."""
    asked: dict[str, dict[str, Any]] = {}

    def note(
        original: Callable[..., Any], kernel: str, like: Tensor, D: int, Dv: int, *terms: bool
    ) -> Any:
        tiles = original(kernel, like, D, Dv, *terms)
        found = {"kernel": kernel, "D": D, "Dv": Dv, "tiles": asdict(tiles), "used": []}
        return _watched(tiles, asked.setdefault(kernel, found)["used"])

    with _replaced("tiles_for", note):
        for run in _runs(settings, job):
            run()
    return {"kernels": list(asked.values())}


def _watched(tiles: Any, used: list[str]) -> Any:
    """The same tiles, which note the names that are read of them."""
    names = list(asdict(tiles))

    def read(self: Any, name: str) -> Any:
        if name in names and name not in used:
            used.append(name)
        return object.__getattribute__(self, name)

    return type("Watched", (type(tiles),), {"__getattribute__": read})(**asdict(tiles))


def _try(settings: Settings, job: Job) -> Row:
    """Compile and run once; tiles that do not fit the GPU raise, and the row says why."""
    with _forced(job.kernel, job.tiles[0]):
        for run in _runs(settings, job):
            run()
    return {}


def _time(settings: Settings, job: Job) -> Row:
    """Milliseconds of the kernel alone with each of `tiles`, taken in turn: the median over turns, summed
    over the calls."""
    runs = _runs(settings, job)
    flush = torch.empty(
        FLUSH_BYTES if settings.on_gpu else 0, dtype=torch.int8, device=settings.device
    )
    taken: list[list[float]] = [[] for _ in job.tiles]
    turns = 2 if settings.tiny else _SAMPLES
    for turn in range(turns + 1):
        for number, tiles in enumerate(job.tiles):
            clock = _Clock(settings.on_gpu)
            with _forced(job.kernel, tiles, clock):
                for run in runs:
                    flush.zero_()
                    run()
            if turn:  # the first warms up
                taken[number].append(clock.milliseconds())
    return {"ms": [median(times) for times in taken]}


def _check(settings: Settings, job: Job) -> Row:
    """The accuracy rule with the tiles forced, at lengths that no tile divides."""
    tuned, dtype = CALLS[job.call], getattr(torch, job.dtype)
    T = 33 if settings.tiny else 1000
    case = tiny(tuned.cases[0], H=2, T=T) if settings.tiny else replace(tuned.cases[0], H=4)
    case = replace(case, B=2, T=T, S=T)
    cases = replace(case, is_causal=True), replace(case, mask=masks.padded(T, T // 3))
    wrong: list[str] = []
    with _forced(job.kernel, job.tiles[0]):
        for case in cases:
            if tuned.direction == "statistics":
                wrong += check_statistics(case.make(dtype, settings.device), BACKEND)[0]
            else:
                report = check(case, dtype, BACKEND, device=settings.device)
                wrong += [str(quantity) for quantity in report.quantities if not quantity.ok]
    return {"verdict": FAILED if wrong else PASSED, "detail": "; ".join(wrong)}


_DO: Final = {"probe": _probe, "try": _try, "time": _time, "check": _check}


def _runs(settings: Settings, job: Job) -> list[Callable[[], object]]:
    """The calls of the job, ready to run again and again."""
    tuned = CALLS[job.call]
    runs: list[Callable[[], object]] = []
    for case in tuned.cases:
        small = tiny(case, H=2, T=33) if settings.tiny else case
        inputs = small.make(getattr(torch, job.dtype), settings.device, drawn_on=settings.device)
        if tuned.direction == "statistics":
            given = statistics_call(inputs, BACKEND)
            runs.append(partial(hk.attention_statistics, **given, backend=BACKEND))
            continue
        must_serve(inputs, BACKEND)
        if tuned.direction == "forward":
            runs.append(partial(inputs.call, BACKEND))
        else:
            leaves = inputs.requires_grad()
            runs.append(gradients(leaves, leaves.call(BACKEND)))
    return runs


# ---------------------------------------------------------------------- what is replaced
class _Clock:
    """Adds up the time of the launches between `start` and `stop`."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._spans: list[tuple[Any, Any]] = []

    def now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def span(self, begin: Any, end: Any) -> None:
        self._spans.append((begin, end))

    def milliseconds(self) -> float:
        """Of all launches so far; infinite where the kernel never ran."""
        if not self._spans:
            return float("inf")
        if not self._on_gpu:
            seconds: float = sum(end - begin for begin, end in self._spans)
            return seconds * 1e3
        torch.cuda.synchronize()
        total: float = sum(begin.elapsed_time(end) for begin, end in self._spans)
        return total


@contextlib.contextmanager
def _forced(kernel: str, tiles: Tiles, clock: _Clock | None = None) -> Iterator[None]:
    """`kernel` gets `tiles`, every other what it always gets; `clock` times its launches."""
    mine: list[Any] = []

    def answer(original: Callable[..., Any], asked: str, *call: Any) -> Any:
        usual = original(asked, *call)
        if asked != kernel:
            return usual
        mine.append(replace(usual, **tiles))
        return mine[-1]

    def launch(
        original: Callable[..., Any], jit: Any, programs: int, like: Tensor, given: Any,
        *rest: Any, **constants: Any,
    ) -> None:  # fmt: skip
        timed = clock is not None and any(given is one for one in mine)
        begin = clock.now() if clock is not None and timed else None
        original(jit, programs, like, given, *rest, **constants)
        if clock is not None and timed:
            clock.span(begin, clock.now())

    with _replaced("tiles_for", answer), _replaced("launch", launch):
        yield


@contextlib.contextmanager
def _replaced(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """`function(original, ...)` in the place of `name` in every launcher module."""
    with contextlib.ExitStack() as stack:
        for module in launchers():
            if hasattr(module, name):
                original = getattr(module, name)
                stack.enter_context(patch.object(module, name, partial(function, original)))
        yield


def launchers() -> list[ModuleType]:
    """The modules of the Triton backend that ask for tiles."""
    found = []
    for info in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        _, _, last = info.name.rpartition(".")
        in_backend = f"{ops.__name__}.{BACKEND}." in info.name or last.split("_")[0] == BACKEND
        if in_backend and last != "tiles":
            module = import_module(info.name)
            if hasattr(module, "tiles_for"):
                found.append(module)
    return found
