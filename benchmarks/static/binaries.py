"""What a Triton kernel compiles to, without a GPU: registers, spills, shared memory, instructions.

The launchers of the package run unchanged on CPU tensors. A driver that only names the target replaces the real one,
and every launch compiles its kernel and records it instead of running it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.static.sass import Loop, loops, parse


@dataclass(frozen=True)
class Target:
    """A kind of GPU, with the shared memory that one program may take and the instruction of its tensor cores.

    NVIDIA's is that of PTX, which ptxas translates to one of the machine: the machine code need not be disassembled.
    """

    gpu: GPUTarget
    shared_limit: int  # bytes
    matrix_instruction: str  # a pattern


TARGETS: Final = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 << 10, r"mma\.sync"),
    "sm_89": Target(GPUTarget("cuda", 89, 32), 99 << 10, r"mma\.sync"),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 << 10, r"wgmma\.mma_async"),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 << 10, r"tcgen05\.mma"),
    "sm_120": Target(GPUTarget("cuda", 120, 32), 99 << 10, r"mma\.sync"),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 << 10, r"v_mfma\w*"),
}

_MATRIX_INSTRUCTIONS: Final = re.compile(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma|v_mfma)")
#: A product of tiles, and one whose operands have 16 bits; Gluon's are those of warpgroups.
_PRODUCT: Final = re.compile(r"tt\.dot |ttng\.warp_group_dot ")
_NARROW_PRODUCT: Final = re.compile(r"(tt\.dot|ttng\.warp_group_dot) .*: \S+<\w+x(bf16|f16)\b")
#: What ptxas says where `wgmma` instructions are serialized (C7514 to C7519): each waits for the one before.
_LOSS: Final = "Potential Performance Loss"


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel; if `error` is not empty, the rest is unknown."""

    name: str  # "gated_attention.forward"
    target: str
    options: str  # "BLOCK_M 64, BLOCK_N 64, 4 warps, 2 stages"
    ptxas: str = ""  # the CUDA release of it
    hash: str = ""
    error: str = ""
    registers: int = 0
    spilled: int = 0  # bytes a thread, stored and loaded; on AMD the scratch memory of a thread
    shared: int = 0  # bytes a program
    matrix: tuple[tuple[str, int], ...] = ()  # matrix instructions and how often each occurs in the code
    narrow_products: bool = False  # whether it multiplies tiles of 16 bits
    serialized: int = 0  # matrix instructions, where ptxas reports that they wait for one another
    warps: int = 0
    loops: tuple[Loop, ...] = field(default=(), repr=False)  # on NVIDIA's, where asked for


class _Driver:
    """What Triton needs of a driver to compile. The target serves as the device, so each target has its own cache."""

    def __init__(self, target: str) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self._target].gpu

    def get_current_device(self) -> str:
        return self._target

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def recorded(target: str, with_loops: bool = False) -> Iterator[list[Kernel]]:
    """In this block kernels are compiled for `target` instead of run; the list gets one entry per launch.

    `with_loops` disassembles NVIDIA's to find their loops: a third of a second each.

    A kernel in Triton's cache is not compiled again; it must have been compiled here or with `log_kept`. Results of
    launches stay uninitialised. Needs a process in which kernels are not interpreted.
    """
    kernels: list[Kernel] = []
    compile_and_run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name, shown = _name(self.fn), _shown(options)
        with _held_back() as output:
            try:
                compiled = compile_and_run(self, *args, grid=grid, warmup=True, **options)
            except Exception as raised:
                error: BaseException = raised
                while error.__cause__ is not None:  # the innermost says what is wrong
                    error = error.__cause__
                text = [str(error), *re.findall(r"(?:error|note): (.+)", output())]
                kernels.append(Kernel(name, target, shown, error="; ".join(text)[:500]))
                return
        if compiled is not None and not warmup:  # not where kernels to compile are collected
            kernels.append(_read(name, target, shown, compiled, with_loops))

    with (
        patch.object(driver, "_active", _Driver(target)),
        patch.object(JITFunction, "run", compile_only),
        log_kept(),
    ):
        yield kernels


#: Kernels are compiled in threads (`launch.compiled_together`), and standard output belongs to the process.
_PRINTING: Final = threading.Lock()


@contextlib.contextmanager
def log_kept() -> Iterator[None]:
    """In this block the metadata of kernels has the CUDA release of ptxas and what it says, `ptxas` and `ptxas_log`; in
    Triton's cache too."""
    make_cubin = CUDABackend.make_cubin

    def make(self: Any, source: Any, metadata: dict[str, Any], *rest: Any) -> Any:
        with _PRINTING, contextlib.redirect_stdout(io.StringIO()) as log:
            cubin = make_cubin(self, source, metadata, *rest)
        metadata["ptxas_log"] = log.getvalue()
        new = self.target.arch >= 100
        metadata["ptxas"] = (knobs.nvidia.ptxas_blackwell if new else knobs.nvidia.ptxas).version
        return cubin

    with patch.object(CUDABackend, "make_cubin", make), patch.object(knobs.nvidia, "dump_ptxas_log", True):
        yield


def _name(function: Any) -> str:
    """The pass, of the operator that alone runs it: "gated_attention.keys", "triton.forward" of `forward.py`."""
    module = function.__module__.rpartition(".")[2]
    operator = function.__name__.removeprefix("_").partition("_")[0]
    alone = operator in ("gated", "collaborative")
    return f"{operator}_attention.{module}" if alone else f"triton.{module}"


def _shown(options: dict[str, Any]) -> str:
    tile, blocks = options.get("TILE"), []
    if tile is not None:
        blocks = [f"BLOCK_M {tile.block_m.value}", f"BLOCK_N {tile.block_n.value}"]
    return ", ".join([*blocks, f"{options['num_warps']} warps", f"{options['num_stages']} stages"])


@contextlib.contextmanager
def _held_back() -> Iterator[Any]:
    """Captures what Triton prints: the log of ptxas that fails, and MLIR's dump of a kernel that does not compile."""
    printed = io.StringIO()
    with tempfile.TemporaryFile(mode="w+", errors="replace") as file:

        def output() -> str:
            file.seek(0)
            return printed.getvalue() + file.read()

        own = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            with contextlib.redirect_stdout(printed):
                yield output
        finally:
            os.dup2(own, 2)
            os.close(own)


def _read(name: str, target: str, options: str, compiled: Any, with_loops: bool) -> Kernel:
    found_loops: list[Loop] = []
    log = getattr(compiled.metadata, "ptxas_log", "")  # AMD's have none
    source = compiled.asm.get("ttir") or compiled.asm["ttgir"]  # Gluon's is the latter
    if "amdgcn" in compiled.asm:
        code = compiled.asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s+(\d+)", code)
        spilled = _number(r"\.private_segment_fixed_size:\s+(\d+)", code)
    else:
        code = compiled.asm["ptx"]
        if with_loops and _PRODUCT.search(source):  # others have no loop of interest
            machine_code = disassembled(compiled.asm["cubin"])
            found_loops = loops(parse(machine_code)[compiled.metadata.name])
        registers = _number(r"Used (\d+) registers", log)
        spilled = _number(r"(\d+) bytes spill stores", log)
        spilled += _number(r"(\d+) bytes spill loads", log)
    found = Counter(_MATRIX_INSTRUCTIONS.findall(code))
    serialized = sum(found.values()) if _LOSS in log else 0
    return Kernel(
        name, target, options, getattr(compiled.metadata, "ptxas", ""), compiled.hash,
        registers=registers, spilled=spilled, shared=compiled.metadata.shared,
        matrix=tuple(sorted(found.items())),
        narrow_products=_NARROW_PRODUCT.search(source) is not None,
        serialized=serialized, warps=_multiplying(compiled), loops=tuple(found_loops),
    )  # fmt: skip


def _multiplying(compiled: Any) -> int:
    """The warps of a program that run its loops: of specialized ones those in groups of four, which multiply."""
    parts = re.findall(r"partition\d+\(.*num_warps\((\d+)\)", compiled.asm.get("ttgir", ""))
    if not parts:
        return int(compiled.metadata.num_warps)
    first = _number(r'"ttg.num-warps" = (\d+)', compiled.asm["ttgir"])
    return first + sum(int(warps) for warps in parts if int(warps) >= 4)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"nothing like {pattern!r} in {text[:500]!r}")
    return int(match[1])


def disassembled(cubin: bytes) -> str:
    """The machine code, as nvdisasm prints it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", "-ndf", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
