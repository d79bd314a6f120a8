"""`python -m tests.support.launch_path LIBRARY WORK...`: works of `ahead_of_time` through Triton's launcher.

Every work runs twice: the second time `launch` has the compiled kernels, and Triton does not look for them.

LIBRARY is `stub_driver.c`, which stands in for libcuda and keeps what each launch passed. Every argument is held
against the parameter of the kernel's PTX that it belongs to. Prints the kernels that were launched, one a line. The
exit status is 1, with the reasons, if an argument did not arrive, if a kernel was searched for twice, if ptxas was one
that miscompiles, or if the kernels of a step were not compiled together. TRITON_LIBCUDA_PATH names LIBRARY's folder.
"""

import ctypes
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.static import ahead_of_time
from benchmarks.static.binaries import log_kept
from heads_kernels.ops.triton.launch import is_sound

BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
MOST_PARAMETERS = 256  # of stub_driver.c
MOST_WORDS = 16  # of a parameter, 8 bytes each


class Driver(nvidia.CudaDriver):
    """Triton's own, with CPU tensors for those of the device."""

    def __init__(self) -> None:
        self.utils = nvidia.CudaUtils()
        self.launcher_cls = nvidia.CudaLauncher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Stub:
    """The variables of the library."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)

    def expect(self, sizes: list[int]) -> None:
        self._variable("stub_parameter_count", ctypes.c_int).value = len(sizes)
        self._array("stub_parameter_bytes", ctypes.c_int)[: len(sizes)] = sizes

    def parameters(self, count: int) -> list[int]:
        """The bits of the first ones, which may have 128 bytes."""
        found = self._array("stub_parameters", ctypes.c_uint64 * MOST_WORDS)[:count]
        return [as_bits(words) for words in found]

    def numbers(self) -> dict[str, Any]:
        """Launches so far, and the size of the last one."""
        triple = ctypes.c_int * 3
        return {
            "launches": self._variable("stub_launches", ctypes.c_int).value,
            "grid": tuple(self._variable("stub_grid", triple)),
            "block": tuple(self._variable("stub_block", triple)),
            "shared": self._variable("stub_shared_bytes", ctypes.c_int).value,
        }

    def _array(self, name: str, kind: Any) -> Any:
        return self._variable(name, kind * MOST_PARAMETERS)

    def _variable(self, name: str, kind: Any) -> Any:
        return kind.in_dll(self._library, name)


def as_bits(words: Sequence[int]) -> int:
    """Words of 64 bits as one number, the first lowest."""
    return sum(word << 64 * i for i, word in enumerate(words))


def flattened(kind: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The kinds and values of an argument's parameters: of a descriptor its tensor map, then sizes and strides."""
    if kind.startswith("tensordesc"):
        yield "map", value
        yield from (("i32", size) for size in value.shape)
        yield from (("i64", stride) for stride in value.strides)
    elif kind != "constexpr":
        yield kind, value


def parameter_bytes(ptx: str) -> list[int]:
    """The size of each parameter of the kernel."""
    head = ptx[ptx.index(".entry") :]
    head = head[: head.index(")")]
    found = re.findall(r"\.param\s+(?:\.align \d+ )?\.[a-z](\d+)[^,\[]*(?:\[(\d+)\])?", head)
    return [BYTES[bits] * int(count or 1) for bits, count in found]


def map_of(descriptor: Any) -> list[int]:
    """What stub_driver.c writes into the tensor map of a descriptor; the first dimension is the last one here."""
    sizes, strides = descriptor.shape[::-1], descriptor.strides[-2::-1]
    bytes_of = descriptor.base.element_size()
    box = descriptor.block_shape[::-1]
    box[0] = min(box[0], 128 // bytes_of)  # what swizzling allows: Triton issues several copies
    return [descriptor.base.data_ptr(), *sizes, *(s * bytes_of for s in strides), 0, *box]


def bits_of(kind: str, value: Any, size: int) -> int:
    """What a parameter of that kind and size holds for an argument."""
    if kind == "map":
        return as_bits(map_of(value))
    if kind.startswith("*"):
        return value.data_ptr()
    if kind.startswith("fp"):
        code = {"fp32": "<f", "fp64": "<d"}[kind]
        return int.from_bytes(struct.pack(code, value), "little")
    return int(value) & ((1 << 8 * size) - 1)


def differences(compiled: Any, arguments: tuple[Any, ...], grid: tuple[int, ...], stub: Stub, before: int) -> list[str]:
    """Where the last launch is not this one, in words."""
    sizes = parameter_bytes(compiled.asm["ptx"])
    kinds, values = tree_leaves(tuple(compiled.src.signature.values())), tree_leaves(arguments)
    if len(kinds) != len(values):
        return [f"{len(values)} arguments for a signature of {len(kinds)}"]
    passed = [each for k, v in zip(kinds, values, strict=True) for each in flattened(k, v)]
    words = []
    # Behind them Triton passes its own scratch memory.
    if len(sizes) < len(passed):
        return [f"{len(passed)} arguments for {len(sizes)} parameters"]
    found = stub.parameters(len(passed))
    for i, ((kind, value), size, got) in enumerate(zip(passed, sizes, found, strict=False)):
        if (want := bits_of(kind, value, size)) != got:
            words.append(f"parameter {i} ({kind}) is {got:#x} in place of {want:#x}")
    wanted = {
        "launches": before + 1,
        "grid": (*grid, 1, 1)[:3],
        "block": (32 * compiled.metadata.num_warps, 1, 1),
        "shared": compiled.metadata.shared,
    }
    if (numbers := stub.numbers()) != wanted:
        words.append(f"launched {numbers} in place of {wanted}")
    return words


def groups_of(work: ahead_of_time.Work) -> int:
    """The groups in which its kernels are compiled at most: one for a forward pass and the backward pass that follows,
    or for a call of statistics."""
    if work.drive is ahead_of_time._attention:
        return 2 if work.case.gate is None else 1
    return 3 if work.drive is ahead_of_time._statistics else 1


def main(path: str, names: list[str]) -> int:
    stub, failures = Stub(path), []
    searched: list[str] = []
    kept: list[str] = []
    groups: list[bool] = []  # True: the launch for which a group was compiled
    grouped = 0  # of all works
    run = JITFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        if compiled is None or warmup:  # `launch` collects what it has to compile
            groups.append(compiled is None and not warmup)
            return compiled
        stub.expect(parameter_bytes(compiled.asm["ptx"]))
        before = stub.numbers()["launches"]
        run(self, *args, grid=grid, warmup=False, **options)
        by_name = dict(zip(self.arg_names, args, strict=False)) | options
        arguments = tuple(by_name[name] for name in self.arg_names)
        name = f"{self.fn.__module__}.{self.fn.__name__}"
        print(name, flush=True)
        searched.append(name)
        found = differences(compiled, arguments, grid, stub, before)
        failures.extend(f"{name}: {words}" for words in found)
        if not is_sound(compiled.metadata.ptxas):
            failures.append(f"{name}: compiled by ptxas {compiled.metadata.ptxas}")
        return compiled

    runner = CompiledKernel.__getitem__

    def launch_kept(self: Any, grid: tuple[int, ...]) -> Any:
        def launched(*args: Any) -> None:
            stub.expect(parameter_bytes(self.asm["ptx"]))
            before = stub.numbers()["launches"]
            runner(self, grid)(*args)
            name = f"{self.src.fn.__module__}.{self.src.fn.__name__}"
            kept.append(name)
            found = differences(self, args, grid, stub, before)
            failures.extend(f"{name}, kept: {words}" for words in found)

        return launched

    driver.set_active(Driver())
    for name in names:
        work = next(work for work in ahead_of_time.WORKS if work.name == name)
        seed = torch.tensor([1, 0, 0, 0, 0]) if work.case.dropout_p else None
        inputs = work.case.make(torch.bfloat16)
        if work.drive is ahead_of_time._attention:  # a forward pass expects the backward pass
            for tensor in inputs.tensors.values():
                tensor.requires_grad_(tensor.is_floating_point())
        searched.clear()
        kept.clear()
        groups.clear()
        with (
            patch.object(JITFunction, "run", launch),
            patch.object(CompiledKernel, "__getitem__", launch_kept),
            log_kept(),  # other tests read it from the cache
        ):
            work.drive(inputs, seed)
            every = sorted(searched + kept)
            searched.clear()
            kept.clear()
            work.drive(inputs, seed)
        if searched or sorted(kept) != every:
            failures.append(f"{name}: kept {sorted(kept)} of {every}, not {searched}")
        if sum(groups) > (most := groups_of(work)):
            failures.append(f"{name}: kernels were compiled in {sum(groups)} groups, of {most}")
        grouped += sum(groups)
    if not grouped:
        failures.append("no kernels were compiled together")
    print(*failures, sep="\n", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
