"""The table of backends and the choice of one for a call, the same for every operator.

For a `Call`, each backend returns the list of reasons why it cannot serve it; an empty list means that it can. Only
torch is imported here, so that the choice of a backend can be traced by `torch.compile`; backends themselves are
imported when an op runs on them, and never import each other.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Final, Literal

import torch
from torch import Tensor

from heads_kernels.build_info import PACKAGE, build_info
from heads_kernels.call import Call
from heads_kernels.checks import is_int

#: The names in the table.
BackendName = Literal["cpu", "triton", "cuda", "eager"]


def _cpu_missing() -> str:
    """Why the extension of the CPU kernels is missing, and how to get it; empty if it is there."""
    if find_spec(f"{PACKAGE}._cpu") is not None:
        return ""
    why = build_info().get("cpu", {}).get("missing", "nothing was")
    bring = "it compiles on Linux only"
    if sys.platform == "linux":
        bring = "with g++: pip install --force-reinstall --no-deps --no-binary heads_kernels heads_kernels"
    return f"the extension heads_kernels._cpu was not built: {why} ({bring})"


#: Why there are no kernels for the CPU; empty if there are.
CPU_MISSING: Final = _cpu_missing()
_OLDEST_TRITON: Final = (3, 6)
#: Compute capability. On older GPUs Triton compiles without tensor cores and spills kilobytes of registers.
_OLDEST_PART: Final = (8, 0)


def _triton_missing() -> str:
    """Why Triton cannot be used; empty if it can."""
    get = "pip install 'heads_kernels[triton]'"
    if find_spec("triton") is None:
        return f"Triton is not installed ({get})"
    try:
        found = metadata.version("triton")
    except metadata.PackageNotFoundError:  # a build under another name
        return ""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and (int(numbers[1]), int(numbers[2])) < _OLDEST_TRITON:
        return f"Triton is {found}; it serves 3.6 and newer ({get})"
    return ""


_TRITON_MISSING: Final = _triton_missing()

#: Whether the CUDA kernels run in the emulator, on CPU tensors; decided once for a process.
CUDA_EMULATED: Final = os.environ.get("HEADS_KERNELS_EMULATE_CUDA") == "1"


def _cuda_missing() -> str:
    """Why the extension of the CUDA kernels is missing; empty if it is there."""
    name = "_cuda_emulated" if CUDA_EMULATED else "_cuda"
    if find_spec(f"{PACKAGE}.{name}") is not None:
        return ""
    if CUDA_EMULATED:
        return "the emulated kernels are not built (python setup.py emulator)"
    why = build_info().get("cuda", {}).get("missing", "nothing was (pip install)")
    return f"the extension heads_kernels._cuda was not built: {why}"


_CUDA_MISSING: Final = _cuda_missing()

#: Whether Triton interprets kernels, by the values that Triton accepts. Triton reads the variable where a kernel is
#: defined, so that a later change has no effect.
TRITON_INTERPRETED: Final = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")

#: Backends whose kernels for GPUs run on CPU tensors in this process.
SIMULATED: Final = {name for name, is_on in (("triton", TRITON_INTERPRETED), ("cuda", CUDA_EMULATED)) if is_on}

#: Limit of the stride between rows: offsets within 256 rows, the largest tile that tuning tries, fit into 32 bits.
FARTHEST_ROW: Final = 1 << 23
#: A tile holds whole rows of a head on chip; rows of width 256 still fit.
_WIDEST_HEAD: Final = 256
#: A query and key that heads share are read in slices; this is the largest width that is tested.
_WIDEST_SHARED: Final = 1024
#: Programs per launch: grids have one dimension.
_MOST_PROGRAMS: Final = (1 << 31) - 1
#: Rows or keys of the smallest tile of any kernel (csrc/cuda/attention_rows.cu).
_LEAST_ROWS: Final = 8


def eager(call: Call) -> list[str]:
    """The formula in plain PyTorch serves every valid call."""
    return []


def cpu(call: Call) -> list[str]:
    """The C++ kernels read tensors in CPU memory, rows contiguous, and every mask."""
    reasons = []
    if CPU_MISSING:
        reasons.append(CPU_MISSING)
    if call.query.device.type != "cpu":
        reasons.append(f"tensors are on {call.query.device}; it serves CPU tensors")
    return reasons + rows_apart(*call[:3])


def triton(call: Call) -> list[str]:
    """The Triton kernels read tensors in GPU memory (interpreted: in any), rows contiguous, and every mask."""
    reasons = []
    if _TRITON_MISSING:
        reasons.append(_TRITON_MISSING)
    device = call.query.device
    if device.type == "cpu" and not TRITON_INTERPRETED:
        reasons.append(
            f"tensors are on {device}; it serves CUDA tensors, and CPU tensors in Triton's interpreter "
            "(slow, for tests: start Python with TRITON_INTERPRET=1)"
        )
    elif device.type not in ("cpu", "cuda"):
        reasons.append(f"tensors are on {device}; it serves CUDA tensors")
    elif device.type == "cuda" and not reasons and (words := _unsupported_by_triton(device.index)):
        reasons.append(words)
    return reasons + _far_rows(call) + _unsuited(call)


def _unsupported_by_triton(index: int) -> str:
    """Why Triton cannot run on a GPU; empty if it can, and before PyTorch uses the GPU (fake tensors)."""
    if not torch.cuda.is_initialized() or index >= torch.cuda.device_count():  # type: ignore[no-untyped-call]
        return ""
    capability = torch.cuda.get_device_capability(index)
    if torch.version.hip is None and capability < _OLDEST_PART:
        has, oldest = (".".join(map(str, version)) for version in (capability, _OLDEST_PART))
        return f"GPU {index} has compute capability {has}; it serves {oldest} and newer"
    return _triton_start_error()


@functools.cache
def _triton_start_error() -> str:
    """Why Triton does not start in this process; empty if it does.

    Triton compiles its driver module when it first starts on a machine, and reads it from its cache later.
    """
    try:
        importlib.import_module("triton.runtime").driver.active.utils  # noqa: B018
    except Exception as error:  # of a compiler, a linker, a file system or Triton
        return (
            f"Triton does not start: {error}; it needs a C compiler (gcc, clang or what CC names), Python.h, "
            "and libcuda.so.1 in /sbin/ldconfig -p"
        )
    return ""


def cuda(call: Call) -> list[str]:
    """The CUDA kernels read tensors in GPU memory (emulated: in CPU memory), rows contiguous, and every mask."""
    reasons = [_CUDA_MISSING] if _CUDA_MISSING else []
    if call.alpha is not None:
        reasons.append("it has no kernels of entmax attention")
    device = call.query.device
    if CUDA_EMULATED:
        if device.type != "cpu":
            reasons.append(f"tensors are on {device}; emulated it serves CPU tensors")
    elif device.type != "cuda":
        reasons.append(f"tensors are on {device}; it serves CUDA tensors")
    elif not reasons and (words := _unsupported_by_cuda(device.index)):
        reasons.append(words)
    return reasons + _unsuited(call)


#: Devices that can run the CUDA kernels. Refusals are not cached: their cause, such as a lack of memory, may pass.
_CAPABLE: Final[set[int]] = set()


def _unsupported_by_cuda(index: int) -> str:
    """Why the CUDA kernels cannot run on a GPU, as their extension says; empty if they can."""
    if index in _CAPABLE:
        return ""
    try:
        extension = importlib.import_module(f"{PACKAGE}._cuda")
    except ImportError as error:
        return f"heads_kernels._cuda does not load: {error}"
    in_use = torch.cuda.is_initialized() and index < torch.cuda.device_count()  # type: ignore[no-untyped-call]
    # Unlike the guard of the extension, PyTorch's can return to a device without a context; -1 does nothing.
    with torch.cuda.device(index if in_use else -1):
        words: str = extension.unsupported_device(index)
    if not words:
        _CAPABLE.add(index)
    return words


# What `torch.compiler.assume_constant_result` does; calling it would load Dynamo, which takes two seconds.
_unsupported_by_cuda._dynamo_marked_constant = True  # type: ignore[attr-defined]
_unsupported_by_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _far_rows(call: Call) -> list[str]:
    """Reasons: tensors whose rows are so far apart that offsets within a tile need more than 32 bits.

    `dout` is not among them: `buffers.contiguous_rows` copies it.
    """
    tensors = zip(("query", "key", "value"), call, strict=False)
    apart = {name: t.stride(-2) for name, t in tensors if t is not None}
    apart["the output"] = call.H * call.Dv  # where heads are inside rows
    return [
        f"rows of {name} are {elements} elements apart; it serves less than {FARTHEST_ROW} (.contiguous())"
        for name, elements in apart.items()
        if elements >= FARTHEST_ROW
    ]


def _unsuited(call: Call) -> list[str]:
    """Reasons of all kernels for GPUs: the dtype, widths, rows, and sizes that need more programs than a grid has."""
    reasons = []
    if call.query.dtype == torch.float64:
        reasons.append("tensors are float64; it computes in float32, use the eager backend")
    most = _WIDEST_HEAD if call.mixing is None else _WIDEST_SHARED
    for what, width, limit in (("query and key are", call.D, most), ("value is", call.Dv, _WIDEST_HEAD)):
        if width > limit:
            reasons.append(f"{what} {width} wide; it serves widths up to {limit}")
    programs = call.B * call.H * -(-max(call.T, call.S) // _LEAST_ROWS)
    if is_int(programs) and programs > _MOST_PROGRAMS:  # symbolic sizes are checked by the launch
        sizes = f"B = {call.B}, H = {call.H}, T = {call.T} and S = {call.S}"
        reasons.append(f"{sizes} may need {programs} programs; a launch takes {_MOST_PROGRAMS}")
    return reasons + rows_apart(*call[:3])


def rows_apart(*tensors: Tensor | None) -> list[str]:
    """Reasons: the tensors among query, key, value and `attended` whose rows are not contiguous."""
    return [
        f"{name} has stride {tensor.stride(-1)} in its last dimension; it needs 1 (.contiguous())"
        for name, tensor in zip(("query", "key", "value", "attended"), tensors, strict=False)
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1
    ]


@dataclass(frozen=True, eq=False)
class Backend:
    """One row of the table.

    `module` runs calls (ops/attention.py, ops/statistics.py); it is imported when an op runs. `unsupported(call)`
    returns the reasons why this backend cannot serve the call, an empty list if it can.
    """

    name: BackendName
    module: str
    unsupported: Callable[[Call], list[str]]


#: In order of preference.
BACKENDS: Final = (
    Backend("cpu", f"{PACKAGE}.ops.cpu", cpu),
    Backend("triton", f"{PACKAGE}.ops.triton.backend", triton),
    # After Triton, except for float32 (`in_order`): on an H100 it takes 1.3 to 3.8 times as long in bfloat16.
    Backend("cuda", f"{PACKAGE}.ops.cuda", cuda),
    Backend("eager", f"{PACKAGE}.ops.eager", eager),
)


def find(name: str) -> Backend:
    """The row of a backend; raises `ValueError` if there is none of this name."""
    for row in BACKENDS:
        if row.name == name:
            return row
    known = ", ".join(repr(row.name) for row in BACKENDS)
    raise ValueError(f"backend is {name!r}; use one of {known}, or None to let the package choose.")


# ---------------------------------------------------------------------- the choice
#: The environment variable that names the order, read once; without it the order is that of the table.
VARIABLE: Final = "HEADS_KERNELS_BACKENDS"


def _read(value: str) -> tuple[Backend, ...]:
    """The backends that a value of the variable names; none where it is empty."""
    if not value:
        return ()
    table: dict[str, Backend] = {row.name: row for row in BACKENDS}
    names = dict.fromkeys(name.strip() for name in value.split(","))
    if not names.keys() <= table.keys():
        known = ", ".join(table)
        raise ValueError(f"{VARIABLE} is {value!r}; name some of {known}, separated by commas.")
    return tuple(table[name] for name in names)


_NAMED: Final = _read(os.environ.get(VARIABLE, ""))

#: Backends that may serve CPU tensors in this process.
_ON_CPU: Final = {"cpu", "eager", *SIMULATED}

#: The order for float32 on a GPU, without the variable: `cuda` multiplies it on tensor cores, `triton` does not.
_FLOAT32: Final = tuple(sorted(BACKENDS, key=lambda row: row.name != "cuda"))


@dataclass(frozen=True)
class Choice:
    """What `explain` returns: the backend that would run, and why the others would not.

    `backend` is None if no backend, or not the requested one, can serve the call. `refusals` maps each backend that was
    not chosen to its reasons.
    """

    operator: str
    backend: BackendName | None
    refusals: dict[str, list[str]]

    def __str__(self) -> str:
        head = f"{self.operator}: " + (
            f"runs on {self.backend!r}" if self.backend else "no backend can serve this call"
        )
        lines = [f"  not {name!r}: {'; '.join(reasons)}" for name, reasons in self.refusals.items()]
        return "\n".join([head, *lines])


def choose(call: Call, backend: str | None = None) -> Choice:
    """Choose the first backend that can serve the call; with `backend`, consider only that one.

    Raises `ValueError` if there is no backend of this name.
    """
    rows = in_order(call.query) if backend is None else [find(backend)]
    refusals: dict[str, list[str]] = {}
    chosen: BackendName | None = None
    for row in rows:
        reasons = row.unsupported(call)
        if not reasons and chosen is None:
            chosen = row.name
        else:
            refusals[row.name] = reasons or [f"could serve it too, but {chosen!r} comes first"]
    for row in BACKENDS if backend is None else ():
        if row not in rows:
            refusals[row.name] = [f"{VARIABLE} leaves it out", *row.unsupported(call)]
    return Choice(call.operator, chosen, refusals)


def select(call: Call, backend: str | None = None) -> str:
    """Name of the backend that serves the call; raises `ValueError` with all reasons if none does.

    Warns once if only `eager` can, since it stores `[B, H, T, S]`.
    """
    for row in in_order(call.query) if backend is None else [find(backend)]:
        if not row.unsupported(call):
            if backend is None and row.name == "eager" and not torch.compiler.is_compiling():
                _warn_of_eager(_why_eager(call))
            return row.name
    raise ValueError(str(choose(call, backend)))


def in_order(query: Tensor) -> Sequence[Backend]:
    """The backends in the order in which they are tried."""
    return _NAMED or (_FLOAT32 if query.is_cuda and query.dtype == torch.float32 else BACKENDS)


def first_on_cpu() -> str:
    """Name of the first backend that may serve CPU tensors in this process."""
    for row in _NAMED or BACKENDS:  # every small call asks: a generator would take longer
        if row.name in _ON_CPU:
            return row.name
    return ""


def _why_eager(call: Call) -> str:
    """Why a call runs on `eager`, the same text for all calls on a CPU without kernels; empty for float64 elsewhere."""
    if call.query.is_cpu and CPU_MISSING:
        return f"heads_kernels runs on 'eager' on this CPU: {CPU_MISSING}"
    return "" if call.query.dtype == torch.float64 else str(choose(call))  # no dtype of GPU kernels


@functools.cache
def _warn_of_eager(why: str) -> None:
    if not why:
        return
    warnings.warn(
        f'{why}\n  It is slow and holds [B, H, T, S] in memory; pass backend="eager" to silence this warning.',
        stacklevel=5,  # the caller of the operator
    )
