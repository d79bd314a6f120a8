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
from heads_kernels.batch import bias_batches
from heads_kernels.build_info import PACKAGE
from heads_kernels.call import LAYOUTS, SCHEMA, SEED_LENGTH, Call, compute_dtype, layouts_of
from heads_kernels.checks import check_companion, check_device, refuse, shape_of
from heads_kernels.parse import check, check_layout

#: The fields of a `Call` as the arguments of a torch schema.
FIELDS: Final = ", ".join(f"{type} {name}" for name, type in SCHEMA.items())


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


def define_op(name: str, schema: str, implementation: Callable[..., Any], flops: Callable[..., int]) -> Any:
    """Register `heads_kernels::name` and return the callable overload.

    `implementation(runs, *arguments)` allocates the outputs, and fills them if `runs` is True; it is False in a fake.
    """
    tags = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
    LIBRARY.define(name + schema, tags=tags)  # type: ignore[no-untyped-call]
    run, fake = functools.partial(implementation, True), functools.partial(implementation, False)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{PACKAGE}::{name}", fake, lib=LIBRARY)
    packet = getattr(getattr(torch.ops, PACKAGE), name)

    def register_flops() -> None:
        from torch.utils.flop_counter import register_flop_formula  # slow if Triton is installed

        register_flop_formula(packet)(flops)

    after_import("torch.utils.flop_counter", register_flops)
    return packet.default


def dense_sizes(shapes: Any) -> tuple[int, int, int]:
    """Number of pairs of all heads, width of scores and width of values, from the shapes of an op's arguments."""
    call: Any = Call(*shapes[: len(Call._fields)])
    B, *heads, T, width = call.query
    H = call.mixing[0] if call.mixing else heads[0]
    return B * H * T * call.key[-2], width, call.value[-1] if call.value else 0


# ---------------------------------------------------------------------- the arguments of an op
#: The tensors of a call, its seed, and what a backward pass reads besides.
_LAYOUTS: Final = {
    **LAYOUTS,
    "seed": layouts_of("numbers"),
    "dout": layouts_of("B H T Dv"),
    "attended": layouts_of("B H T Dv"),
    "lse": layouts_of("B H T", "parts B H T"),  # of entmax the second
    "dlse": layouts_of("B H T"),
}
_FIXED_SIZES: Final = {"parts": 2, "numbers": SEED_LENGTH}
#: Tensors that kernels read as they are: in the dtype of the query, in that of scores (`compute_dtype`), or in that of
#: `_DTYPES`.
_OF_QUERY: Final = ("key", "value", "dout", "attended")
_OF_SCORES: Final = ("alpha", "row_weights", "lse", "dlse")
_DTYPES: Final = {
    **dict.fromkeys(("k_lo", "k_hi", "first_keys"), torch.int32),
    **dict.fromkeys(("key_visible", "dense_mask", "exclude_keys"), torch.bool),
    "seed": torch.int64,
}
#: The Triton kernels compute addresses from the strides of these.
_CONTIGUOUS: Final = "k_lo", "k_hi", "first_keys", "key_visible", "exclude_keys", "lse", "dlse"


def check_arguments(backend: str | None, call: Call, has_value: bool, **saved: Tensor | None) -> None:
    """Check that the tensors of an op are given and fit each other; `backend` is None in its fake.

    The package's own calls are valid, but users may call an op directly, and a kernel would read past the end of a
    tensor that is too small. The compiled extensions check sizes, strides and dtypes themselves (csrc/bindings/).
    A backward pass reads `dout`, `attended`, `lse` and `dlse` too; `dlse` may be None.
    """
    _check_presence(call, has_value, saved)
    if backend in ("cpu", "cuda"):
        return
    given: dict[str, Any] = {**call._asdict(), **saved}
    check(call)
    if call.dropout_p and call.seed is None:
        refuse("seed", f"is None, but dropout_p is {call.dropout_p}", "pass int64 [5]", TypeError)
    if (call.k_lo is None) != (call.k_hi is None):
        refuse("k_lo", "comes without k_hi, or the other way around", "pass both, or neither")
    if call.first_keys is not None and call.k_lo is None:
        refuse("first_keys", "comes without k_lo and k_hi", "pass these too")
    query = call.query
    sizes = {**call.named_sizes(), **_FIXED_SIZES}
    if call.offset_bias is not None:
        sizes["T+S-1"] = max(call.T + call.S - 1, 1)
    if call.bias is not None and call.bias.dim() == 5:
        outer, inner = bias_batches(call.bias, call.B)
        sizes |= {"B1": outer, "B2": inner if outer * inner == call.B else call.B}
    for name in ("bias", "offset_bias"):
        tensor = given[name]
        if tensor is not None:
            check_companion(name, tensor, query)
            check_layout(name, tensor, _LAYOUTS[name], sizes)
    dtypes = {
        **_DTYPES,
        **dict.fromkeys(_OF_QUERY, query.dtype),
        **dict.fromkeys(_OF_SCORES, compute_dtype(query.dtype)),
    }
    for name, dtype in dtypes.items():
        tensor = given.get(name)
        if tensor is not None:
            check_layout(name, tensor, _LAYOUTS[name], sizes)
            if tensor.dtype != dtype:
                refuse(name, f"has dtype {tensor.dtype}", f"pass {dtype}", TypeError)
            check_device(name, tensor, query.device)
    if backend == "triton":
        for name in _CONTIGUOUS:
            tensor = given.get(name)
            if tensor is not None and not tensor.is_contiguous():
                refuse(name, "is not contiguous", "copy it")
        for reason in rows_apart(query, call.key, call.value, saved.get("attended")):
            raise ValueError(reason)


def _check_presence(call: Call, has_value: bool, saved: dict[str, Tensor | None]) -> None:
    """Check that an op reads the tensors that are given, and that those it needs have the right rank."""
    unread = ("exclude_keys", "row_weights") if has_value else ("value", "gate", "alpha", "seed")
    if call.alpha is not None:
        unread = ("mixing", "sinks", *unread)
    for name in unread:
        if getattr(call, name) is not None:
            refuse(name, "is given", "leave it out: this op does not read it")
    ranks = {"query": 4, "key": 4} if call.mixing is None else {"query": 3, "key": 3, "mixing": 2}
    if has_value:
        ranks["value"] = 4
    for name in saved:
        ranks[name] = 4 if name in _OF_QUERY or (name == "lse" and call.alpha is not None) else 3
    for name, rank in ranks.items():
        tensor = saved[name] if name in saved else getattr(call, name)
        if tensor is None and name != "dlse":
            refuse(name, "is None", "pass a tensor: this op reads it", TypeError)
        if tensor is not None and tensor.dim() != rank:
            refuse(name, f"has shape {shape_of(tensor)}", f"pass {rank} dimensions")


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
