"""What the built CUDA kernels take of a GPU: registers and stack of every kernel, for every part it was compiled for.

Read from the machine code in `heads_kernels/_cuda*.so` with cuobjdump (of Triton's wheel, else of the CUDA toolkit).
The kernels keep no arrays on the stack, so what stands there was spilled from registers. Needs no GPU.

    python -m benchmarks.static.cuda_resources [MODULE]

Exit status: 0; 1 where a bound is broken or there is no kernel; 2 where there is no module or no cuobjdump.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

#: Bytes that a kernel may spill a thread, where 255 registers do not do: few enough to be what a loop keeps
#: but does not use. Most is that of the first pass of the backward with sinks and an elementwise gate on sm_80. float
#: kernels hold every operand twice, as its high and its low part.
MOST_STACK: Final = {"bf16": 24, "fp16": 24, "float": 160}

_SECTION: Final = re.compile(r"^arch = (sm_\w+)$|^ Function (\S+):$|^\s+REG:(\d+) STACK:(\d+)", re.M)
#: entry<Kernel<dtype, numbers...>, least blocks> as the compiler mangles it.
_ENTRY: Final = re.compile(r"entryINS0_\d+(?P<kernel>[A-Za-z]+)I(NS0_4(?P<half>\w{4})E|f)(?P<rest>.*?)ELi\d+EEEv")
_NUMBERS: Final = re.compile(r"L(?:i|b|NS0_\d+\w+?E)(\d+)E")


@dataclass(frozen=True)
class Kernel:
    """One kernel for one part; `numbers` are its width, 1 with score terms, then what else it is compiled for."""

    name: str
    dtype: str
    numbers: tuple[int, ...]
    part: str
    registers: int
    stack: int
    entry: str = field(default="", compare=False, repr=False)  # its name in the module

    def broken(self) -> list[str]:
        """The bound that it breaks, if it does."""
        most = MOST_STACK[self.dtype]
        return [f"{self.stack} bytes of stack, of {most}"] if self.stack > most else []

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.numbers))
        return f"{self.name}<{self.dtype}{', ' * bool(numbers)}{numbers}> on {self.part}"


def module() -> Path | None:
    """The built extension, where there is one."""
    spec = find_spec("heads_kernels._cuda")
    return Path(spec.origin) if spec is not None and spec.origin else None


def cuobjdump() -> str | None:
    """Triton brings one along."""
    triton = find_spec("triton")
    if triton is not None and triton.origin:
        tool = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        if tool.is_file():
            return str(tool)
    return shutil.which("cuobjdump")


def read(path: Path, tool: str) -> list[Kernel]:
    """Every kernel in a module; those that only check the wrappers are left out."""
    command = [tool, "--dump-resource-usage", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return list(parse(text))


def parse(text: str) -> Iterator[Kernel]:
    """The kernels in what cuobjdump prints."""
    part, entry = "", None
    for match in _SECTION.finditer(text):
        if match[1]:
            part = match[1]
        elif match[2]:
            entry = _ENTRY.search(match[2])
        elif entry is not None:
            numbers = tuple(int(number) for number in _NUMBERS.findall(entry["rest"] + "E"))
            yield Kernel(
                entry["kernel"],
                entry["half"] or "float",
                numbers,
                part,
                int(match[3]),
                int(match[4]),
                entry.string,
            )


if __name__ == "__main__":
    path, tool = Path(sys.argv[1]) if sys.argv[1:] else module(), cuobjdump()
    if path is None or not path.is_file() or tool is None:
        print("no module heads_kernels._cuda, or no cuobjdump: build the package with nvcc, and pip install triton")
        sys.exit(2)
    found = read(path, tool)
    wrong = [f"{kernel}: {'; '.join(kernel.broken())}" for kernel in found if kernel.broken()]
    print(f"{len(found)} kernels", *wrong, sep="\n")
    sys.exit(bool(wrong) or not found)
