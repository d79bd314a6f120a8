"""The torch library `heads_kernels`: how every op of the package is defined.

An op has one schema, one implementation that imports the backend it is to run, a fake that allocates what the
kernel would, and a FLOP formula. Gradients are an `autograd.Function` around the op, in the op's own file.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from heads_kernels.after_import import after_import
from heads_kernels.dispatch import Backend

NAMESPACE = "heads_kernels"


def _library() -> torch.library.Library:
    try:
        return torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
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
    fake: Callable[..., Any],
    flops: Callable[..., int] | None = None,
) -> Any:
    """Register `heads_kernels::name` and return the callable overload."""
    tags = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
    LIBRARY.define(name + schema, tags=tags)  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    packet = getattr(torch.ops.heads_kernels, name)
    if flops is not None:
        after_import("torch.utils.flop_counter", lambda: _register_flops(packet, flops))
    return packet.default


def _register_flops(packet: Any, flops: Callable[..., int]) -> None:
    """Make a formula known to PyTorch's FLOP counter, whose import is slow where Triton is installed."""
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(packet)(flops)


@functools.cache
def load(table: tuple[Backend, ...], name: str) -> ModuleType:
    """The module of backend `name`, imported the first time an op runs on it."""
    for row in table:
        if row.name == name:
            return importlib.import_module(row.module)
    raise ValueError(
        f"backend is {name!r}; use one of {', '.join(repr(row.name) for row in table)}."
    )
