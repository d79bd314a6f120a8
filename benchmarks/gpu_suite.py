"""`python -m benchmarks.gpu_suite --out DIR`: everything there is to know about the kernels on one GPU.

Checks (accuracy, determinism, CUDA graphs, hidden NaN, torch.compile), times every backend against
what people use today, measures memory, and prints a short table last. DIR gets results.json, written
after every stage and between, and plots. Nothing is built or downloaded: Triton compiles its kernels as
they are called. It needs torch and a GPU, and draws plots where matplotlib is installed.

    python -m benchmarks.gpu_suite --out DIR [--only STAGE,...] [--minutes N]
    python -m benchmarks.gpu_suite keep DIR    # copy a run to benchmarks/results/<gpu>/; several are one
    python -m benchmarks.gpu_suite support     # bring README's table of GPU support in step with those

Exit status: 0; 1 where a check failed; 2 for a bad option or a missing GPU; 130 where it was
interrupted, after the report of what was measured by then.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

import torch

import heads_kernels as hk
from benchmarks import results
from benchmarks.gpu import support
from benchmarks.gpu.plots import draw
from benchmarks.gpu.pool import MOST_WORKERS, Pool
from benchmarks.gpu.record import Record
from benchmarks.gpu.settings import Row, Settings
from benchmarks.gpu.stages import STAGES
from benchmarks.gpu.summary import lines, stage_line

#: Seconds kept for what is under way at the end (`pool.GRACE_S`), plots and the report.
_LAST_S: Final = 18.0
_WRITE_S: Final = 5.0  # between two writings of results.json within a stage


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["keep"]:
        return _keep(words[1:])
    if words[:1] == ["support"]:
        return _support(words[1:])
    parser = _parser()
    options = parser.parse_args(words)
    stages = _chosen(parser, options.only)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu is for --tiny, the form that shows that everything runs")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device: torch.cuda.is_available() is False; try --device cpu --tiny")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out}: {error}")
    return _Suite(options, stages).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_suite", description=(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the results"
    )
    parser.add_argument("--only", metavar="STAGE,...", help=f"some of {', '.join(STAGES)}")
    parser.add_argument("--minutes", type=_minutes, default=8.5, metavar="N",
        help="what is not done by then is left out, and said to be (default 8.5)")  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes: does everything run?")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that compile at once")
    parser.add_argument("--commit", help="where there is no git to ask")
    return parser


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 24 * 60:
        raise argparse.ArgumentTypeError(f"is {text!r}; pass a number of minutes above 0")
    return value


def _chosen(parser: argparse.ArgumentParser, only: str | None) -> list[str]:
    known = list(STAGES)
    if only is None:
        return known
    wanted = [word.strip() for word in only.split(",")]
    unknown = [word for word in wanted if word not in known]
    if unknown:
        parser.error(f"--only {', '.join(map(repr, unknown))}: use some of {', '.join(known)}")
    return [stage for stage in known if stage in wanted]


class _Suite:
    """One run: `record` is what was found so far."""

    def __init__(self, options: argparse.Namespace, stages: list[str]) -> None:
        self.settings = Settings(options.device, options.tiny)
        self.stages, self.out = stages, options.out
        self.end = time.monotonic() + 60 * options.minutes - (0 if options.tiny else _LAST_S)
        self.minutes = options.minutes
        self.workers = options.workers or (
            2 if options.tiny else min(MOST_WORKERS, os.cpu_count() or 1)
        )
        commit = options.commit or results.commit() or hk.build_info().get("commit") or "unknown"
        self.record = Record(
            "tiny" if options.tiny else "full", options.device, commit, options.minutes
        )
        self.written = 0.0

    def run(self) -> int:
        interrupted = False
        try:
            with Pool(self.settings, 1) as one:
                with Pool(self.settings, max(1, self.workers)) as many:
                    # The workers that compile are gone before anything is timed.
                    for stage in (s for s in self.stages if not self._timed(s)):
                        self._stage(stage, many if STAGES[stage].parallel else one)
                for stage in filter(self._timed, self.stages):
                    self._stage(stage, one)
            self.record.complete = True
        except KeyboardInterrupt:
            interrupted = True
            self.record.notes.append("interrupted: the rest was not measured")
        self.record.write(self.out)
        self._plots()
        print(*lines(self.record), f"numbers in {self.out}", sep="\n", flush=True)
        return 130 if interrupted else int(bool(self.record.failures()))

    def _timed(self, stage: str) -> bool:
        return list(STAGES).index(stage) >= list(STAGES).index("timing")

    def _stage(self, stage: str, pool: Pool) -> None:
        kind = STAGES[stage]
        names = list(import_module(kind.module).items(self.settings))
        later = self.stages[self.stages.index(stage) + 1 :]
        kept = 60 * self.minutes * sum(STAGES[name].least for name in later)
        if stage == "machine":
            kept = 0.0  # seconds of work, and without it a run cannot be kept
        started = time.monotonic()
        # A twentieth of the minutes is any stage's, also where an earlier one took what was kept for it.
        until = min(self.end, max(self.end - kept, started + 3 * self.minutes))
        print(
            f"== {stage}: {len(names)} items, up to {max(0.0, until - started):.0f} s", flush=True
        )
        rows = self.record.stages.setdefault(stage, [])

        def done(row: Row) -> None:
            rows.append(row)
            if time.monotonic() - self.written > _WRITE_S:
                self.record.write(self.out)
                self.written = time.monotonic()

        try:
            pool.run(stage, names, until=until, item_s=kind.item_s, done=done)
        finally:
            self.record.seconds[stage] = round(time.monotonic() - started, 1)
        print("  ", stage_line(self.record, stage), flush=True)
        self.record.write(self.out)

    def _plots(self) -> None:
        try:
            draw(self.record, self.out)
        except ImportError as error:
            self.record.notes.append(f"no plots: {error}")
        except Exception as error:
            # The numbers are written; a plot must not take the exit status of the checks.
            self.record.notes.append(f"no plots: {type(error).__name__}: {error}")


def _keep(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_suite keep")
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR",
        help="what --out was; further ones, of the same commit, give what the first left out")  # fmt: skip
    try:
        target = support.keep(parser.parse_args(words).folders)
    except support.CannotKeep as error:
        parser.error(str(error))
    support.rewrite()
    print(f"kept in {target}; README's table of GPU support is in step")
    return 0


def _support(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_suite support")
    parser.parse_args(words)
    print("README.md is rewritten" if support.rewrite() else "README.md is in step")
    return 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)  # a time limit from outside: report what is there
    sys.exit(main())
