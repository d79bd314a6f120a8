"""`python -m benchmarks.tune`: the fastest tiles of every Triton kernel on this GPU, as a data file.

Candidates are near the tiles that the kernel has today. They are compiled by many processes at once; those that do not
compile or do not fit are counted with their reasons. The others are timed in turn: the whole call, dense and causal, on
a cold cache, at T 4096. A winner is written where the call is faster than with today's tiles by more than noise and
holds the accuracy rule.

    python -m benchmarks.tune [--out FILE] [--kernel PATTERN] [--minutes N]

FILE, by default heads_kernels/tuned/<gpu>.json, keeps its entries of other kernels and widths.
Exit status: 0; 1 where a kernel could not be tuned; 2 for a bad option or a missing GPU; 130 where it was interrupted
(what was written remains).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import results
from benchmarks.tuning import CALLS, ROOT, Job, Row, Tiles, run_jobs

#: Processes that compile at once; each holds a CUDA context of half a GiB.
_PROCESSES: Final = min(16, os.cpu_count() or 1)
#: A candidate has to beat today's tiles by this factor, or it is noise.
_GAIN: Final = 1.02
#: Candidates that are timed, by what compiled first; the accuracy of up to `_TRIES` winners is looked at.
_TIMED: Final = 40
_TRIES: Final = 3
#: Rows or keys a tile may have, features a slice; warps and stages: what Triton compiles sensibly.
_BLOCKS: Final = (16, 256)
_LIMITS: Final = {
    "num_warps": (2, 8),
    "num_stages": (1, 5),
    "partial_stages": (1, 5),
    "full_tiles": (1, 4),  # that a step may take through descriptors (heuristic)
    "maxnreg": (0, 255),
}
#: Registers a thread may take at most: any, or those with which 2 and 3 programs of 8 warps share a multiprocessor.
_REGISTERS: Final = (0, 128, 80)


def neighbours(tiles: Tiles, used: Sequence[str]) -> Iterator[Tiles]:
    """Tiles that differ in one or two of the numbers that a kernel uses, by one step: blocks and warps by a
    factor of two, stages by one; and in the limit of registers."""
    steps = {
        name: [value + 1, value - 1] if "stages" in name else [value * 2, value // 2]
        for name, value in tiles.items()
        if name in used and value and name != "maxnreg"
    }
    if "maxnreg" in used:
        steps["maxnreg"] = [limit for limit in _REGISTERS if limit != tiles["maxnreg"]]

    def sensible(name: str, value: int) -> bool:
        lowest, highest = _LIMITS.get(name, _BLOCKS)
        return lowest <= value <= highest

    for count in (1, 2):
        for names in itertools.combinations(steps, count):
            for values in itertools.product(*(steps[name] for name in names)):
                changes = dict(zip(names, values, strict=True))
                if all(itertools.starmap(sensible, changes.items())):
                    yield {**tiles, **changes}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--kernel", default="*", metavar="PATTERN", help='such as "*.forward"')
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--minutes", type=float, default=8.0, metavar="N")
    parser.add_argument("--simulate", action="store_true",
        help="a toy size in Triton's interpreter, of float32 and one call: does it run?")  # fmt: skip
    options = parser.parse_args(arguments)
    if not (options.simulate or torch.cuda.is_available()):
        parser.error("no CUDA device: torch.cuda.is_available() is False; try --simulate")
    if options.simulate and options.out is None:
        parser.error("--simulate measures nothing to keep: name a file with --out")
    if options.simulate:
        os.environ["TRITON_INTERPRET"] = "1"  # of the processes that are started
    device = "simulated" if options.simulate else torch.cuda.get_device_name()
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    out = options.out or ROOT / "heads_kernels" / "tuned" / f"{slug}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        return _Tuner(options, out, device).run()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return 130


class _Tuner:
    def __init__(self, options: argparse.Namespace, out: Path, device: str) -> None:
        self.simulate, self.out, self.device = options.simulate, out, device
        self.pattern = options.kernel
        self.dtype = "float32" if self.simulate else options.dtype
        self.end = time.monotonic() + 60 * options.minutes
        self.failed = False

    def run(self) -> int:
        calls = list(CALLS)[:1] if self.simulate else list(CALLS)
        found: dict[tuple[str, int, int], tuple[Job, list[str]]] = {}
        probes = self._do([Job("probe", call, self.dtype) for call in calls])
        for call, row in zip(calls, probes, strict=True):
            if "wrong" in row:
                print(f"{call}: {row['wrong']}", flush=True)
                self.failed = True
            for asked in row.get("kernels", ()):
                if fnmatchcase(asked["kernel"], self.pattern):
                    key = asked["kernel"], asked["D"], asked["Dv"]
                    # A kernel that several calls run is tuned in the first of them.
                    job = Job("try", call, self.dtype, asked["kernel"], (asked["tiles"],))
                    found.setdefault(key, (job, asked["used"]))
        if not found:
            print(f"no kernel matches {self.pattern!r}", flush=True)
            return 1
        for number, ((_, D, Dv), (job, used)) in enumerate(found.items()):
            share = (self.end - time.monotonic()) / (len(found) - number)
            self._tune(job, D, Dv, used, time.monotonic() + share)
        return int(self.failed)

    def _tune(self, job: Job, D: int, Dv: int, used: list[str], until: float) -> None:
        """Compile with many processes, time with one, check, write."""
        from heads_kernels.ops.triton.tiles import padded  # --help needs no Triton

        today = job.tiles[0]
        tried = [today, *neighbours(today, used)][: 3 if self.simulate else None]
        # Six tenths of the time for compiling: heuristic.
        half = time.monotonic() + 0.6 * max(0.0, until - time.monotonic())
        compiled = self._do([replace(job, tiles=(tiles,)) for tiles in tried], half)
        good = [tiles for tiles, row in zip(tried, compiled, strict=True) if "wrong" not in row]
        label = f"{job.kernel} D{D} Dv{Dv} {job.dtype}"
        print(f"{label}: {len(good)} of {len(tried)} candidates run", flush=True)
        # The reasons without their numbers, so that like ones are counted together.
        reasons = Counter(re.sub(r"\d+", "#", row["wrong"]) for row in compiled if "wrong" in row)
        for reason, count in reasons.most_common(4):
            print(f"    {count} x {reason}", flush=True)
        if today not in good:
            self.failed = True
            return
        timed = tuple(good[:_TIMED])
        (row,) = self._do([replace(job, what="time", tiles=timed)], until)
        if "wrong" in row:
            print(f"    not timed: {row['wrong']}", flush=True)
            self.failed = True
            return
        ranked = sorted(zip(row["ms"], timed, strict=True), key=lambda pair: pair[0])
        before = next(ms for ms, tiles in ranked if tiles == today)
        for ms, tiles in ranked[:_TRIES]:
            if ms * _GAIN > before:
                break
            (checked,) = self._do([replace(job, what="check", tiles=(tiles,))])
            if "wrong" not in checked:
                self._write({"kernel": job.kernel, "dtype": job.dtype, "D": padded(D), "Dv": padded(Dv),
                    **tiles, "ms": round(ms, 4), "heuristic_ms": round(before, 4)})  # fmt: skip
                print(f"    {_short(tiles)} {ms:.3f} ms, today {_short(today)} {before:.3f} ms", flush=True)
                return
            print(f"    {_short(tiles)} is fast and wrong: {checked['wrong']}", flush=True)
            self.failed = True
        print(f"    today's {_short(today)} remain: {before:.3f} ms", flush=True)

    def _do(self, jobs: list[Job], until: float | None = None) -> list[Row]:
        # A minute more than the budget for what has to be known: which kernels, and whether one is right.
        until = self.end + 60 if until is None else until
        return run_jobs(jobs, processes=_PROCESSES, until=until)

    def _write(self, entry: dict[str, Any]) -> None:
        """Into the file, in the place of what it has of this kernel, dtype and widths."""
        old: dict[str, Any] = json.loads(self.out.read_text()) if self.out.exists() else {}
        key = ("kernel", "dtype", "D", "Dv")
        tiles = [e for e in old.get("tiles", []) if [e[k] for k in key] != [entry[k] for k in key]]
        tiles = sorted([*tiles, entry], key=lambda e: [e[k] for k in key])
        data = {**results.origin(self.device), "tiles": tiles}
        results.write_text(self.out, json.dumps(data, indent=1) + "\n")


def _short(tiles: Tiles) -> str:
    blocks = "x".join(str(tiles[name]) for name in ("block_m", "block_n", "block_d") if tiles.get(name))
    registers = f" r{tiles['maxnreg']}" if tiles.get("maxnreg") else ""
    return f"{blocks} w{tiles['num_warps']} s{tiles['num_stages']}{registers}"


if __name__ == "__main__":
    sys.exit(main())
