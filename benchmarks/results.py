"""What a run found, the machine it ran on, and the files that it is written to."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import torch

import heads_kernels as hk
from benchmarks.checks import Check
from benchmarks.decoding import Row as Decoding
from benchmarks.goals import GOALS, MEMORY_GOAL_MIB, OVERHEAD_GOAL_US, Versus
from benchmarks.measure import Memory, Overhead, Speed

_HERE = Path(__file__).parent
_AGAINST: Final[dict[Versus, str]] = {
    "eager": "eager",
    "sdpa": "SDPA*gate",
    "best": "best PyTorch",
    "dense": "own dense time",
    "dense rate": "own dense rate",
    "float32": "own float32",
    "sgemm": "sgemm rate",
}


@dataclass(frozen=True)
class Machine:
    processor: str
    cores: int
    threads: int
    level: str  # instruction set of the CPU kernels, or why there are none
    torch: str
    python: str
    version: str  # of heads_kernels
    commit: str | None


@dataclass(frozen=True)
class Outcome:
    """A goal beside what was measured, both as a person reads them; `threads` where it is a time."""

    goal: str
    against: str
    wanted: str
    got: str
    met: bool
    threads: int | None = None


@dataclass
class Results:
    """Everything that was measured so far."""

    machine: Machine
    form: str
    dtype: str
    backends: list[str]
    checks: list[Check] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    speed: list[Speed] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    overhead: list[Overhead] = field(default_factory=list)
    decoding: list[Decoding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = False
    #: Load average of the minute before the run.
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def busy(self) -> bool:
        """Whether others leave fewer cores than the run takes; half a core more is a desktop at rest (heuristic)."""
        return self.load > self.machine.cores - self.machine.threads + 0.5

    def goals(self) -> list[Outcome]:
        """The goals of a full run, on every number of threads that it was measured on."""
        found: list[Outcome] = []
        if self.form != "full":
            return found
        for goal in GOALS:
            for row in self.speed:
                if (row.workload, row.direction) != (goal.workload, goal.direction):
                    continue
                if (ratio := row.ratio(goal.versus)) is not None:
                    least = goal.wanted(row.threads)
                    found.append(Outcome(f"{goal.workload} {goal.direction}",
                        _AGAINST[goal.versus], _shown(goal.versus, least),
                        _shown(goal.versus, ratio), ratio >= least, row.threads))  # fmt: skip
        for peak in self.memory:
            if peak.candidate == "ours" and peak.direction == "forward" and peak.extra is not None:
                text, mib = f"peak extra memory, forward, {peak.case}", peak.extra / 2**20
                wanted, got = f"under {MEMORY_GOAL_MIB:.0f} MiB", f"{mib:.1f} MiB"
                found.append(Outcome(text, "", wanted, got, mib < MEMORY_GOAL_MIB))
        ours = [row.us for row in self.overhead if "_attention" in row.call]
        if ours:
            text, us = "overhead of a forward call, the slowest of ours", max(ours)
            wanted, got = f"at most {OVERHEAD_GOAL_US:.0f} us", f"{us:.1f} us"
            found.append(Outcome(text, "", wanted, got, us <= OVERHEAD_GOAL_US))
        return found

    def to_json(self) -> dict[str, object]:
        """Plain data; ratios are left to the reader, who has the times."""
        return {**asdict(self), "goals": [asdict(outcome) for outcome in self.goals()]}


def _shown(versus: Versus, ratio: float) -> str:
    """A ratio of times, or a share of a rate."""
    return f"{ratio:.0%}" if versus in ("dense rate", "sgemm") else f"{ratio:.2f}x"


def this_machine() -> Machine:
    return Machine(
        processor=processor(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        level=_level(),
        torch=torch.__version__,
        python=platform.python_version(),
        version=hk.__version__,
        commit=commit(),
    )


def write_json(results: Results, path: Path) -> None:
    write_whole(path, json.dumps(results.to_json(), indent=1) + "\n")


def kept_file(machine: Machine) -> Path:
    """`benchmarks/results/<machine>.jsonl`, a run a line; it need not be there."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{machine.processor} {machine.cores} cores".lower())
    return _HERE / "results" / f"{name.strip('-')}.jsonl"


def keep(results: Results) -> Path:
    """Add the run as one line to the file of this machine."""
    path = kept_file(results.machine)
    path.parent.mkdir(exist_ok=True)
    lines = path.read_text() if path.exists() else ""
    write_whole(path, lines + json.dumps(results.to_json()) + "\n")
    return path


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A file to write in a new folder beside `path`, gone at the end unless it was renamed."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        yield Path(folder) / path.name


def write_whole(path: Path, text: str) -> None:
    """Write `text` whole or not at all."""
    with _beside(path) as new:
        new.write_text(text, encoding="utf-8")
        new.replace(path)


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Its name, and the numbers of its family and model where they are known: generations share a name."""
    about: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text().partition("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            about[key.strip()] = value.strip()
    if "model name" not in about:
        return platform.processor() or platform.machine()
    if "cpu family" not in about or "model" not in about:
        return about["model name"]
    return f"{about['model name']}, family {about['cpu family']} model {about['model']}"


def _level() -> str:
    try:
        from heads_kernels import _cpu
    except ImportError as error:
        return f"no CPU kernels ({error})"
    return _cpu.level()


def commit() -> str | None:
    """Commit of the checkout of this file, `-dirty` where files differ; None without git."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(_HERE.parent), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if git("status", "-s") else "")
    except (OSError, subprocess.SubprocessError):
        return None
