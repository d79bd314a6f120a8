"""What a run found, the machine it ran on, and the files that it is written to."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import heads_kernels as hk
from benchmarks.goals import Outcome, outcomes
from benchmarks.measure import Found, Row
from benchmarks.settings import Settings, word
from heads_kernels.files import write_whole

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Machine:
    """`level` is the instruction set of the CPU kernels, or why there are none; `version` that of heads_kernels."""

    processor: str
    cores: int
    threads: int
    level: str
    torch: str
    python: str
    version: str
    commit: str | None
    gpu: dict[str, Any] | None = None


@dataclass
class Results:
    """Everything that was measured so far; `path` is where it is written after every step.

    `running` is the step under way: in the file of a run that crashed, the one to blame. Those that ended earlier runs
    are in `ended`, and are left out.
    """

    machine: Machine
    settings: Settings
    backends: list[str] = field(default_factory=list)
    checks: list[Row] = field(default_factory=list)
    speed: list[Row] = field(default_factory=list)
    parts: dict[str, list[Row]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = False
    running: str | None = None
    ended: list[str] = field(default_factory=list)
    #: Load average of the minute before the run.
    load: float = field(default_factory=lambda: os.getloadavg()[0])
    path: Path | None = None

    @property
    def busy(self) -> bool:
        """Whether others leave fewer cores than the run takes; half a core more is a desktop at rest (heuristic)."""
        return self.load > self.machine.cores - self.machine.threads + 0.5

    def add(self, found: Found) -> None:
        """The rows of a part."""
        self.parts.setdefault(found.part, []).extend(found.rows)
        self.failures += found.failures

    def goals(self) -> list[Outcome]:
        """Those of a full run."""
        return outcomes(self.speed, self.parts) if self.settings.form == "full" else []

    def to_json(self) -> Row:
        s = self.settings
        return {
            "machine": asdict(self.machine), "device": s.device, "form": s.form, "only": s.only,
            "dtype": word(s.dtype), "backends": self.backends, "load": self.load,
            "complete": self.complete, "running": self.running, "ended": self.ended, "checks": self.checks,
            "speed": self.speed, "parts": self.parts, "failures": self.failures, "notes": self.notes,
            "goals": [asdict(outcome) for outcome in self.goals()],
        }  # fmt: skip

    def write(self) -> None:
        """The file, whole or not at all."""
        if self.path:
            write_text(self.path, json.dumps(self.to_json(), indent=1) + "\n")

    def step(self, name: str) -> None:
        self.running = name
        self.write()

    def resume(self) -> bool:
        """Take over an incomplete run of the same kind in `path`; the step that ended it is a failure."""
        try:
            old = json.loads(self.path.read_text()) if self.path else {}
        except (OSError, ValueError):
            return False
        if old.get("complete", True) or _kind(old) != _kind(self.to_json()):
            return False
        self.checks, self.speed = old["checks"], old["speed"]
        self.failures, self.notes = old["failures"], old["notes"]
        self.ended = old["ended"]
        if old["running"]:
            self.ended.append(old["running"])
            self.failures.append(f"{old['running']}: the run ended here")
        return True


def _kind(run: Row) -> list[Any]:
    """What two parts of one run have in common."""
    machine = run["machine"]
    about = [machine[name] for name in ("processor", "torch", "version", "commit")]
    gpu = (machine["gpu"] or {}).get("name")
    return [*about, gpu, *(run[key] for key in ("device", "form", "only", "dtype"))]


def this_machine(device: str = "cpu") -> Machine:
    return Machine(
        processor=processor(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        level=_level(),
        torch=torch.__version__,
        python=platform.python_version(),
        version=hk.__version__,
        commit=commit(),
        gpu=_gpu() if device == "cuda" else None,
    )


def _gpu() -> dict[str, Any]:
    """Its name, and the versions that its times depend on; on a machine without one, that kernels are simulated."""
    about: dict[str, Any] = {"name": "simulated on the CPU", "cuda": torch.version.cuda}
    about |= {name: _version(name) for name in ("triton", "flash_attn")}
    if not torch.cuda.is_available():
        return about
    properties = torch.cuda.get_device_properties(0)
    return about | {
        "name": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "driver": _driver(),
    }


def origin(device: str) -> dict[str, Any]:
    """What a result of that device depends on besides."""
    return {
        "device": device,
        "commit": commit() or hk.build_info().get("commit") or "unknown",
        "versions": {
            "heads_kernels": hk.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "cuda": torch.version.cuda,
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str:
    """Version, clocks and power as nvidia-smi has them; read, never set."""
    fields = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {error}"
    return f"{fields}: {done.stdout.strip()}"


def kept_file(machine: Machine) -> Path:
    """`benchmarks/results/<machine>.jsonl`, a run a line; it need not be there."""
    of_cpu = f"{machine.processor} {machine.cores} cores"
    name = re.sub(r"[^a-z0-9]+", "-", (machine.gpu["name"] if machine.gpu else of_cpu).lower())
    return _HERE / "results" / f"{name.strip('-')}.jsonl"


def keep(results: Results) -> Path:
    """Add the run as one line to the file of this machine."""
    path = kept_file(results.machine)
    path.parent.mkdir(exist_ok=True)
    lines = path.read_text() if path.exists() else ""
    write_text(path, lines + json.dumps(results.to_json()) + "\n")
    return path


def kept(path: Path) -> Iterator[Row]:
    """The runs in a kept file; lines that are none are passed over."""
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            run = json.loads(line)
            if isinstance(run, dict):
                yield run


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))


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
