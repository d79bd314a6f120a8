"""`python -m benchmarks.tune`: the fastest tiles of every Triton kernel on this GPU, as a data file.

Candidates are near the tiles that the kernel has today. They are compiled by many processes at once;
those that do not compile or do not fit are counted with their reasons. The rest is timed in turn, the
kernel alone, dense and causal together, on a cold cache, at T 4096. A winner is written where it is
faster than today's tiles by more than noise and holds the accuracy rule.

    python -m benchmarks.tune [--out FILE] [--kernel PATTERN] [--minutes N]

FILE, by default heads_kernels/tuned/<gpu>.json, keeps what it has of other kernels and widths.
Exit status: 0; 1 where a kernel could not be tuned; 2 for a bad option or a missing GPU; 130
where it was interrupted (what was written stays).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import results
from benchmarks.gpu.machine import device_name, versions
from benchmarks.gpu.pool import MOST_WORKERS, ROOT, Pool
from benchmarks.gpu.settings import LEFT_OUT, PASSED, Row, Settings, slug
from benchmarks.gpu.stages import TUNING
from benchmarks.gpu.tuning import CALLS, Job, Tiles

#: A candidate has to beat today's tiles by this factor, or it is noise.
_GAIN: Final = 1.02
#: Candidates that are timed, by what compiled first; the accuracy of up to `_TRIES` winners is looked at.
_TIMED: Final = 40
_TRIES: Final = 3
#: Rows or keys a tile may have, features a slice; warps and stages: what Triton compiles sensibly.
_BLOCKS: Final = (16, 256)
_WARPS: Final = (2, 8)
_STAGES: Final = (1, 5)
#: Full tiles of keys a step may take through descriptors (heuristic).
_FULL_TILES: Final = (1, 4)
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
    limits = {
        "num_warps": _WARPS,
        "num_stages": _STAGES,
        "partial_stages": _STAGES,
        "maxnreg": (0, 255),
        "full_tiles": _FULL_TILES,
    }
    for count in (1, 2):
        for names in itertools.combinations(steps, count):
            for values in itertools.product(*(steps[name] for name in names)):
                changes = dict(zip(names, values, strict=True))
                if all(
                    lo <= v <= hi for n, v in changes.items() for lo, hi in [limits.get(n, _BLOCKS)]
                ):
                    yield {**tiles, **changes}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--kernel", default="*", metavar="PATTERN", help='such as "*.forward"')
    parser.add_argument("--call", default="*", metavar="PATTERN", help=f"of {', '.join(CALLS)}")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--minutes", type=float, default=8.0, metavar="N")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes: does everything run?")
    parser.add_argument("--commit", help="where there is no git to ask")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu is for --tiny: tiles are tuned on a GPU")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device: torch.cuda.is_available() is False")
    calls = [name for name in CALLS if fnmatchcase(name, options.call)]
    if not calls:
        parser.error(f"--call {options.call!r} matches none of {', '.join(CALLS)}")
    settings = Settings(options.device, options.tiny)
    out = options.out or ROOT / "heads_kernels" / "tuned" / f"{slug(device_name(settings))}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        return _Tuner(settings, options, out).run(calls)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return 130


class _Tuner:
    def __init__(self, settings: Settings, options: argparse.Namespace, out: Path) -> None:
        self.settings, self.options, self.out = settings, options, out
        self.end = time.monotonic() + 60 * options.minutes
        self.failed = False

    def run(self, calls: list[str]) -> int:
        with (
            Pool(self.settings, 1) as one,
            Pool(self.settings, 2 if self.settings.tiny else _workers()) as many,
        ):
            probes = self._do(many, [Job("probe", call, self.options.dtype) for call in calls])
            found: dict[tuple[Any, ...], tuple[Job, list[str]]] = {}
            for call, row in zip(calls, probes, strict=True):
                if row["verdict"] != PASSED:
                    print(f"{call}: {row['verdict']}: {_first_line(row)}", flush=True)
                for asked in row.get("kernels", ()):
                    if fnmatchcase(asked["kernel"], self.options.kernel):
                        key = asked["kernel"], asked["D"], asked["Dv"]
                        # A kernel that several calls run is tuned in the first of them.
                        job = Job(
                            "try", call, self.options.dtype, asked["kernel"], (asked["tiles"],)
                        )
                        found.setdefault(key, (job, asked["used"]))
            if not found:
                print(f"no kernel matches {self.options.kernel!r}", flush=True)
                return 1
            for number, ((kernel, D, Dv), (job, used)) in enumerate(found.items()):
                share = (self.end - time.monotonic()) / (len(found) - number)
                self._tune(one, many, (kernel, D, Dv), job, used, time.monotonic() + share)
        return int(self.failed)

    def _tune(
        self,
        one: Pool,
        many: Pool,
        key: tuple[str, int, int],
        job: Job,
        used: list[str],
        until: float,
    ) -> None:
        """Compile with many workers, time with one, check, write."""
        kernel, D, Dv = key
        today = job.tiles[0]
        tried = [today, *neighbours(today, used)][: 3 if self.settings.tiny else None]
        jobs = [replace(job, tiles=(tiles,)) for tiles in tried]
        compiled = self._do(many, jobs, time.monotonic() + 0.6 * max(0.0, until - time.monotonic()))
        good = [
            tiles for tiles, row in zip(tried, compiled, strict=True) if row["verdict"] == PASSED
        ]
        reasons = Counter(_kind(row) for row in compiled if row["verdict"] != PASSED)
        label = f"{kernel} D{D} Dv{Dv} {job.dtype}"
        print(f"{label}: {len(good)} of {len(tried)} candidates run", flush=True)
        for reason, count in reasons.most_common(4):
            print(f"    {count} x {reason}", flush=True)
        if today not in good:
            self.failed = self.failed or compiled[0]["verdict"] != LEFT_OUT
            return
        timed = tuple(good[:_TIMED])
        (row,) = self._do(one, [replace(job, what="time", tiles=timed)], until)
        if row["verdict"] != PASSED:
            print(f"    not timed: {row['verdict']}: {_first_line(row)}", flush=True)
            self.failed = self.failed or row["verdict"] != LEFT_OUT
            return
        ranked = sorted(zip(row["ms"], timed, strict=True), key=lambda pair: pair[0])
        before = next(ms for ms, tiles in ranked if tiles == today)
        for ms, tiles in ranked[:_TRIES]:
            if ms * _GAIN > before:
                break
            (held,) = self._do(one, [replace(job, what="check", tiles=(tiles,))])
            if held["verdict"] == PASSED:
                self._write({"kernel": kernel, "dtype": job.dtype, "D": _padded(D), "Dv": _padded(Dv),
                    **tiles, "ms": round(ms, 4), "heuristic_ms": round(before, 4)})  # fmt: skip
                print(
                    f"    {_short(tiles)} {ms:.3f} ms, today {_short(today)} {before:.3f} ms",
                    flush=True,
                )
                return
            print(f"    {_short(tiles)} is fast and wrong: {_first_line(held)}", flush=True)
            self.failed = True
        print(f"    today's {_short(today)} stay: {before:.3f} ms", flush=True)

    def _do(self, pool: Pool, jobs: list[Job], until: float | None = None) -> list[Row]:
        """The rows of the jobs, in their order."""
        names = [job.to_name() for job in jobs]
        # A minute more than the budget for what has to be known: which kernels, and whether one is right.
        until = self.end + 60 if until is None else until
        with _progress(len(jobs), f"{jobs[0].what} {jobs[0].kernel}") as step:
            rows = pool.run("tuning", names, until=until, item_s=TUNING["tuning"].item_s, done=step)
        by_name = {row["name"]: row for row in rows}
        return [by_name[name] for name in names]

    def _write(self, entry: dict[str, Any]) -> None:
        """Into the file, in the place of what it has of this kernel, dtype and widths."""
        old: dict[str, Any] = json.loads(self.out.read_text()) if self.out.exists() else {}
        key = ("kernel", "dtype", "D", "Dv")
        tiles = [e for e in old.get("tiles", []) if [e[k] for k in key] != [entry[k] for k in key]]
        tiles = sorted([*tiles, entry], key=lambda e: [e[k] for k in key])
        known = versions()
        data = {
            "device": device_name(self.settings),
            "commit": self.options.commit or results.commit() or "unknown",
            "versions": {
                name: known[name] for name in ("torch", "triton", "cuda", "heads_kernels")
            },
            "tiles": tiles,
        }
        results.write_whole(self.out, json.dumps(data, indent=1) + "\n")


@contextlib.contextmanager
def _progress(total: int, text: str) -> Iterator[Callable[[Row], object]]:
    """A bar on a terminal, where tqdm is there."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        yield lambda row: None
        return
    with tqdm(total=total, desc=text, leave=False, disable=None) as bar:  # None: only on a terminal
        yield lambda row: bar.update()


def _workers() -> int:
    return min(MOST_WORKERS, os.cpu_count() or 1)


def _padded(width: int) -> int:
    """Up to a power of two, at least 16, as tuned tiles are looked up."""
    return int(max(16, 1 << (width - 1).bit_length()))


def _short(tiles: Tiles) -> str:
    blocks = "x".join(
        str(tiles[name]) for name in ("block_m", "block_n", "block_d") if tiles.get(name)
    )
    registers = f" r{tiles['maxnreg']}" if tiles.get("maxnreg") else ""
    return f"{blocks} w{tiles['num_warps']} s{tiles['num_stages']}{registers}"


def _first_line(row: Row) -> str:
    return str(row.get("detail", "")).partition("\n")[0][:160]


def _kind(row: Row) -> str:
    """The reason of a failure with its numbers left out, so that like ones are counted together."""
    return re.sub(r"\d+", "#", _first_line(row)) or str(row["verdict"])


if __name__ == "__main__":
    sys.exit(main())
