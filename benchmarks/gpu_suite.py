"""`python -m benchmarks.gpu_suite`: all that there is to run on a GPU, one stage after another, with a record.

doctor      which backends are right on this machine, and which is the fastest (`python -m heads_kernels doctor`)
tests       the operators' tests on the GPU; pytest-xdist starts another worker where one crashes
memcheck    compute-sanitizer over a few cases: accesses outside of memory
racecheck   the same: missing barriers in shared memory
benchmarks  times and memory against what people use today
tuner       tiles measured on this GPU, into heads_kernels/tuned/

    python -m benchmarks.gpu_suite [--out DIR] [--only STAGE ...] [--simulate]

Each stage is a process of its own, ended at a limit within ten minutes. One that crashes or hangs is recorded, and the
next one runs. DIR gets record.json after each stage, and <stage>.txt with all of its output. The same command continues
an interrupted run: stages that ended are not run again, unless --only names them; one that reached its limit is, and
finds its kernels compiled. `--simulate` runs a little of every stage in the simulators, on a machine without a GPU.

Exit status: 0; 1 where a stage failed; 2 for a bad option or a missing GPU; 130 where it was interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import results

ROOT: Final = Path(__file__).parent.parent
_PYTHON: Final = (sys.executable, "-m")
_PYTEST: Final = (*_PYTHON, "pytest", "-q", "-p", "no:cacheprovider")
#: Small cases with a mask, closed heads, a bias and a mixing vector: the sanitizer slows kernels by a hundred times.
_CASES: Final = "closed_batch_heads or padded_causal or ragged_bias or small_causal"
_TAIL: Final = 2000  # characters of a stage's output in the record
_TAIL_LINE: Final = 100
_REPORT_S: Final = 20.0  # for a stage to report what it has, after its limit
#: Status with which `python -m benchmarks` asks for a new process: a kernel broke the CUDA context.
_AGAIN: Final = 3
#: Outcomes of stages that are not run again.
_DONE: Final = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class Stage:
    """A command, and how many seconds it may take; `needs` is a program without which it is skipped."""

    command: tuple[str, ...]
    limit_s: float
    needs: str = ""


def _sanitizer(tool: str) -> Stage:
    command = f"compute-sanitizer --tool {tool} --error-exitcode 1 --target-processes all"
    chosen = f"bfloat16 and not eager and ({_CASES})"
    tests = ("tests/ops/test_cases.py", "--device", "cuda", "-k", chosen)
    return Stage((*command.split(), *_PYTEST, *tests), 400, needs="compute-sanitizer")


def stages(out: Path, simulate: bool) -> dict[str, Stage]:
    """By name, in their order."""
    numbers = ("--json", str(out / "benchmarks.json"))
    # Each holds half a GiB of the GPU, and an oracle up to 8 GiB.
    workers = str(min(8, os.cpu_count() or 1))
    if simulate:
        return {
            "doctor": Stage((*_PYTHON, "heads_kernels", "doctor", "--seconds", "20"), 300),
            "tests": Stage((*_PYTEST, "tests/ops/test_cases.py", "-m", "triton or cuda",
                "-k", "small_causal and float32"), 300),
            "memcheck": _sanitizer("memcheck"),
            "racecheck": _sanitizer("racecheck"),
            "benchmarks": Stage((*_PYTHON, "benchmarks", "--device", "cuda", "--smoke", "--only", "*_causal",
                *numbers), 500),
            "tuner": Stage((*_PYTHON, "benchmarks.tune", "--simulate", "--out", str(out / "tuned.json")), 500),
        }  # fmt: skip
    return {
        "doctor": Stage((*_PYTHON, "heads_kernels", "doctor", "--seconds", "240"), 400),
        "tests": Stage((*_PYTEST, "tests/ops", "--device", "cuda", "-n", workers), 550),
        "memcheck": _sanitizer("memcheck"),
        "racecheck": _sanitizer("racecheck"),
        "benchmarks": Stage((*_PYTHON, "benchmarks", "--device", "cuda", "--full", *numbers), 550),
        "tuner": Stage((*_PYTHON, "benchmarks.tune", "--minutes", "8"), 550),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    names = list(stages(Path(), False))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_suite", description=(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR",
        help="folder of the record; default: build/gpu-suite/<GPU>-<commit>")  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=names, metavar="STAGE", help=", ".join(names))
    parser.add_argument("--simulate", action="store_true", help="without a GPU, at toy sizes")
    options = parser.parse_args(arguments)
    if not (options.simulate or torch.cuda.is_available()):
        parser.error("no CUDA device: torch.cuda.is_available() is False; try --simulate")
    run = results.origin("simulated" if options.simulate else torch.cuda.get_device_name())
    folder = f"{run['device']}-{run['commit'][:12]}".lower().replace(" ", "-")
    out: Path = (options.out or ROOT / "build" / "gpu-suite" / folder).resolve()
    record = {**run, "stages": {}}
    if (out / "record.json").is_file():
        record = json.loads((out / "record.json").read_text(encoding="utf-8"))
        other = [f"{n} {record.get(n)}, not {run[n]}" for n in run if record.get(n) != run[n]]
        if other:
            parser.error(f"--out {out} has another run: {'; '.join(other)}; name another folder")
    out.mkdir(parents=True, exist_ok=True)
    return _run(record, out, options.only, options.simulate)


def _run(record: dict[str, Any], out: Path, only: list[str] | None, simulate: bool) -> int:
    done, every = record["stages"], stages(out, simulate)
    chosen = only or [name for name in every if name not in done or done[name]["outcome"] not in _DONE]
    interrupted = False
    for name in (name for name in every if name in chosen):
        file, limit = out / f"{name}.txt", every[name].limit_s
        print(f"== {name}, up to {limit / 60:.0f} min: {file}", flush=True)
        started = time.monotonic()
        try:
            outcome, status = _stage(every[name], file, simulate)
        except KeyboardInterrupt:
            outcome, status, interrupted = "interrupted", None, True
        done[name] = {
            "command": every[name].command, "outcome": outcome, "status": status,
            "seconds": round(time.monotonic() - started, 1),
            "output": file.read_text(encoding="utf-8", errors="replace")[-_TAIL:],
        }  # fmt: skip
        results.write_text(out / "record.json", json.dumps(record, indent=1) + "\n")
        if interrupted:
            break
    print(*_table(record, list(every)), f"record in {out}", sep="\n", flush=True)
    failed = any(row["outcome"] not in ("passed", "skipped") for row in done.values())
    return 130 if interrupted else int(failed)


def _stage(stage: Stage, file: Path, simulate: bool) -> tuple[str, int | None]:
    """The outcome and the exit status of a stage. Its output is in `file` as it is written."""
    if stage.needs and shutil.which(stage.needs) is None:
        file.write_text(f"{stage.needs} is not on PATH\n")
        return "skipped", None
    env = {**os.environ}
    if simulate:
        env |= {"TRITON_INTERPRET": "1", "HEADS_KERNELS_EMULATE_CUDA": "1"}
    if stage.needs:
        env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # every tensor in an allocation of its own
    until, status = time.monotonic() + stage.limit_s, _AGAIN
    with file.open("wb") as output:
        while status == _AGAIN:
            process = subprocess.Popen(stage.command, cwd=ROOT, env=env, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
            try:
                status = process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGINT)  # it reports what it has
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_REPORT_S)
                return "timed out", None
            finally:  # with what it started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    return "passed" if status == 0 else "failed" if status > 0 else "crashed", status


def _table(record: dict[str, Any], names: Sequence[str]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [f"\n{record['device']}, commit {record['commit'][:12]}; {versions}"]
    for name in names:
        row = record["stages"].get(name, {"outcome": "not run", "seconds": 0.0, "output": ""})
        last = row["output"].strip().rpartition("\n")[2][:_TAIL_LINE]
        lines.append(f"{name:11} {row['outcome']:11} {row['seconds']:6.0f} s  {last}")
    return lines


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit from outside: write what there is
    sys.exit(main())
