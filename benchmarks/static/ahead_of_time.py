"""`python -m benchmarks.static.ahead_of_time`: every Triton kernel, compiled for several GPUs without one.

Calls the launchers of every operator with the works below and the tiles that each GPU would take, and checks bounds:
kernels compile, fit into shared memory, use tensor cores for products of 16 bits and spill no more registers than
`STATED` says, and ptxas serializes none of their products. Exit status: 0; 1 if a bound is broken; 2 for a bad option.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
import triton

from benchmarks.settings import word
from benchmarks.static.binaries import TARGETS, Kernel, recorded
from heads_kernels.backends import TRITON_INTERPRETED
from heads_kernels.ops.attention import attention_op, backward_op
from heads_kernels.ops.statistics import statistics_op
from heads_kernels.ops.triton.launch import is_sound
from heads_kernels.parse import parse
from heads_kernels.testing import Case, CollaborativeCase, EntmaxCase, GatedCase, Inputs
from heads_kernels.testing import masks as mask

_DTYPES: Final = {word(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}


# ---------------------------------------------------------------------- calls
def _attention(inputs: Inputs, seed: torch.Tensor | None) -> None:
    """Forward, with what the backward reads (without a gate also without that), and backward."""
    call = inputs.parsed()._replace(seed=seed)
    if call.gate is None:
        attention_op(*call, False, "triton")
    out, attended, lse = attention_op(*call, True, "triton")
    saved = inputs.dout, out if call.gate is None else attended, lse, None
    needs = [operand is not None for operand in call.operands]
    backward_op(*saved, *call, needs, "triton")


def _forward(inputs: Inputs, seed: torch.Tensor | None) -> None:
    attention_op(*inputs.parsed()._replace(seed=seed), True, "triton")


def _statistics(inputs: Inputs, seed: torch.Tensor | None) -> None:
    given = {name: tensor for name, tensor in inputs.tensors.items() if name != "value"}
    softcap = inputs.options.get("softcap")
    call, _ = parse("attention_statistics", **given, softcap=softcap, is_causal=True)
    excluded = torch.zeros(call.B, call.S, dtype=torch.bool)
    weights = torch.ones(call.B, 1, call.T)
    more = call._replace(exclude_keys=excluded), call._replace(row_weights=weights)
    for each in (call, *more):
        statistics_op(*each, "triton")


@dataclass(frozen=True)
class Work:
    """A call whose kernels are compiled."""

    case: Case
    drive: Callable[[Inputs, torch.Tensor | None], None]

    @property
    def name(self) -> str:
        operator = "attention_statistics" if self.drive is _statistics else self.case.operator
        return f"{operator}: {self.case}"

    def dtypes(self) -> Sequence[str]:
        """Every dtype at the widths of most models; elsewhere bfloat16, whose kernels float16's are like."""
        widths = {getattr(self.case, name, 64) for name in ("D", "Ds")}
        return tuple(_DTYPES) if widths <= {64, 128, 768} else ("bfloat16",)


def _works() -> tuple[Work, ...]:
    B, H, T = 2, 4, 512
    lengths = mask.padded(T, T // 2)
    streaming = mask.by_head(*[(-1, 0), (63, 0)] * 2, first_keys=[0, 4] * 2)
    features: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal, gate of heads": {"is_causal": True, "gate": "H"},
        "lengths, gate of rows, sinks": {
            "mask": lengths, "gate": "BHT", "gate_activation": "sigmoid", "sinks": True,
        },
        "holes, gate of elements": {
            "mask": mask.holes, "gate": "BHTD", "gate_activation": "softplus",
        },
        "causal, dropout": {"is_causal": True, "dropout_p": 0.1},
        "bias, gate of elements": {
            "bias": "1HTS", "bias_dtype": None, "gate": "BHTD", "gate_activation": "sigmoid",
        },
        "offsets, causal": {"offsets": 129, "is_causal": True},
        "softcap, sinks": {"softcap": 50.0, "sinks": True, "is_causal": True},
        "dense mask": {"mask": mask.dense_blocks},
        "streaming heads": {"mask": streaming, "gate": "H"},
    }  # fmt: skip
    attended: list[Case] = []
    for D, (words, options) in itertools.product((64, 32, 96, 128, 256), features.items()):
        if D in (64, 128) or words.startswith("causal, gate"):
            attended.append(GatedCase(f"{words}, D {D}", B, H, T, T, D=D, Dv=D, **options))
    for Ds, (words, options) in itertools.product((256, 64, 512, 768), features.items()):
        if Ds == 256 or words.startswith("causal, gate"):
            attended.append(CollaborativeCase(f"{words}, Ds {Ds}", B, H, T, T, Ds=Ds, Dv=64,
                content_bias=words != "plain", **options))  # fmt: skip
    attended += [
        CollaborativeCase("plain, Dv 128, Ds 256", B, H, T, T, Ds=256, Dv=128),
        CollaborativeCase("plain, Dv 128, Ds 512", B, H, T, T, Ds=512, Dv=128),
        CollaborativeCase("plain, Ds 1024", B, H, T, T, Ds=1024, Dv=64),
        CollaborativeCase("causal, gate of grouped heads, Ds 256", B, H, T, T, Ds=256, Dv=64, Hv=2,
            content_bias=True, is_causal=True, gate="H"),
    ]  # fmt: skip
    decoding: dict[str, dict[str, Any]] = {
        "decoding": {"mask": mask.lower_right, "gate": "H"},
        "decoding, dense mask, dropout, sinks": {
            "mask": mask.dense_rows, "dropout_p": 0.1, "sinks": True, "gate": "BHTD",
        },
        "decoding, streaming heads": {"mask": streaming},
        "decoding, bias": {"mask": mask.padded(T, T // 2, queries=False), "bias": "1HTS", "gate": "BHT"},
    }  # fmt: skip
    decoded: list[Case] = []
    for D, (words, options) in itertools.product((128, 64, 256), decoding.items()):
        if D == 128 or words == "decoding":
            decoded.append(GatedCase(f"{words}, D {D}", B, H, 1, T, D=D, Dv=D, Hk=1, **options))
    decoded += [
        CollaborativeCase(f"decoding, Ds {Ds}", B, H, 1, T, Ds=Ds, Dv=64, content_bias=True, **decoding["decoding"])
        for Ds in (256, 768)
    ]
    sparse = ("plain", "causal, gate of heads", "holes, gate of elements", "causal, dropout",
        "bias, gate of elements", "streaming heads")  # fmt: skip
    entmax: list[Case] = []
    for D, words in itertools.product((64, 128, 256), sparse):
        if D == 64 or words.startswith("causal, gate"):
            entmax.append(EntmaxCase(f"{words}, D {D}", B, H, T, T, D=D, Dv=D, **features[words]))
    rows: list[Case] = [
        *(GatedCase(f"D {D}", B, H, T, T, D=D, Dv=D) for D in (64, 128, 256)),
        GatedCase("bias, softcap, sinks, D 64", B, H, T, T, D=64, Dv=64, softcap=50.0, sinks=True, bias="1HTS"),
        *(CollaborativeCase(f"Ds {Ds}", B, H, T, T, Ds=Ds, Dv=64, content_bias=True) for Ds in (256, 768)),
    ]
    return (
        *(Work(case, _attention) for case in attended),
        *(Work(case, _forward) for case in decoded),
        *(Work(case, _attention) for case in entmax),
        *(Work(case, _statistics) for case in rows),
    )


#: Found by name in the processes that compile them: masks of cases cannot be sent there.
WORKS: Final = _works()


# ---------------------------------------------------------------------- compiling
@dataclass(frozen=True)
class Compiled:
    """A kernel, the dtype of its tensors and the first work that compiled it."""

    kernel: Kernel
    dtype: str
    work: str

    def broken(self, release: str = triton.__version__) -> list[str]:
        """The bounds that it breaks, in words; those on spills and serialized products are for RELEASE of Triton."""
        kernel, target = self.kernel, TARGETS[self.kernel.target]
        exact = release.startswith(RELEASE)
        if kernel.error:
            return [f"does not compile: {kernel.error}"]
        words = []
        if kernel.ptxas and not is_sound(kernel.ptxas):
            words.append(f"compiled by ptxas {kernel.ptxas}")
        if kernel.shared > target.shared_limit:
            words.append(f"{kernel.shared} bytes of shared memory, of {target.shared_limit}")
        if exact and kernel.spilled > (most := _most(STATED, self)):
            words.append(f"{kernel.spilled} bytes spilled, of {most}")
        if exact and kernel.serialized > (most := _most(SERIALIZED, self)):
            words.append(f"ptxas serializes {kernel.serialized} products, of {most}")
        wanted = target.matrix_instruction
        if "BLOCK_M 16," in kernel.options:  # those of Hopper and newer multiply 64 rows at least
            wanted += r"|mma\.sync"
        if kernel.narrow_products and not any(re.fullmatch(wanted, n) for n, _ in kernel.matrix):
            words.append(f"no {wanted} instruction, found {dict(kernel.matrix)}")
        return words


@dataclass(frozen=True)
class Bound:
    """The most that some kernels may have, and why; the names are patterns."""

    most: int
    why: str
    kernel: str = "*"
    target: str = "*"
    dtype: str = "*"
    work: str = "*"

    def holds(self, compiled: Compiled) -> bool:
        """Whether it applies to this kernel."""
        return (
            fnmatchcase(compiled.kernel.name, self.kernel)
            and fnmatchcase(compiled.kernel.target, self.target)
            and fnmatchcase(compiled.dtype, self.dtype)
            and fnmatchcase(compiled.work, self.work)
        )


def _most(bounds: Iterable[Bound], compiled: Compiled) -> int:
    """The most that the kernel may have: 0 if no bound applies to it."""
    return max((bound.most for bound in bounds if bound.holds(compiled)), default=0)


#: The Triton that constraints.txt pins. Others spill elsewhere: for them kernels need only compile and fit.
RELEASE: Final = "3.8."
#: Bytes spilled: the largest that was found, with a margin; other widths and dtypes spill less.
STATED: Final = (
    Bound(768, "the words of Philox beside the powers of a tile of scores",
        work="entmax_attention: *dropout*"),
    Bound(384, "row numbers beside the loop over tiles of closed heads; that over full tiles of keys spills nothing",
        "triton.forward", work="gated_attention: *heads*"),
    Bound(16, "the same", "triton.forward", "sm_90", work="entmax_attention: *gate of heads*"),
    Bound(160, "the same beside a list of chunks",
        "triton.forward", "sm_80", work="collaborative_attention: *heads*"),
    Bound(1536, "the same beside a list of chunks",
        "triton.forward", "sm_100", work="collaborative_attention: *heads*"),
    Bound(128, "the bounds of visible ranges of two rows a thread", target="sm_80"),
    Bound(512, "the words of Philox beside a tile of scores", target="sm_80", work="*dropout*"),
    Bound(1024, "64 gates of elements a thread beside the sums, after the loop over keys",
        "triton.forward", "sm_80", work="gated_attention: *gate of elements*"),
    Bound(672, "a list of chunks and the sums of a head beside a tile of bias",
        "collaborative_attention.*", "sm_80"),
    Bound(640, "the same beside the loops for each width; those over chunks spill nothing",
        "collaborative_attention.queries", "sm_80", work="*Ds 768"),
    Bound(64, "two programs a multiprocessor leave 128 registers a thread; the loop over full tiles spills nothing",
        "triton.forward", "sm_90", work="gated_attention: *, D 64"),
    Bound(96, "a program's row numbers and bounds beside 128 sums a thread; the loops over tiles spill nothing",
        "triton.forward", "sm_90", work="gated_attention: *, D 128"),
    Bound(256, "64 gates of elements a thread beside the sums, after the loop over keys",
        "triton.forward", "sm_90", work="gated_attention: *gate of elements*"),
    Bound(64, "base addresses outside of the loops over tiles, which spill nothing",
        "triton.gluon_*", "sm_90"),
    Bound(1792, "addresses beside the sums of 256 features, and those of the preparer with 24 registers",
        "triton.gluon_shared_backward", "sm_90"),
    Bound(128, "the same beside the cells of a mask", "triton.gluon_forward", "sm_90", work="*dense mask*"),
    Bound(96, "rows of a partial tile beside the sums of 256 features; the loops over full tiles spill nothing",
        "gated_attention.*", "sm_90", work="gated_attention: *, D 256"),
    Bound(192, "the words of Philox beside a tile of scores",
        "gated_attention.keys", "sm_90", work="*dropout*"),
    Bound(192, "the number of first keys and of their tiles beside the other bounds",
        "*", "sm_90", work="gated_attention: *streaming heads*"),
    Bound(16, "bounds of loops", "triton.visible", "sm_90"),
    Bound(64, "keys of 128 features in registers, for products without tensor cores",
        "triton.statistics", "sm_90", "float32"),
    Bound(256, "the bounds of loops for each width of the query; the loops over tiles spill nothing",
        "triton.forward", "sm_90", work="collaborative_attention: *"),
    Bound(512, "the words of Philox beside a query of 256 features",
        "triton.forward", "sm_90", work="collaborative_attention: *dropout*"),
    Bound(1024, "a list of chunks and the sums of a head beside a tile of scores",
        "collaborative_attention.*", "sm_90"),
    Bound(1984, "the same beside a tile of bias",
        "collaborative_attention.keys", "sm_90", work="*: bias*"),
    Bound(1920, "the same beside a tile of bias",
        "collaborative_attention.keys", "sm_90", work="*: offsets*"),
    Bound(1280, "the same; the loops over tiles spill nothing",
        "collaborative_attention.queries", "sm_90", work="*offsets*"),
    Bound(7168, "addresses and loop bounds beside a slice of the sums and two tiles of features",
        "collaborative_attention.*", "sm_90", work="*Ds 768"),
    Bound(5632, "the same", "collaborative_attention.*", "sm_90", work="*Ds 512"),
    Bound(5376, "the same in loops over chunks", "collaborative_attention.*", "sm_90", work="*Ds 1024"),
    Bound(160, "ptxas keeps predicates and loop bounds in memory with registers to spare",
        target="sm_100"),
    Bound(256, "two programs a multiprocessor leave 128 registers a thread; at most 6 spills in a loop over tiles",
        "triton.forward", "sm_100", work="gated_attention: *streaming heads, D 64"),
    Bound(128, "64 gates of elements a thread beside a tile of bias",
        "triton.forward", "sm_100", work="gated_attention: bias, gate of elements, D 128"),
    Bound(384, "a list of chunks and the sums of a head beside a tile of scores",
        "collaborative_attention.*", "sm_100"),
    *(
        bound
        for target in ("sm_89", "sm_120")
        for bound in (
            Bound(96, "loop bounds and predicates, with registers to spare", target=target),
            Bound(192, "sums and operands of products without tensor cores", "*", target, "float32"),
            Bound(768, "the same beside the cells of a mask", "*", target, "float32",
                "*dense mask, D 128"),
        )
    ),
)  # fmt: skip
#: Products of wgmma that ptxas makes wait for one another.
SERIALIZED: Final = tuple(
    Bound(most, "ptxas takes the loop that the number of chunks selects for divergent; that of Triton 3.9 does not",
        kernel, "sm_90", work=f"collaborative_attention: {work}")
    for kernel, work, most in (
        ("triton.forward", "*", 96), ("collaborative_attention.queries", "*", 96),
        ("collaborative_attention.queries", "*Ds 512", 192), ("collaborative_attention.queries", "*Ds 768", 224),
    )
)  # fmt: skip


def _compile(target: str, dtype: str, name: str, with_loops: bool) -> list[Compiled]:
    work = next(work for work in WORKS if work.name == name)
    inputs = work.case.make(_DTYPES[dtype])
    seed = torch.tensor([1, 0, 0, 0, 0]) if work.case.dropout_p else None
    with recorded(target, with_loops) as kernels:
        work.drive(inputs, seed)
    return [Compiled(kernel, dtype, name) for kernel in kernels]


def compile_all(
    targets: Iterable[str],
    works: Iterable[Work],
    dtypes: Sequence[str] = tuple(_DTYPES),
    cache: Path | None = None,
    processes: int | None = None,
    with_loops: bool = False,
) -> list[Compiled]:
    """The kernels of `works`, each once, compiled in `processes` processes (default: as many as there are cores).

    1 is this process, without the seconds in which another imports torch and Triton. `cache` is a folder that keeps
    the kernels for the next call, of any process; without it they are gone after the call. `with_loops` as in
    `binaries.recorded`.
    """
    tasks = [
        (target, dtype, work.name, with_loops)
        for target, work in itertools.product(targets, works)
        for dtype in work.dtypes()
        if dtype in dtypes
    ]
    found: dict[tuple[str, ...], Compiled] = {}
    with contextlib.ExitStack() as stack:
        folder = str(cache or stack.enter_context(tempfile.TemporaryDirectory()))
        # Not the user's: a kernel found there may come without the log of ptxas.
        stack.enter_context(patch.dict(os.environ, TRITON_CACHE_DIR=folder))
        every: Iterable[list[Compiled]] = itertools.starmap(_compile, tasks)
        if processes != 1 and len(tasks) > 1:
            pool = ProcessPoolExecutor(
                min(processes or os.cpu_count() or 1, len(tasks)),
                multiprocessing.get_context("spawn"), torch.set_num_threads, (1,),
            )  # fmt: skip
            every = stack.enter_context(pool).map(_compile, *zip(*tasks, strict=True))
        for one in itertools.chain.from_iterable(every):
            kernel = one.kernel
            key = (kernel.target, kernel.hash or f"{kernel.name} {one.dtype} {one.work}")
            found.setdefault(key, one)
    return list(found.values())


# ---------------------------------------------------------------------- the command
def _line(one: Compiled) -> str:
    kernel = one.kernel
    matrix = ", ".join(f"{count} {name}" for name, count in kernel.matrix)
    numbers = f"{kernel.registers:4} {kernel.spilled:6} {kernel.shared:7}"
    what = f"{kernel.target:7} {one.dtype:9} {kernel.name:32} {kernel.options:44}"
    return f"{what} {numbers}  {matrix:22} {one.work}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.static.ahead_of_time", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--dtype", choices=_DTYPES, action="append", help="default: all")
    parser.add_argument("--only", metavar="PATTERN", help="works whose name contains this (* and ? allowed)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print a table and the broken bounds; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if TRITON_INTERPRETED:
        parser.error("TRITON_INTERPRET is set; interpreted kernels are not compiled")
    works = [w for w in WORKS if options.only is None or fnmatchcase(w.name, f"*{options.only}*")]
    if not works:
        parser.error(f"--only {options.only!r} matches none of {', '.join(w.name for w in WORKS)}")
    found = compile_all(options.target or TARGETS, works, options.dtype or tuple(_DTYPES))
    print("target  dtype     kernel, options; registers, bytes spilled, shared memory; instructions")
    failures = []
    for one in found:
        print(_line(one))
        failures += [f"{_line(one)}\n    {words}" for words in one.broken()]
    print(f"\n{len(found)} kernels, {len(failures)} bounds broken", *failures, sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
