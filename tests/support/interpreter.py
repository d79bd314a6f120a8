"""Triton's interpreter as the tests use it: corrections of what is wrong or slow in Triton 3.6 to 3.9.

It runs kernels on CPU tensors in NumPy, one program after another, in processes that were started
with TRITON_INTERPRET=1. It shows wrong numbers and wrong addresses; races it cannot show.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def correct() -> None:
    """Replace the parts below in this process; once, before a kernel runs."""
    interpreter._convert_float = _rounding_to_bfloat16(interpreter._convert_float)
    interpreter.InterpreterBuilder.create_dot = _widening(interpreter.InterpreterBuilder.create_dot)
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    tl.block_type.__init__ = _checked_once(tl.block_type.__init__)
    tl.tensor.__init__ = _with_shape_of_type(tl.tensor.__init__)
    # Looks for int32 overflow, which these sizes cannot have, at a sixth of the time.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter.GridExecutor.__call__ = _without_warnings(interpreter.GridExecutor.__call__)


def _wide(bits: np.ndarray) -> np.ndarray:
    """float32 of bfloat16, which the interpreter holds as its bits in uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _nearest(values: np.ndarray) -> np.ndarray:
    """The bits of float32 `values` in bfloat16, rounded to nearest even."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _rounding_to_bfloat16(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Casts to bfloat16 that round to nearest, as GPUs do: the interpreter's cut the bits off."""

    def call(values: np.ndarray, source: Any, target: Any, *rest: Any) -> np.ndarray:
        if (source, target) == (tl.float32, tl.bfloat16):
            return _nearest(values)
        if (source, target) == (tl.bfloat16, tl.float32):
            return _wide(values)
        result: np.ndarray = convert(values, source, target, *rest)
        return result

    return call


def _widening(create_dot: Callable[..., Any]) -> Callable[..., Any]:
    """`tl.dot` of bfloat16 operands, whose bits it multiplies as integers."""

    def widened(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(_wide(handle.data), tl.float32)

    def create(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(builder, widened(a), widened(b), *rest)

    return create


def _once_a_launch(patch_lang: Callable[..., Any]) -> Callable[..., Any]:
    """`triton.language` is patched again at every call of one kernel function by another: two thirds of the time.

    Where both of its modules are patched already there is nothing to do, and nothing to restore.
    """

    def patch(function: Any) -> Any:
        if tl.core.is_builtin(tl.full) or tl.core.is_builtin(tl.core.full):
            return patch_lang(function)
        return interpreter._LangPatchScope()

    return patch


def _remembered(numpy_dtype: Callable[..., np.dtype]) -> Callable[..., np.dtype]:
    """NumPy's dtype of one of Triton's: its table is made anew at every call, a tenth of the time."""
    known = functools.cache(numpy_dtype)

    def call(dtype: tl.dtype) -> np.dtype:
        return np.dtype(np.uint64) if dtype.scalar.is_ptr() else known(dtype.scalar)

    return call


def _checked_once(initialize: Callable[..., None]) -> Callable[..., None]:
    """Types of tiles: each is made thousands of times, and its shape is checked and named again each time."""
    known: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def call(tile: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is tl.constexpr else size for size in shape])
        key = element_ty.name, sizes
        if key in known:
            tile.__dict__.update(known[key], element_ty=element_ty)
            return
        initialize(tile, element_ty, shape)
        known[key] = dict(vars(tile))

    return call


def _with_shape_of_type(initialize: Callable[..., None]) -> Callable[..., None]:
    """Values: the shape of one is that of its type, as constants that are made anew for each value."""
    known: dict[tuple[int, ...], dict[str, Any]] = {}

    def call(value: tl.tensor, handle: Any, kind: tl.dtype) -> None:
        sizes = tuple(kind.shape.values) if type(kind) is tl.block_type else ()
        if sizes in known:
            value.__dict__.update(known[sizes], handle=handle, type=kind, dtype=kind.scalar)
            return
        initialize(value, handle, kind)
        known[sizes] = {"shape": value.shape, "numel": value.numel}

    return call


def _without_warnings(execute: Callable[..., Any]) -> Callable[..., Any]:
    """NumPy warns of infinities and NaN, values as others to a kernel, and of what Triton 3.6 calls in it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            for category in (RuntimeWarning, DeprecationWarning):
                warnings.simplefilter("ignore", category)
            return execute(*args, **kwargs)

    return call
