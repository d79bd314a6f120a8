"""Kernels in Gluon on the CPU: their functions run as Python, on NumPy and on what `gluon_machine` knows of a GPU.

`emulated(order)` gives a `launch` to take the place of the package's. Functions of kernels, those of Triton's kernels
among them, run as they are; the languages, barriers, copies and products of warpgroups are replaced. Tensors are those
of the caller, on the CPU; tiles of 16 bits are float32 numbers rounded to them. An asynchronous product has no value
until it is waited for; until then it may only be what the next product is added to. Layouts do nothing: the compiler
checks them.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.support.gluon_machine import Added, Barrier, Cell, Fault, Machine, Shared

_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def rounded(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Values as `dtype` holds them: floating-point ones in float32, integers in int64."""
    name = str(dtype)
    if name in ("bf16", "fp16"):
        narrow = torch.bfloat16 if name == "bf16" else torch.float16
        return torch.from_numpy(np.array(values, np.float32)).to(narrow).float().numpy()
    return np.asarray(values).astype(np.float32 if name == "fp32" else np.int64)


class Value(np.ndarray):
    """A tensor or a scalar of a kernel."""

    def to(self, dtype: Any) -> Value:
        return value(rounded(self, dtype))

    def __array_wrap__(self, array: np.ndarray, context: Any = None, scalar: bool = False) -> Value:
        return array.view(Value)


def value(values: Any) -> Value:
    array = np.asarray(values)
    return (array.astype(np.float32) if array.dtype == np.float64 else array).view(Value)


class Pointer:
    """Into the storage of a tensor."""

    def __init__(self, tensor: Tensor, offset: Any = None) -> None:
        self.tensor, self.offset = tensor, tensor.storage_offset() if offset is None else offset

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=_TYPES[self.tensor.dtype])

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.tensor, np.asarray(self.offset) + np.asarray(more))

    def __sub__(self, less: Any) -> Pointer:
        return self + -np.asarray(less)

    def places(self, mask: Any) -> tuple[Tensor, np.ndarray, np.ndarray]:
        """The storage, addresses, and where `mask` holds; shapes broadcast."""
        storage = self.tensor.detach().new_empty(0).set_(self.tensor.untyped_storage())
        at, where = np.broadcast_arrays(self.offset, True if mask is None else mask)
        used = at[where]
        if used.size and not (used.min() >= 0 and used.max() < len(storage)):
            raise Fault(f"an address outside of a tensor: element {used.min()} or {used.max()} of {len(storage)}")
        return storage, at, where


class Tiles:
    """A tensor descriptor: what is beyond the tensor reads as 0 and is not written."""

    def __init__(self, described: TensorDescriptor) -> None:
        self.dtype, self.layout = _TYPES[described.base.dtype], described.layout
        self.block = list(described.block_shape)
        strides = [s if n > 1 else 0 for s, n in zip(described.strides, described.shape, strict=True)]
        self._tensor = described.base.detach().as_strided(described.shape, strides)

    @property
    def bytes(self) -> int:
        return self._tensor.itemsize * int(np.prod(self.block))

    def _inside(self, at: Any) -> tuple[slice, ...]:
        return tuple(slice(int(a), int(a) + n) for a, n in zip(at, self.block, strict=True))

    def read(self, at: Any) -> np.ndarray:
        tile = torch.zeros(self.block)
        part = self._tensor[self._inside(at)]
        tile[tuple(slice(n) for n in part.shape)] = part.float()
        return tile.numpy()

    def write(self, at: Any, tile: np.ndarray) -> None:
        part = self._tensor[self._inside(at)]
        part.copy_(torch.from_numpy(tile)[tuple(slice(n) for n in part.shape)])

    def add(self, at: Any, tile: np.ndarray) -> None:
        self.write(at, self.read(at) + tile)


class Buffer(Shared):
    """Shared memory as kernels use it."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def load(self, layout: Any) -> Value:
        self.read()
        return value(self.array.copy())

    def store(self, values: Any) -> None:
        self.write(np.asarray(values))


class Product:
    """`a @ b + acc` of a warpgroup, under way."""

    def __init__(self, machine: Machine, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self.value: Value | None = None
        self._a, self._b, self._acc, self._use_acc = a, b, acc, use_acc
        self._number = f"a product ({next(_NUMBERS)})"
        self._shared = [each for each in (a, b) if isinstance(each, Shared)]
        for each in self._shared:
            each.read(self._number)

    def ended(self) -> Value:
        for each in self._shared:
            each.read_ends(self._number)
        a, b = (each.array if isinstance(each, Shared) else each for each in (self._a, self._b))
        # In float64, where sums of products of 16-bit numbers are exact: the order in which BLAS adds does not matter.
        product = (np.asarray(a, np.float64) @ np.asarray(b, np.float64)).astype(np.float32)
        acc = self._acc
        if isinstance(acc, Product):  # it has ended before this one
            acc = acc.value
        self.value = value(product + np.asarray(acc) if self._use_acc else product)
        return self.value

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise Fault("a product is used that is still under way")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.__array__().shape

    def to(self, dtype: Any) -> Value:
        return value(self)


_NUMBERS = itertools.count()


def _extreme(of_floats: Any, of_integers: Any) -> Callable[..., Any]:
    """The larger or smaller; NaN is neither."""

    def call(a: Any, b: Any) -> Value:
        floats = any(np.asarray(each).dtype.kind == "f" for each in (a, b))
        return value((of_floats if floats else of_integers)(a, b))

    return call


def _reduced(extreme: Any) -> Callable[..., Any]:
    def call(values: Any, axis: int) -> Value:
        return value(extreme.reduce(np.asarray(values), axis=axis))

    return call


def _elementwise(function: Any) -> Callable[..., Any]:
    return lambda x: value(function(np.asarray(x, np.float32)))


class _Language:
    """`triton.language` and Gluon's, for one program; what is not here is the real one's."""

    def __init__(self, machine: Machine, program: int, programs: int) -> None:
        self._machine, self._program, self._programs = machine, program, programs

    def __getattr__(self, name: str) -> Any:
        return getattr(gl, name)

    maximum = staticmethod(_extreme(np.fmax, np.maximum))
    minimum = staticmethod(_extreme(np.fmin, np.minimum))
    max, min = staticmethod(_reduced(np.fmax)), staticmethod(_reduced(np.fmin))
    exp, exp2 = staticmethod(_elementwise(np.exp)), staticmethod(_elementwise(np.exp2))
    log, log2 = staticmethod(_elementwise(np.log)), staticmethod(_elementwise(np.log2))
    abs = staticmethod(_elementwise(np.abs))
    static_range = range = staticmethod(lambda *ends, **_: range(*map(int, ends)))
    cdiv = staticmethod(lambda a, b: -(-a // b))
    sum = staticmethod(lambda x, axis=None: value(np.sum(x, axis, dtype=x.dtype)))
    fma = staticmethod(lambda a, b, c: value(np.float32(np.asarray(a, np.float64) * b + c)))
    broadcast = staticmethod(lambda a, b: tuple(map(value, np.broadcast_arrays(a, b))))
    cumsum = staticmethod(lambda x: value(np.cumsum(x)))
    arange = staticmethod(lambda start, end, layout=None: value(np.arange(start, end)))
    where = staticmethod(lambda c, a, b: value(np.where(c, a, b)))
    convert_layout = staticmethod(lambda x, layout: x)
    reshape = staticmethod(lambda x, shape: value(np.reshape(x, shape)))
    permute = staticmethod(lambda x, order: value(np.transpose(x, order)))
    split = staticmethod(lambda x: (value(x[..., 0]), value(x[..., 1])))
    NVMMADistributedLayout = DotOperandLayout = staticmethod(lambda *_, **__: None)
    SliceLayout = BlockedLayout = SwizzledSharedLayout = NVMMADistributedLayout

    def full(self, shape: Any, x: Any, dtype: Any, layout: Any = None) -> Value:
        return value(rounded(np.full(shape, x), dtype))

    def zeros(self, shape: Any, dtype: Any, layout: Any = None) -> Value:
        return self.full(shape, 0, dtype)

    def static_assert(self, condition: Any, words: str = "") -> None:
        assert condition, words

    def program_id(self, axis: int) -> Value:
        return value(self._program)

    def num_programs(self, axis: int) -> Value:
        return value(self._programs)

    def load(self, pointer: Pointer, mask: Any = None, other: Any = 0) -> Value:
        storage, at, where = pointer.places(mask)
        found = storage[torch.from_numpy(np.where(where, at, 0).astype(np.int64))]
        found = found.float() if found.is_floating_point() else found.long()
        return value(np.where(where, found.numpy(), other).astype(found.numpy().dtype))

    def store(self, pointer: Pointer, values: Any, mask: Any = None) -> None:
        storage, at, where = pointer.places(mask)
        kept = torch.from_numpy(np.broadcast_to(values, at.shape)[where].copy())
        storage[torch.from_numpy(at[where].astype(np.int64))] = kept.to(storage.dtype)

    def atomic_add(self, pointer: Pointer, more: int, sem: str) -> Value:
        storage, at, _ = pointer.places(None)
        found = int(storage[int(at)])
        storage[int(at)] += more
        return value(self._machine.count(int(at), found, more, sem))

    def barrier(self) -> None:
        pass

    def allocate_shared_memory(self, dtype: Any, shape: Any, layout: Any) -> Any:
        machine = self._machine
        if dtype is gl.int64:
            added = [Barrier(machine, f"barrier {len(machine.barriers) + i}") for i in range(shape[0])]
            machine.barriers += added
            return types.SimpleNamespace(index=lambda i: added[int(i)])
        cells = [Cell() for _ in range(shape[0])]
        name = f"tiles {len(machine.cells)}"
        machine.cells += cells
        return Buffer(machine, np.full(shape, np.nan, np.float32), dtype, name, cells)

    def warp_specialize(self, parts: Any, warps: Any, registers: Any = None) -> None:
        self._machine.specialize(parts)


def _hardware(machine: Machine) -> dict[str, Any]:
    """What stands for the functions of `triton.experimental.gluon.language.nvidia.hopper`, by their names."""

    def when(function: Callable[..., None]) -> Callable[..., None]:
        def call(barrier: Barrier, *args: Any, pred: Any = True, **options: Any) -> None:
            if pred:
                function(barrier, *(int(each) for each in args), **options)

        return call

    def async_load(tiles: Tiles, at: Any, barrier: Barrier, target: Shared, pred: Any = True) -> None:
        if not pred:
            return
        machine.copies += 1
        target.write(tiles.read(at), machine.copies)
        barrier.land(machine.copies, tiles.bytes)

    def async_store(tiles: Tiles, at: Any, source: Shared, store: Any = Tiles.write) -> None:
        source.read("a copy")
        machine.adds((id(tiles), *map(int, at)))
        machine.own.stores.append((tiles, store, at, source))

    async_atomic_add = functools.partial(async_store, store=Tiles.add)

    def store_wait(pending: int, read_only: bool = True) -> None:
        while len(machine.own.stores) > pending:
            tiles, store, at, source = machine.own.stores.pop(0)
            store(tiles, at, source.array)
            source.read_ends("a copy")
        if not read_only:
            machine.stored()

    def fence_async_shared() -> None:
        for barrier in machine.barriers:
            barrier.fenced = True
        for cell in machine.cells:
            if cell.unfenced == machine.me:
                cell.unfenced = None

    def warpgroup_mma(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
        product = Product(machine, a, b, acc, use_acc)
        if not is_async:
            return product.ended()
        machine.own.queue.append(product)
        return product

    def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = ()) -> Any:
        count = max(len(machine.own.queue) - num_outstanding, 0)
        for product in machine.own.queue[:count]:
            product.ended()
        del machine.own.queue[:count]
        done = [isinstance(each, Product) and each.value is not None for each in deps]
        results = [each.value if ended else each for each, ended in zip(deps, done, strict=True)]
        return results[0] if len(results) == 1 else tuple(results)

    barriers = types.SimpleNamespace(
        MBarrierLayout=lambda: None, init=when(Barrier.init), wait=when(Barrier.wait),
        arrive=when(Barrier.arrive), expect=when(Barrier.expect),
    )  # fmt: skip
    copies = types.SimpleNamespace(
        async_load=async_load, async_store=async_store, async_atomic_add=async_atomic_add, store_wait=store_wait
    )  # fmt: skip
    return {
        "mbarrier": barriers, "tma": copies, "async_load": async_load, "async_store": async_store,
        "async_copy_global_to_shared": async_load, "async_copy_shared_to_global": async_store,
        "fence_async_shared": fence_async_shared, "warpgroup_mma": warpgroup_mma,
        "warpgroup_mma_wait": warpgroup_mma_wait, "barrier": lambda: None, "thread_barrier": lambda: None,
    }  # fmt: skip


class _Names:
    """The modules of a kernel's functions with the emulated names in the place of the real ones."""

    def __init__(self, language: _Language, hardware: dict[str, Any]) -> None:
        self._language, self._hardware = language, hardware
        self._modules: dict[int, dict[str, Any]] = {}

    def function(self, kernel: Any) -> Callable[..., Any]:
        function = kernel.fn
        names = self._of_module(function.__globals__)
        return types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)

    def _of_module(self, module: dict[str, Any]) -> dict[str, Any]:
        if id(module) not in self._modules:
            names = self._modules[id(module)] = dict(module)
            for name, each in module.items():
                names[name] = self._emulated(each)
        return self._modules[id(module)]

    def _emulated(self, each: Any) -> Any:
        if isinstance(each, types.ModuleType):
            if each.__name__ in ("triton.language", gl.__name__):
                return self._language
            return {mbarrier: self._hardware["mbarrier"], tma: self._hardware["tma"]}.get(each, each)
        if type(each).__name__ in ("JITFunction", "GluonJITFunction", "InterpretedFunction"):
            return self.function(each)
        if isinstance(each, gl.constexpr):
            return each.value
        if getattr(each, "__triton_builtin__", False):
            return self._hardware.get(each.__name__, each)
        return each


def _argument(given: Any) -> Any:
    """An argument of a launch as kernels get it."""
    if isinstance(given, Tensor):
        return Pointer(given)
    if isinstance(given, TensorDescriptor):
        return Tiles(given)
    if isinstance(given, tuple):
        return type(given)(*map(_argument, given))
    if hasattr(given, "block_m"):  # TileConstants
        return types.SimpleNamespace(**{name: each.value for name, each in vars(given).items()})
    return given


def emulated(order: str) -> Callable[..., None]:
    """A `launch` that runs the programs of a kernel one after the other, the partitions of each in this order."""

    def launch(kernel: Any, programs: int, like: Tensor, tiles: Any, *args: Any, **constants: Any) -> None:  # fmt: skip
        args = tuple(map(_argument, args))
        constants = {name: _argument(each) for name, each in constants.items()}
        added = Added()
        for program in range(programs):
            machine = Machine(order, added)
            names = _Names(_Language(machine, program, programs), _hardware(machine))
            with np.errstate(all="ignore"):
                names.function(kernel)(*args, **constants)
            machine.end()

    return launch
