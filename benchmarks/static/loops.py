"""`python -m benchmarks.static.loops`: what the loops of the GPU kernels take, from their machine code.

Compiles the Triton kernels and reads the CUDA C++ kernels from the built module; needs no GPU. A line is a loop with
tensor-core instructions, and compared with the kept one:

all      instructions of one warp, in all ways round the loop
hot      those of the hot path: a full tile with aligned copies (see `sass`)
spills   of these, stores and loads of spilled registers
k / hot  thousands of products, multiplied and added, for an instruction of the hot path; none on sm_100, whose
         instructions do not say their shape
#1, #2   other kernels with the same name, such as the one for closed heads

`benchmarks/results/loops.json` keeps the numbers of a few calls, and `tests/tools/test_loops.py` fails where a loop
takes more for a product, or where there is another number of loops. If that is intended, or after an improvement,
`--keep` rewrites the numbers (build the CUDA module from the same sources first, or rewrite Triton's alone with
`--backend triton`), and the commit message says why. Numbers are compared only between equal compiler versions.

How fast a kernel is only a GPU tells: `python -m benchmarks --device cuda`. `ahead_of_time` and `cuda_resources` report
what whole kernels take: registers, spills and shared memory.
"""

from __future__ import annotations

import argparse
import json
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

from benchmarks.results import commit, write_text
from benchmarks.static import ahead_of_time, binaries, cuda_resources, sass
from heads_kernels.backends import TRITON_INTERPRETED

KEPT: Final = Path(__file__).parents[1] / "results" / "loops.json"
BACKENDS: Final = ("triton", "cuda")
#: What is kept is few enough to be compiled by a test.
TARGETS: Final = {"triton": ("sm_90",), "cuda": ("sm_80", "sm_90")}
_NVIDIA: Final = [target for target in binaries.TARGETS if target.startswith("sm_")]
_ENDS: Final = (
    "gate of heads, D 64", "gate of heads, D 128", "gate of heads, Ds 256", "dense mask, Ds 256",
    "decoding, D 128", "decoding, Ds 256",
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
    """A loop of a kernel; numbers are those of one warp."""

    backend: str
    target: str
    kernel: str  # "gated_attention.forward", "GatedForward"
    work: str  # what it was compiled for: a work of Triton's, a width of CUDA's
    variant: int  # among the kernels with this name: of Triton's in the order of their launch
    loop: int  # in the order of the code
    instructions: int  # in all ways round the loop
    hot: int  # on the hot path
    spills: int  # instructions on the hot path that store or load spilled registers
    products: int | None  # multiplied and added on the hot path

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
def rows_of(loops: Iterable[sass.Loop], **kernel: Any) -> list[Row]:
    """The rows of a kernel's loops."""
    return [
        Row(**kernel, loop=i, instructions=loop.instructions, hot=len(loop.hot), spills=loop.spills,
            products=loop.products)
        for i, loop in enumerate(loops)
    ]  # fmt: skip


def of_triton(
    targets: Sequence[str],
    works: Iterable[ahead_of_time.Work],
    cache: Path | None = None,
    processes: int | None = None,
) -> list[Row]:
    """The loops of Triton's kernels in bfloat16; the rest as in `ahead_of_time.compile_all`."""
    seen: Counter[tuple[str, ...]] = Counter()
    result: list[Row] = []
    for one in ahead_of_time.compile_all(targets, works, ["bfloat16"], cache, processes, True):
        kernel = one.kernel
        if kernel.error:
            raise RuntimeError(f"{one.work}: {kernel.name} does not compile: {kernel.error}")
        key = (kernel.target, kernel.name, one.work)
        result += rows_of(
            kernel.loops, backend="triton", target=kernel.target, kernel=kernel.name,
            work=one.work, variant=seen[key],
        )  # fmt: skip
        seen[key] += 1
    return result


def of_cuda(module: Path, tool: str, targets: Sequence[str], only: str = "*") -> list[Row]:
    """The loops of the kernels of CUDA C++ in a built module, in bfloat16 and without score terms."""
    result: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        _run(tool, "-xelf", "all", module.resolve(), folder=folder)  # one file a source and part
        for cubin in sorted(Path(folder).glob("*.cubin")):
            target = cubin.suffixes[-2].removeprefix(".")
            if target not in targets:
                continue
            listed = cuda_resources.parse(_run(tool, "--dump-resource-usage", cubin))
            found = [kernel for kernel in listed if _wanted(kernel, only)]
            if not found:
                continue
            codes = sass.parse(_run(str(Path(tool).with_name("nvdisasm")), "-c", cubin))
            for kernel in found:
                result += rows_of(
                    sass.loops(codes[kernel.entry]), backend="cuda", target=target,
                    kernel=kernel.name, work=f"bf16, width {kernel.numbers[0]}",
                    variant=sum(kernel.numbers[2:]),  # which sums it writes, or small sizes
                )  # fmt: skip
    return sorted(result, key=lambda row: (row.work, row.target, row.kernel, row.variant))


def _wanted(kernel: cuda_resources.Kernel, only: str) -> bool:
    """Whether it is an attention kernel of these widths without terms."""
    return (
        kernel.dtype == "bf16"
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


def kept() -> dict[str, Any]:
    """By backend: compiler, commit and rows."""
    return dict(json.loads(KEPT.read_text()))


def keep(rows: Iterable[Row], headings: dict[str, dict[str, str | None]]) -> None:
    """Write the rows of these backends, a line each, and leave those of others as they are."""
    numbers = kept()
    for backend, heading in headings.items():
        own = [asdict(row) for row in rows if row.backend == backend]
        numbers[backend] = {**heading, "rows": own}
    parts = []
    for backend, part in sorted(numbers.items()):
        heading = {name: value for name, value in part.items() if name != "rows"}
        written = ",\n".join(f"  {json.dumps(row)}" for row in part["rows"])
        parts.append(f'{json.dumps(backend)}: {json.dumps(heading)[:-1]}, "rows": [\n{written}\n]}}')
    write_text(KEPT, "{\n" + ",\n".join(parts) + "\n}\n")


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
        words += [f"{new}: {what}" for new, old in zip(now, then, strict=True) for what in _more(new, old)]
    return words


def _more(new: Row, old: Row) -> Iterator[str]:
    if new.spills > old.spills:
        yield f"{new.spills} instructions for spilled registers, of {old.spills}"
    if not new.products or not old.products:
        return
    for name, is_now, was in (
        ("instructions", new.hot, old.hot),
        ("instructions in all ways round it", new.instructions, old.instructions),
    ):
        if is_now * old.products > was * new.products:
            yield f"{is_now} {name}, of {was * new.products / old.products:.0f}"


# ---------------------------------------------------------------------- the command
def table(rows: Iterable[Row]) -> Iterator[str]:
    """Lines to print."""
    for work, some in groupby(rows, key=lambda row: (row.backend, row.work)):
        yield f"\n{': '.join(work)}"
        yield f"{'target':9}{'kernel':46}{'all':>7}{'hot':>7}{'spills':>7}{'k / hot':>9}"
        for row in some:
            rate = f"{row.products / row.hot / 1e3:.2f}" if row.products else ""
            yield f"{row.target:9}{row.label:46}{row.instructions:>7}{row.hot:>7}{row.spills:>7}{rate:>9}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.static.loops", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="default: both")
    parser.add_argument("--target", choices=_NVIDIA, action="append", help="default: the kept")
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
    works = [work for work in (ahead_of_time.WORKS if options.only else WORKS) if fnmatchcase(work.name, pattern)]
    module, tool = options.module or cuda_resources.module(), cuda_resources.cuobjdump()
    in_module: list[Row] = []
    if "cuda" in backends:
        if module is None or not module.is_file():
            parser.error("no module heads_kernels._cuda: build the package where nvcc is, name a file with --module, "
                "or choose --backend triton")  # fmt: skip
        if tool is None:
            parser.error("no cuobjdump: pip install triton, or put the CUDA toolkit's into PATH")
        wanted = options.target or TARGETS["cuda"]
        in_module = of_cuda(module, tool, wanted, pattern)
        missing = set(wanted) - {row.target for row in in_module}
        if missing and not options.only:
            parser.error(f"{module} has no kernels for {', '.join(sorted(missing))}: build for them")
    targets = options.target or TARGETS["triton"]
    rows = [*(of_triton(targets, works) if "triton" in backends else ()), *in_module]
    if not rows:
        parser.error(f"--only {options.only!r} matches no loop with tensor-core instructions")
    print(*table(rows), sep="\n")
    headings = {backend: compiler_of(backend, module) for backend in backends}
    if options.keep:
        keep(rows, headings)
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
