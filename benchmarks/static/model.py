"""`python -m benchmarks.static.model`: what limits the loops of the GPU kernels, from their machine code.

Compiles the Triton kernels and reads the CUDA C++ kernels from the built module; needs no GPU. For every loop with
tensor-core instructions it prints how many instructions its hot path has (`sass.py`), the cycles that each
pipe takes for one iteration of a block (`pipes.py` has the rates of each part), the slowest pipe and the
TFLOP/s that it allows, and the instructions for spilled registers. `ahead_of_time` and `cuda_resources` report what
whole kernels take: registers, spills and shared memory.

The result is an upper limit, not a forecast: latencies, barriers and memory are not in it, and an inner loop counts as
one iteration. FLOPs are those of the products that the kernel executes, recomputed ones included.

On sm_90 the code shows a second limit: `alone` counts the instructions while no product is under way, from a wait for
one to the start of the next, and `serial` is the cycles of the products and of those instructions together. It holds
for one program on a multiprocessor; products of a second one may run in that time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import triton

from benchmarks.results import commit
from benchmarks.static import ahead_of_time, cuda_resources, pipes, sass
from heads_kernels.backends import TRITON_INTERPRETED

KEPT: Final = Path(__file__).parents[1] / "results" / "static-model.json"
BACKENDS: Final = ("triton", "cuda")
#: What is kept is few enough to be compiled by a test.
TARGETS: Final = {"triton": ("sm_90",), "cuda": ("sm_80", "sm_90")}
_ENDS: Final = (
    "gate of heads, D 64", "gate of heads, D 128", "gate of heads, Ds 256", "decoding, D 128", "decoding, Ds 256",
)  # fmt: skip
WORKS: Final = tuple(
    work
    for work in ahead_of_time.WORKS
    if (work.name.startswith(("gated", "collaborative")) and work.name.endswith(_ENDS))
    or work.name == "entmax_attention: causal, gate of heads, D 64"
)
_WIDTHS: Final = (64, 128)  # of the kernels of CUDA, without score terms


@dataclass(frozen=True)
class Row:
    """A loop of a kernel."""

    backend: str
    target: str
    kernel: str  # "gated_attention.forward", "GatedForward"
    work: str  # what it was compiled for: a work of Triton's, a width of CUDA's
    variant: int  # among the kernels with this name: of Triton's in the order of their launch
    loop: int  # in the order of the code
    warps: int
    instructions: int  # of a warp, in all ways round the loop
    hot: int  # on the hot path
    inner: int  # loops inside it, each counted as one round
    spills: int  # instructions on the hot path that store or load spilled registers
    products: int | None  # of a block in one round, multiplied and added
    cycles: dict[str, int]
    #: Instructions on the hot path while no product is under way (`sass.Loop.alone`).
    alone: int | None = None
    #: Cycles of the products, and of those instructions on their slowest pipe.
    serial: int | None = None

    @property
    def pipe(self) -> str:
        """That takes longest."""
        return max(self.cycles, key=self.cycles.__getitem__)

    @property
    def bound(self) -> float | None:
        """TFLOP/s of the products that the loop makes; None where they are not known."""
        if self.products is None:
            return None
        return pipes.teraflops(pipes.PARTS[self.target], self.products, self.cycles)

    @property
    def key(self) -> tuple[object, ...]:
        return self.backend, self.target, self.kernel, self.work, self.variant

    def __str__(self) -> str:
        return f"{self.target} {self.label} ({self.work})"

    @property
    def label(self) -> str:
        """The kernel and the loop."""
        return f"{self.kernel}{f' #{self.variant}' if self.variant else ''}, loop {self.loop}"


# ---------------------------------------------------------------------- kernels
def _rows(loops: Iterable[sass.Loop], warps: int, target: str, **rest: Any) -> Iterator[Row]:
    part = pipes.PARTS[target]
    for i, loop in enumerate(loops):
        multiplied = pipes.products(loop.hot)
        cycles, alone, serial = pipes.cycles(loop.hot, part, warps), None, None
        if loop.alone is not None:
            alone = len(loop.alone)
            serial = cycles["tensor"] + max(pipes.cycles(loop.alone, part, warps).values())
        yield Row(
            target=target, loop=i, warps=warps, instructions=loop.instructions,
            hot=len(loop.hot), inner=loop.inner, spills=loop.spills,
            products=None if multiplied is None else multiplied * warps,
            cycles=cycles, alone=alone, serial=serial, **rest,
        )  # fmt: skip


def of_triton(
    targets: Sequence[str],
    works: Iterable[ahead_of_time.Work],
    dtype: str = "bfloat16",
    cache: Path | None = None,
    processes: int | None = None,
) -> list[Row]:
    """The loops of Triton's kernels, compiled for these targets; the rest as in `ahead_of_time.compile_all`."""
    seen: Counter[tuple[str, ...]] = Counter()
    result: list[Row] = []
    parts = {target: pipes.PARTS[target].triton or target for target in targets}
    compiled = dict.fromkeys(parts.values())
    for one in ahead_of_time.compile_all(compiled, works, [dtype], cache, processes, True):
        kernel = one.kernel
        if kernel.error:
            raise RuntimeError(f"{one.work}: {kernel.name} does not compile: {kernel.error}")
        key = (kernel.target, kernel.name, one.work)
        seen[key] += 1
        for target in [target for target in targets if parts[target] == kernel.target]:
            result += _rows(
                kernel.loops, kernel.warps, target, backend="triton", kernel=kernel.name,
                work=one.work, variant=seen[key] - 1,
            )  # fmt: skip
    return result


_THREADS: Final = re.compile(
    r"^\.nv\.info\.(\S+)|Attribute:\s+EIATTR_MAX_THREADS\s+Format:\s+\w+\s+Value:\s+(0x[0-9a-f]+)",
    re.M,
)


def threads_of(text: str) -> dict[str, int]:
    """The threads of a block of every kernel, in what `cuobjdump -elf` prints."""
    result, name = {}, ""
    for match in _THREADS.finditer(text):
        if match[1]:
            name = match[1]
        else:
            result[name] = int(match[2], 16)
    return result


def of_cuda(
    module: Path, tool: str, targets: Sequence[str], dtype: str = "bf16", only: str = "*"
) -> list[Row]:
    """The loops of the kernels of CUDA C++ in a built module, without score terms."""
    result: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        _run(tool, "-xelf", "all", module.resolve(), folder=folder)  # one file a source and part
        for cubin in sorted(Path(folder).glob("*.cubin")):
            code = cubin.suffixes[-2].removeprefix(".")
            running = [target for target in targets if (pipes.PARTS[target].cuda or target) == code]
            if not running:
                continue
            found = {
                kernel.entry: kernel
                for kernel in cuda_resources.parse(_run(tool, "--dump-resource-usage", cubin))
                if _wanted(kernel, dtype, only)
            }
            if not found:
                continue
            threads = threads_of(_run(tool, "-elf", cubin))
            codes = sass.parse(_run(str(Path(tool).with_name("nvdisasm")), "-c", cubin))
            for target, (entry, kernel) in itertools.product(running, found.items()):
                result += _rows(
                    sass.loops(codes[entry]), threads[entry] // 32, target, backend="cuda",
                    kernel=kernel.name, work=f"{dtype}, width {kernel.numbers[0]}",
                    variant=sum(kernel.numbers[2:]),  # which sums it writes, or small sizes
                )  # fmt: skip
    return sorted(result, key=lambda row: (row.work, row.target, row.kernel, row.variant))


def _wanted(kernel: cuda_resources.Kernel, dtype: str, only: str) -> bool:
    """Whether it is an attention kernel of these widths without terms."""
    return (
        kernel.dtype == dtype
        and len(kernel.numbers) > 1
        and kernel.numbers[0] in _WIDTHS
        and not kernel.numbers[1]
        and fnmatchcase(kernel.name, only)
    )


def _run(*command: object, folder: str | None = None) -> str:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, check=True, cwd=folder).stdout


# ---------------------------------------------------------------------- kept numbers
def compiler_of(backend: str, module: Path | None) -> dict[str, str | None]:
    """With what the kernels were compiled, and from which commit."""
    if backend == "triton":
        return {"compiler": f"triton {triton.__version__}", "commit": commit()}
    record = module.with_name("build.json") if module else None
    built = json.loads(record.read_text()) if record and record.is_file() else {}
    nvcc = built.get("cuda", {}).get("nvcc", "of unknown version")
    return {"compiler": f"nvcc {nvcc}", "commit": built.get("commit")}


def kept(path: Path = KEPT) -> dict[str, Any]:
    """By backend: compiler, commit and rows."""
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def keep(rows: Iterable[Row], headings: dict[str, dict[str, str | None]], path: Path) -> None:
    """Write the rows of these backends, and leave those of others as they are."""
    numbers = kept(path)
    for backend, heading in headings.items():
        own = [asdict(row) for row in rows if row.backend == backend]
        numbers[backend] = {**heading, "rows": own}
    lines = []
    for backend, part in sorted(numbers.items()):
        heading = {name: value for name, value in part.items() if name != "rows"}
        written = ",\n".join(f"  {json.dumps(row)}" for row in part["rows"])
        lines.append(
            f'{json.dumps(backend)}: {json.dumps(heading)[:-1]}, "rows": [\n{written}\n]}}'
        )
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def heavier(rows: Iterable[Row], kept_rows: Iterable[dict[str, Any]]) -> list[str]:
    """Loops that take more for a product than the kept ones, in words; kernels that are not kept are left out."""
    before = [Row(**row) for row in kept_rows]
    known = {key: list(some) for key, some in groupby(before, key=lambda row: row.key)}
    words = []
    for key, some in groupby(rows, key=lambda row: row.key):
        now, then = list(some), known.get(key)
        if then is None:
            continue
        if len(now) != len(then):
            words.append(f"{now[0]}: {len(now)} loops in place of {len(then)}")
            continue
        words += [
            f"{new}: {what}" for new, old in zip(now, then, strict=True) for what in _more(new, old)
        ]
    return words


def _more(new: Row, old: Row) -> Iterator[str]:
    if new.spills > old.spills:
        yield f"{new.spills} instructions for spilled registers, of {old.spills}"
    if not new.products or not old.products:
        return
    numbers = {
        "instructions": (new.hot, old.hot),
        "instructions in all ways round it": (new.instructions, old.instructions),
        **{f"cycles ({name})": (new.cycles[name], old.cycles[name]) for name in pipes.PIPES},
    }
    for name, (is_now, was) in numbers.items():
        if is_now * old.products > was * new.products:
            allowed = was * new.products / old.products
            yield f"{is_now} {name}, of {allowed:.0f}"


# ---------------------------------------------------------------------- the command
def table(rows: Iterable[Row]) -> Iterator[str]:
    """Lines to print."""
    yield "instructions of a warp; then cycles of a multiprocessor for one round of a block, by pipe"
    heads = "".join(f"{pipe:>8}" for pipe in pipes.PIPES)
    for work, some in groupby(rows, key=lambda row: (row.backend, row.work)):
        yield f"\n{': '.join(work)}"
        yield (
            f"{'target':9}{'kernel':40}{'warps':>6}{'instr.':>8}{'hot':>6}{'inner':>6}{'spills':>7} |{heads} | "
            f"{'pipe':8}{'TFLOP/s':>7}{'alone':>7}{'serial':>7}"
        )
        for row in some:
            bound = "" if row.bound is None else f"{row.bound:.0f}"
            alone, serial = ("" if n is None else n for n in (row.alone, row.serial))
            taken = "".join(f"{row.cycles[pipe]:>8}" for pipe in pipes.PIPES)
            yield (
                f"{row.target:9}{row.label:40}{row.warps:>6}{row.instructions:>8}{row.hot:>6}{row.inner:>6}"
                f"{row.spills:>7} |{taken} | {row.pipe:8}{bound:>7}{alone:>7}{serial:>7}"
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.static.model", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="default: both")
    parser.add_argument("--target", choices=pipes.PARTS, action="append", help="default: the kept")
    parser.add_argument("--only", metavar="PATTERN",
        help="of Triton all works whose name has this in it, of CUDA the kernels (* and ? allowed)")  # fmt: skip
    parser.add_argument("--module", type=Path, metavar="FILE",
        help="the module of the CUDA kernels; default: the built one")  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="rewrite the kept numbers")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and what is heavier than kept; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    backends = tuple(dict.fromkeys(options.backend or BACKENDS))
    if TRITON_INTERPRETED:
        parser.error("TRITON_INTERPRET is set; interpreted kernels are not compiled")
    if options.keep and (options.only or options.target):
        parser.error("--keep writes the whole selection: leave out --only and --target")
    pattern = f"*{options.only}*" if options.only else "*"
    works = [
        work for work in (ahead_of_time.WORKS if options.only else WORKS)
        if fnmatchcase(work.name, pattern)
    ]  # fmt: skip
    module, tool = options.module or cuda_resources.module(), cuda_resources.cuobjdump()
    in_module: list[Row] = []
    if "cuda" in backends:
        if module is None or not module.is_file():
            parser.error("no module heads_kernels._cuda: build the package where nvcc is, name a file with --module, "
                "or choose --backend triton")  # fmt: skip
        if tool is None:
            parser.error("no cuobjdump: pip install triton, or put the CUDA toolkit's into PATH")
        wanted = options.target or TARGETS["cuda"]
        in_module = of_cuda(module, tool, wanted, only=pattern)
        missing = set(wanted) - {row.target for row in in_module}
        if missing and not options.only:
            parser.error(
                f"{module} has no kernels for {', '.join(sorted(missing))}: build for them"
            )
    targets = options.target or TARGETS["triton"]
    rows = [*(of_triton(targets, works) if "triton" in backends else ()), *in_module]
    if not rows:
        parser.error(f"--only {options.only!r} matches no loop with tensor-core instructions")
    print(*table(rows), sep="\n")
    headings = {backend: compiler_of(backend, module) for backend in backends}
    if options.keep:
        keep(rows, headings, KEPT)
        print(f"\n{len(rows)} loops kept in {KEPT}")
        return 0
    failures = []
    for backend, heading in headings.items():
        part = kept()[backend]
        if part["compiler"] != heading["compiler"]:
            print(f"\nnot compared: kept of {part['compiler']}, not {heading['compiler']}")
        else:
            own = [row for row in rows if row.backend == backend]
            failures += heavier(own, part["rows"])
    print(f"\n{len(rows)} loops, {len(failures)} kept numbers broken", *failures, sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
