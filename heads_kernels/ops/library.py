"""The torch library `heads_kernels`: how the ops of the package are defined.

An op has one schema, one implementation, which imports the backend that it runs on, a fake that allocates the same
outputs, and a FLOP formula. All registration is in Python, once for all backends.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from heads_kernels.after_import import after_import
from heads_kernels.backends import find, rows_apart
from heads_kernels.build_info import PACKAGE
from heads_kernels.call import SCHEMA, Call
from heads_kernels.checks import refuse
from heads_kernels.parse import check_op, check_ranks

#: The fields of a `Call` as the arguments of a torch schema.
FIELDS: Final = ", ".join(f"{type} {name}" for name, type in SCHEMA.items())
_COMPILED: Final = ("cpu", "cuda")


def _library() -> torch.library.Library:
    try:
        return torch.library.Library(PACKAGE, "DEF")  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "csrc/bindings/torch.cpp" not in str(error):  # where it was registered before
            raise
        raise ImportError(
            "this process has loaded libheads_kernels.so, which defines the ops of heads_kernels for programs without"
            " Python; import heads_kernels instead, or before it: the package has the same ops."
        ) from error


LIBRARY = _library()


def define_op(
    name: str,
    schema: str,
    implementation: Callable[..., Any],
    flops: Callable[..., int],
) -> Any:
    """Register `heads_kernels::name` and return the callable overload.

    `implementation(runs, *arguments)` allocates the outputs, and fills them if `runs` is True; it is False in a fake.
    """
    tags = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
    LIBRARY.define(name + schema, tags=tags)  # type: ignore[no-untyped-call]
    run, fake = functools.partial(implementation, True), functools.partial(implementation, False)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{PACKAGE}::{name}", fake, lib=LIBRARY)
    packet = getattr(getattr(torch.ops, PACKAGE), name)
    after_import("torch.utils.flop_counter", lambda: _register_flops(packet, flops))
    return packet.default


def _register_flops(packet: Any, flops: Callable[..., int]) -> None:
    """Register a formula with PyTorch's FLOP counter, whose import is slow if Triton is installed."""
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(packet)(flops)


def dense_sizes(shapes: Any) -> tuple[int, int, int]:
    """Number of pairs of all heads, width of scores and width of values, from the shapes of an op's arguments."""
    call: Any = Call(*shapes[: len(Call._fields)])
    B, *heads, T, width = call.query
    H = call.mixing[0] if call.mixing else heads[0]
    return B * H * T * call.key[-2], width, call.value[-1] if call.value else 0


def check_arguments(
    backend: str | None, call: Call, has_value: bool, **saved: Tensor | None
) -> None:
    """Check that the tensors of an op are given and fit each other; `backend` is None in its fake.

    The package's own calls are valid, but users may call an op directly, and a kernel would read past the end of a
    tensor that is too small. The compiled extensions check sizes, strides and dtypes themselves (csrc/bindings/).
    """
    if has_value and call.value is None:
        refuse("value", "is None", "pass a tensor: this op reads it", TypeError)
    if not has_value and call.value is not None:
        refuse("value", "is given", "leave it out: statistics are of scores alone")
    if backend in _COMPILED:
        check_ranks(call, **saved)
        return
    check_op(call, **saved)
    if backend == "triton":  # its kernels compute addresses from these strides
        names = "k_lo", "k_hi", "first_keys", "key_visible", "exclude_keys"
        dense = {name: getattr(call, name) for name in names}
        for name, tensor in {**dense, "lse": saved.get("lse"), "dlse": saved.get("dlse")}.items():
            if tensor is not None and not tensor.is_contiguous():
                refuse(name, "is not contiguous", "copy it")
        for reason in rows_apart(call.query, call.key, call.value, saved.get("attended")):
            raise ValueError(reason)


def check_fields(extension: Any) -> None:
    """Refuse a compiled extension whose fields of a `Call` are not the present ones (csrc/bindings/checks.h)."""
    if extension.call_fields() != FIELDS:
        raise ImportError(
            f"{extension.__name__} was built from other sources than this package: build it again (pip install .)"
        )


@functools.cache
def load(name: str) -> ModuleType:
    """The module of backend `name`, imported the first time an op runs on it."""
    return importlib.import_module(find(name).module)
