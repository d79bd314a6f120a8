"""How long the pipes of a multiprocessor take for the hot path of a loop, with the rates of each part.

Cycles are those of one multiprocessor for one round of one block of threads, every pipe by itself; the longest bounds
the loop from below, as if all others ran beside it. Latencies, waits and the memory of the GPU are not in it.

Where the rates come from:
- numbers of multiprocessors, results per clock of arithmetic: CUDA C++ Programming Guide, "Compute Capabilities" and
  "Arithmetic Instructions" (32 lanes a warp: 16 special functions a clock are 2 cycles a warp). Integer and logic are
  stated as 64 up to 9.0, and taken so for newer parts.
- one instruction a clock from each of 4 schedulers; 32 banks of 4 bytes: the same guide.
- tensor cores: dense peaks of the data sheets (A100 312, L40S 362, H200 989, B200 2,250, RTX 5090 210, RTX 3090 71, RTX
  4090 165 TFLOP/s with float32 sums), divided by multiprocessors and the clock that they are stated for.
- `mma.sync` on sm_90 reaches 62.9 % of that peak: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU
  Architecture", 2024, arXiv:2402.13499. Taken for sm_100 too.
- `wgmma` reads both operands from shared memory, or the right one where the left is in registers: PTX ISA.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from benchmarks.static.sass import MATRIX, Instruction

PIPES: Final = ("tensor", "shared", "issue", "alu", "fma", "mufu")


@dataclass(frozen=True)
class Part:
    """A GPU: what it has, and what a multiprocessor does per clock. One stands for each target."""

    gpu: str
    multiprocessors: int
    gigahertz: float
    tensor: int  # products of 16 bits, multiplied and added
    mma_sync: float  # of them, the part that `mma.sync` reaches
    fma: int  # results of float32
    alu: int = 64  # results of integer, logic, compare, min, max, convert
    mufu: int = 16  # results of exp2 and the like
    bytes_shared: int = 128  # bytes from and to shared memory
    triton: str = ""  # the target whose code stands for that of this GPU
    cuda: str = ""  # the target whose machine code of the CUDA kernels it runs


PARTS: Final = {
    "sm_80": Part("A100", 108, 1.41, 1024, 1.0, 64),
    "sm_89": Part("L40S", 142, 2.52, 512, 1.0, 128),
    "sm_90": Part("H200", 132, 1.83, 2048, 0.629, 128),
    "sm_100": Part("B200", 148, 1.85, 4096, 0.629 / 2, 128),
    "sm_120": Part("RTX 5090", 170, 2.41, 256, 1.0, 128),
    # With float32 sums, tensor cores of these GeForce GPUs run at half the rate of those of the L40S.
    "rtx_3090": Part("RTX 3090", 82, 1.70, 256, 1.0, 128, triton="sm_89", cuda="sm_80"),
    "rtx_4090": Part("RTX 4090", 128, 2.52, 256, 1.0, 128, triton="sm_89", cuda="sm_80"),
}

_HMMA: Final = re.compile(r"HMMA\.(16)(8)(16|8|4)\b")
_HGMMA: Final = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)")
_WARPGROUP: Final = 4  # warps that share one HGMMA

#: Instructions by name; of what is in no set, those with a U in front run on the uniform datapath, the others on ALUs.
_FLOATS: Final = {
    "FADD", "FMUL", "FFMA", "FADD32I", "FMUL32I", "FFMA32I", "FADD2", "FMUL2", "FFMA2", "HADD2", "HMUL2", "HFMA2",
}  # fmt: skip
_SHARED: Final = {"LDS", "STS", "LDSM", "STSM", "LDGSTS", "SHFL", "ATOMS"}
_MEMORY: Final = {
    "LD", "ST", "LDG", "STG", "LDL", "STL", "LDC", "LDCU", "ULDC", "ATOM", "ATOMG", "RED", "UTMALDG", "UTMASTG",
    "UBLKCP", "LDTM", "STTM",
}  # fmt: skip
_CONTROL: Final = {
    "BRA", "BRX", "BSSY", "BSYNC", "BREAK", "CALL", "RET", "EXIT", "NOP", "BAR", "WARPSYNC", "WARPGROUP", "DEPBAR",
    "LDGDEPBAR", "SYNCS", "YIELD", "MEMBAR", "FENCE", "ELECT", "NANOSLEEP", "VOTE", "VOTEU", "R2UR", "S2R", "S2UR",
    "CS2R", "CCTL", "ERRBAR",
}  # fmt: skip


def kind(each: Instruction) -> str:
    """The pipe of an instruction, or "uniform", "memory" or "control" for what takes an issue slot alone."""
    name = each.name
    if MATRIX.match(name):
        return "tensor"
    if name in _SHARED:
        return "shared"
    if name == "MUFU":
        return "mufu"
    if name in _FLOATS or name.startswith("IMAD"):
        return "fma"
    if name in _MEMORY:
        return "memory"
    if name in _CONTROL:
        return "control"
    # The uniform datapath has its own names: UIADD3, UMOV, USEL, ...
    return "uniform" if name.startswith("U") else "alu"


def products(lines: Iterable[Instruction]) -> int | None:
    """What one warp's share of these instructions multiplies and adds; None where an instruction does not say."""
    total = 0
    for each in lines:
        if kind(each) == "tensor":
            shape = _HMMA.match(each.opcode) or _HGMMA.match(each.opcode)
            if shape is None:  # of tcgen05 the shape is a number in a register
                return None
            m, n, k = (int(number) for number in shape.groups())
            total += m * n * k // (_WARPGROUP if each.name == "HGMMA" else 1)
    return total


def cycles(lines: Iterable[Instruction], part: Part, warps: int) -> dict[str, int]:
    """Cycles of each pipe, rounded up; of the tensor cores 0 where a product does not say its shape."""
    lines = tuple(lines)
    found = Counter(kind(each) for each in lines)
    integer = sum(each.name.startswith("IMAD") for each in lines)
    # Half of the lanes for float32 multiply integers.
    fma = max(found["fma"] / part.fma, integer / min(part.fma, 64))
    exact = {
        "tensor": sum(_tensor_cycles(each, part) for each in lines),
        "shared": sum(_shared_bytes(each) for each in lines) / part.bytes_shared,
        "issue": len(lines) / 4,
        "alu": 32 * found["alu"] / part.alu,
        "fma": 32 * fma,
        "mufu": 32 * found["mufu"] / part.mufu,
    }
    return {pipe: -int(-warps * exact[pipe] // 1) for pipe in PIPES}


def _tensor_cycles(each: Instruction, part: Part) -> float:
    if kind(each) != "tensor":
        return 0.0
    rate = part.tensor * (1.0 if each.name == "HGMMA" else part.mma_sync)
    if "TF32" in each.opcode:
        rate /= 2
    return (products([each]) or 0) / rate


def _shared_bytes(each: Instruction) -> float:
    """Of one warp's share; conflicts of banks are not in it."""
    if shape := _HGMMA.match(each.opcode):
        m, n, k = (int(number) for number in shape.groups())
        width = 4 if "TF32" in each.opcode else 2
        left = each.operands.split(",")[1].strip().startswith("gdesc")
        return (n + m * left) * k * width / _WARPGROUP
    if each.name in ("LDSM", "STSM"):
        match = re.search(r"\.M\w*88(?:\.(\d))?", each.opcode)
        return 128 * int(match[1] or 1) if match else 128
    if each.name in _SHARED:
        match = re.search(r"\.(64|128)\b", each.opcode)
        return 128 * (int(match[1]) // 32 if match else 1)
    return 0


def teraflops(part: Part, multiplied: int, taken: dict[str, int]) -> float:
    """What the whole GPU reaches at most in such rounds, of the products that the loop makes."""
    return 2 * multiplied / max(taken.values()) * part.multiprocessors * part.gigahertz / 1e3
