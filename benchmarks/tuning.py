"""One Triton kernel with given tiles: does it compile, how long does its call take, is it right?

    python -m benchmarks.tuning

reads jobs from stdin, one JSON object a line, and prints a row for each. What kernels do may end the process, or block
it: `run_jobs` starts another for the jobs that are left. With TRITON_INTERPRET=1 calls have toy sizes, on the CPU.

The launchers ask `tiles_for(kernel, like, D, Dv, ...)`, most of them through `tiles_of_pass`. It is replaced in every
module that has it by name, so kernels need no list here: what a call asks for is what there is to tune.
"""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor

from heads_kernels import ops
from heads_kernels.backends import TRITON_INTERPRETED
from heads_kernels.testing import Case, CollaborativeCase, GatedCase, compare, masks, reference, time_in_turn

Tiles = dict[str, int]  # block_m, block_n, ..., num_warps, num_stages
#: What a job found; "wrong" says what went wrong, where anything did.
Row = dict[str, Any]

ROOT: Final = Path(__file__).parent.parent
BACKEND: Final = "triton"
DEVICE: Final = "cpu" if TRITON_INTERPRETED else "cuda"
#: Seconds that a job may take: a backward pass compiles six kernels in fifteen.
JOB_S: Final = 120
_STARTUP_S: Final = 120  # to import torch and open the GPU while others do the same


@dataclass(frozen=True)
class Job:
    """`what` is "probe" (which kernels run?), "try" (do `tiles` compile?), "time" or "check".

    call     name of one of `CALLS`
    tiles    forced on `kernel`; several for "time", which takes turns
    """

    what: str
    call: str
    dtype: str
    kernel: str = ""
    tiles: tuple[Tiles, ...] = ()


@dataclass(frozen=True)
class TunedCall:
    """A dense and a causal call, timed together; `direction` is forward, backward or statistics."""

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


# ---------------------------------------------------------------------- the processes
def run_jobs(jobs: Sequence[Job], *, processes: int, until: float) -> list[Row]:
    """The rows of the jobs, in their order. A job that ends or blocks its process costs its own row."""
    count = max(1, min(processes, len(jobs)))
    parts = [jobs[i::count] for i in range(count)]
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(partial(_answers, until=until), parts))
    return [found[i % count][i // count] for i in range(len(jobs))]


def _answers(jobs: Sequence[Job], until: float) -> list[Row]:
    rows: list[Row] = []
    while left := jobs[len(rows) :]:
        seconds = until - time.monotonic()
        if seconds <= 0:
            return [*rows, *({"wrong": "no time was left"} for _ in left)]
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen([sys.executable, "-m", __name__], cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)  # fmt: skip
            asked = "".join(json.dumps(asdict(job)) + "\n" for job in left)
            try:
                output, _ = process.communicate(asked, seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        answered = [json.loads(line) for line in output.splitlines() if line.startswith('{"row"')]
        rows += [answer["row"] for answer in answered]
        if len(answered) < len(left) and time.monotonic() < until:
            rows.append({"wrong": f"the process ended with status {process.returncode}: {last}"})
    return rows


def main() -> None:
    """Answer the jobs of stdin."""
    torch.set_num_threads(1)  # many processes share the cores
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print does not come between the answers
    signal.alarm(_STARTUP_S)
    for line in sys.stdin:
        signal.alarm(JOB_S)  # ends the process
        row = run_job(Job(**json.loads(line)))
        answers.write(json.dumps({"row": row}) + "\n")
        answers.flush()
        if DEVICE == "cuda":
            torch.cuda.synchronize()  # a broken context ends the process
            torch.cuda.empty_cache()  # several share the memory


def run_job(job: Job) -> Row:
    """The row of one job; what it raises is in the row."""
    try:
        row = _DO[job.what](job)
        if DEVICE == "cuda":
            torch.cuda.synchronize()  # an asynchronous error is this job's
    except Exception as error:
        row = {"wrong": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    return row


# ---------------------------------------------------------------------- the jobs
def _probe(job: Job) -> Row:
    """The kernels that the call asks tiles for: `{"kernel", "D", "Dv", "tiles", "used"}` each; `used` are
    the numbers of `tiles` that the launcher reads."""
    asked: dict[str, dict[str, Any]] = {}

    def note(original: Callable[..., Any], kernel: str, like: Tensor, D: int, Dv: int, *terms: bool) -> Any:
        tiles = original(kernel, like, D, Dv, *terms)
        found = {"kernel": kernel, "D": D, "Dv": Dv, "tiles": asdict(tiles), "used": []}
        return _watched(tiles, asked.setdefault(kernel, found)["used"])

    with _replaced(note):
        _call(job)()
    return {"kernels": list(asked.values())}


def _watched(tiles: Any, used: list[str]) -> Any:
    """The same tiles, which note the names that are read of them."""
    names = list(asdict(tiles))

    def read(self: Any, name: str) -> Any:
        if name in names and name not in used:
            used.append(name)
        return object.__getattribute__(self, name)

    return type("Watched", (type(tiles),), {"__getattribute__": read})(**asdict(tiles))


def _try(job: Job) -> Row:
    """Compile and run once; tiles that do not fit the GPU raise, and the row says why."""
    with _forced(job.kernel, job.tiles[0]):
        _call(job)()
    return {}


def _time(job: Job) -> Row:
    """Milliseconds of the call with each of `tiles`: the median over turns, on a cold L2 cache."""
    call = _call(job)

    def forced(tiles: Tiles) -> None:
        with _forced(job.kernel, tiles):
            call()

    calls = {str(i): partial(forced, tiles) for i, tiles in enumerate(job.tiles)}
    times = time_in_turn(
        calls, device=DEVICE, cold=True, warmup=1,
        budget_s=0.0 if TRITON_INTERPRETED else 1.0, least=1 if TRITON_INTERPRETED else 9,
    )  # fmt: skip
    return {"ms": [timing.median * 1e3 for timing in times.values()]}


def _check(job: Job) -> Row:
    """The accuracy rule with the tiles forced, at lengths that no tile divides."""
    tuned, dtype = CALLS[job.call], getattr(torch, job.dtype)
    case = replace(tuned.cases[0], B=2, H=4, T=1000, S=1000)
    case = toy(case) if TRITON_INTERPRETED else case
    wrong: list[str] = []
    with _forced(job.kernel, job.tiles[0]):
        for each in (replace(case, is_causal=True), replace(case, B=2, mask=masks.padded(case.T, case.T // 3))):
            inputs = each.make(dtype, DEVICE)
            report = compare(reference(inputs.statistics() if tuned.direction == "statistics" else inputs), BACKEND)
            wrong += [str(quantity) for quantity in report.quantities if not quantity.ok]
    return {"wrong": "; ".join(wrong)} if wrong else {}


_DO: Final = {"probe": _probe, "try": _try, "time": _time, "check": _check}


def toy(case: Case) -> Case:
    """The same call at the size of a simulator."""
    narrow: dict[str, Any] = {"D": 16} if isinstance(case, GatedCase) else {"Ds": 32}
    return replace(case, B=1, H=2, T=33, S=33, Dv=16, **narrow)


def _call(job: Job) -> Callable[[], None]:
    """The call of the job, dense and causal, ready to run again and again."""
    tuned = CALLS[job.call]
    runs: list[Callable[[], object]] = []
    for case in tuned.cases:
        small = toy(case) if TRITON_INTERPRETED else case
        inputs = small.make(getattr(torch, job.dtype), DEVICE, drawn_on=DEVICE)
        if tuned.direction == "statistics":
            runs.append(partial(inputs.statistics(received=None).call, BACKEND))
        elif tuned.direction == "forward":
            runs.append(partial(inputs.call, BACKEND))
        else:
            leaves = inputs.requires_grad()
            runs.append(
                partial(torch.autograd.grad, leaves.call(BACKEND), list(leaves.tensors.values()),
                    leaves.dout, retain_graph=True)
            )  # fmt: skip

    def call() -> None:
        for run in runs:
            run()

    return call


# ---------------------------------------------------------------------- what is replaced
def _forced(kernel: str, tiles: Tiles) -> contextlib.AbstractContextManager[None]:
    """`kernel` gets `tiles`, every other what it always gets."""

    def answer(original: Callable[..., Any], asked: str, *call: Any) -> Any:
        usual = original(asked, *call)
        return replace(usual, **tiles) if asked == kernel else usual

    return _replaced(answer)


@contextlib.contextmanager
def _replaced(function: Callable[..., Any]) -> Iterator[None]:
    """`function(original, ...)` in the place of `tiles_for` in every launcher module.

    The kernels in Gluon that would stand for those of Triton stand aside.
    """
    with contextlib.ExitStack() as stack:
        for module in _launchers():
            original = module.tiles_for
            stack.enter_context(patch.object(module, "tiles_for", partial(function, original)))
        backend = import_module(f"{ops.__name__}.{BACKEND}.backend")
        stack.enter_context(patch.object(backend, "warp_tiles", lambda *_: None))
        yield


def _launchers() -> list[Any]:
    """The modules of the Triton backend that ask for tiles."""
    package = import_module(f"{ops.__name__}.{BACKEND}")
    modules = [import_module(f"{package.__name__}.{info.name}") for info in pkgutil.iter_modules(package.__path__)]
    return [module for module in modules if hasattr(module, "tiles_for")]


if __name__ == "__main__":
    main()
