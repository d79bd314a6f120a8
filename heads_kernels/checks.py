"""Checks of arguments; each error names the argument, its value and what would work."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NoReturn, TypeGuard, get_args

import torch
from torch import Tensor
from torch.nn import functional

GateActivation = Literal["identity", "sigmoid", "softplus"]
GATE_ACTIVATIONS: Final[tuple[GateActivation, ...]] = get_args(GateActivation)
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FLOATING: Final = "pass a tensor of float32, bfloat16, float16 or float64"

#: Most rows or keys: the last rows of a tile, fewer than 1024 more, plus `UNBOUNDED` (mask/intervals.py) fit int32.
MAX_LENGTH: Final = (1 << 30) - 1024
#: Batches and heads are int32 in the kernels.
_MAX_COUNT: Final = (1 << 31) - 1


def refuse(argument: str, was: str, instead: str, kind: type[Exception] = ValueError) -> NoReturn:
    """Raise `kind` with the message "`argument` `was`; `instead`."."""
    raise kind(f"{argument} {was}; {instead}.")


def refuse_type(argument: str, value: object, instead: str) -> NoReturn:
    """Raise a TypeError with the message "`argument` is a (type of `value`); `instead`."."""
    refuse(argument, f"is a {type(value).__name__}", instead, TypeError)


def is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def as_int(value: Any) -> int | None:
    """An int, or what is one in NumPy or torch; None for others, and for bools, which are of a mask."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # of a float; of a tensor on the meta device
        return None


def check_heads(heads: Iterable[Any], count: int, argument: str, there: str) -> list[int]:
    """Numbers of heads, in [0, count); errors end with `there`, what the heads are."""
    found = []
    for head in heads:
        number = as_int(head)
        if number is None:
            refuse(argument, f"has {head!r}", f"pass integers; {there}", TypeError)
        if not 0 <= number < count:
            refuse(argument, f"has head {number}", there)
        found.append(number)
    return found


def is_any_int(value: object) -> bool:
    """Also the symbolic ones of `torch.compile`."""
    return is_int(value) or isinstance(value, torch.SymInt)


def check_int(argument: str, value: Any, instead: str = "pass an int") -> int:
    """An int, or a symbolic one."""
    if not is_any_int(value):
        refuse_type(argument, value, instead)
    return value  # type: ignore[no-any-return]


def is_real(value: object) -> TypeGuard[float]:
    """Whether it is a finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max


def check_size(argument: str, size: object, least: int = 1) -> int:
    instead = f"pass an int of at least {least}"
    if not is_int(size):
        refuse_type(argument, size, instead)
    if size < least:
        refuse(argument, f"is {shown(size)}", instead)
    return size


def check_rows(rows: object) -> None:
    """Check that `rows` is a slice without a step."""
    if isinstance(rows, slice) and rows.step in (None, 1):
        ends = [each for each in (rows.start, rows.stop) if each is not None]
        if all(as_int(each) is not None for each in ends):
            return
    refuse("rows", f"is {rows!r}", "pass a slice of ints without a step", TypeError)


def check_choice(argument: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        refuse(argument, f"is {value!r}", f"use one of {', '.join(map(repr, choices))}")


def check_tensor(
    argument: str,
    tensor: object,
    instead: str = _FLOATING,
    ranks: Sequence[int] | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> Tensor:
    """A strided tensor, not a sparse or nested one, of one of these ranks and dtypes."""
    if not isinstance(tensor, Tensor):
        refuse_type(argument, tensor, instead)
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        packed = " (packed sequences: hk.Mask.from_cu_seqlens)" if tensor.is_nested else ""
        refuse(argument, f"has layout {layout}", f"{instead}, dense{packed}")
    if tensor.dtype not in dtypes:
        refuse(argument, f"has dtype {tensor.dtype}", instead, TypeError)
    if ranks is not None and tensor.dim() not in ranks:
        refuse(argument, f"has shape {shape_of(tensor)}", instead)
    return tensor


def check_device(argument: str, tensor: Tensor, device: torch.device | str) -> None:
    """Check that `tensor` is on the device of the query; "cuda" is any GPU."""
    if tensor.device == device:
        return
    wanted = torch.device(device)
    indices = {tensor.device.index, wanted.index} - {None}
    if tensor.device.type != wanted.type or len(indices) > 1:
        refuse(argument, f"is on {tensor.device}, but query is on {wanted}", "move it there once, before the call")


def broadcasts(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a tensor of as many dimensions has these sizes, or 1."""
    return len(shape) == len(sizes) and all(got in (1, want) for got, want in zip(shape, sizes, strict=True))


def check_broadcast(argument: str, tensor: Tensor, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of a tensor that broadcasts to `sizes`, those of the scores, with ones for the dimensions it lacks."""
    shape = (1,) * (len(sizes) - tensor.dim()) + tuple(tensor.shape)
    if not broadcasts(shape, sizes):
        instead = "pass a tensor that broadcasts to them"
        if argument == "attn_mask" and tensor.shape == (sizes[0], sizes[-1]):
            instead = "2-D is [T, S]; pass a padding mask [B, S] as hk.Mask(key_mask=...)"
        elif argument == "attn_mask" and tensor.is_floating_point():
            instead += ": a float mask is added to scores; pass factors of heads as gate="
        refuse(argument, f"has shape {shape_of(tensor)}, but scores are {list(sizes)}", instead)
    return shape


def shape_of(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def shown(number: object) -> str:
    """A number as messages show it: long ones by their order of magnitude."""
    if is_int(number) and number.bit_length() > 64:
        return f"about {'-' if number < 0 else ''}2**{number.bit_length() - 1}"
    return str(number)


#: torch's `context_parallel` replaces the function while it is active.
_STOCK_ATTENTION: Final = functional.scaled_dot_product_attention


def check_whole_sequence() -> None:
    """Refuse a call inside torch's `context_parallel`, which splits sequences: it would attend within one part only.

    When compiled, the comparison is a guard: a graph compiled outside of `context_parallel` does not run inside it.
    """
    if functional.scaled_dot_product_attention is not _STOCK_ATTENTION and _is_split():
        was = "is a part of a sequence, inside torch's context_parallel"
        instead = "call the operator outside of it: it would attend within that part only"
        refuse("query", was, instead)


def _is_split() -> bool:
    """Whether `context_parallel` has replaced the function."""
    module = functional.scaled_dot_product_attention.__module__
    return isinstance(module, str) and module.startswith("torch.distributed")


# What `torch.compiler.assume_constant_result` does; calling it would load Dynamo, which takes two seconds.
_is_split._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_operands(*operands: object) -> None:
    """Check that `query`, `key` and perhaps `value` are tensors of one supported dtype on one device."""
    query: Any = operands[0]
    for name, operand in zip(("query", "key", "value"), operands, strict=False):
        tensor = check_tensor(name, operand)
        if tensor.dtype != query.dtype:
            refuse(name, f"has dtype {tensor.dtype}, but query has {query.dtype}", "cast them to one dtype", TypeError)
        check_device(name, tensor, query.device)


def check_sizes(B: int, H: int, T: int, S: int) -> None:
    """Rows, keys, heads and batches fit int32, which the kernels use for them."""
    are_int = type(T) is type(S) is type(H) is type(B) is int
    if are_int and T <= MAX_LENGTH and S <= MAX_LENGTH and H <= _MAX_COUNT and B <= _MAX_COUNT:
        return
    for name, letter, size in zip(("query", "key", "query", "query"), "TSHB", (T, S, H, B), strict=True):
        most = MAX_LENGTH if letter in "TS" else _MAX_COUNT
        if is_int(size) and size > most:  # symbolic sizes are checked when the op runs
            refuse(name, f"has {letter} = {size}", f"split the call: {letter} is at most {most}")


def check_companion(name: str, tensor: Tensor, query: Tensor) -> None:
    """Check that `tensor` is dense, of a floating dtype and on the device of `query`."""
    check_tensor(name, tensor)
    check_device(name, tensor, query.device)


def check_number(argument: str, value: Any, least: float, most: float, instead: str) -> float:
    """An int or a float in [least, most], also a symbolic one of `torch.compile`, as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat)):
        refuse_type(argument, value, instead)
    if not least <= value <= most:
        refuse(argument, f"is {shown(value)}", instead)
    return float(value)


def check_dropout(dropout_p: float, argument: str = "dropout_p") -> float:
    if type(dropout_p) is float and 0.0 <= dropout_p < 1.0:  # as nearly always
        return dropout_p
    return check_number(argument, dropout_p, 0.0, math.nextafter(1.0, 0.0), "pass a float: a probability in [0, 1)")


def _scales(dtype: torch.dtype) -> tuple[float, str]:
    """The largest scale of scores in a dtype, and what to pass."""
    most = torch.finfo(dtype).max / 2  # kernels multiply it by log2(e) = 1.44
    return most, f"pass a finite float (scale.item()) of at most {most:.1e}, for scores are {dtype}, or None"


_SCALES: Final = {dtype: _scales(dtype) for dtype in (torch.float32, torch.float64)}


def check_scale(scale: float | None, width: float, dtype: torch.dtype = torch.float64) -> float:
    """`scale` as a float that the compute dtype for `dtype` can hold; None gives `width ** -0.5`."""
    if scale is None:
        return float(width) ** -0.5 if width else 1.0
    most, instead = _SCALES[torch.float64 if dtype == torch.float64 else torch.float32]
    return check_number("scale", scale, -most, most, instead)


#: Kernels divide by the cap, and multiply it by log2(e).
_LEAST_CAP: Final = torch.finfo(torch.float32).smallest_normal
_MOST_CAP: Final = torch.finfo(torch.float32).max / 2
_CAPS: Final = f"pass a float from {_LEAST_CAP:.1e} to {_MOST_CAP:.1e}, or None"


def check_softcap(softcap: float | None) -> float:
    """`softcap` as a float; 0 for None."""
    return 0.0 if softcap is None else check_number("softcap", softcap, _LEAST_CAP, _MOST_CAP, _CAPS)


def check_alpha(alpha: float | Tensor | None, query: Tensor, H: int, dtype: torch.dtype) -> Tensor:
    """`alpha` as `[H]` in `dtype`. The backend checks the values of tensors: reading them may synchronise."""
    if isinstance(alpha, Tensor):
        check_companion("alpha", alpha, query)
        if alpha.shape != (H,):
            refuse("alpha", f"has shape {shape_of(alpha)}", f"pass a number, or [H] = [{H}]")
        return alpha.to(dtype).contiguous()
    instead = "pass a tensor [H], or a number in (1, 2] that the compute dtype tells from 1: 2 is sparsemax"
    number = check_number("alpha", alpha, 1 + torch.finfo(dtype).eps, 2, instead)
    return torch.full((H,), number, dtype=dtype, device=query.device)


def check_flag(name: str, flag: bool) -> None:
    if not isinstance(flag, bool):
        refuse_type(name, flag, "pass True or False")


def check_row_weights(
    received: bool | Tensor | None, query: Tensor, sizes: tuple[int, ...], dtype: torch.dtype
) -> Tensor | None:
    """The weights of rows that `received` asks for, with as many dimensions as `sizes` (*batch, H, T), in `dtype`."""
    if received is None or received is False:
        return None
    if received is True:
        return torch.ones((1,) * len(sizes), dtype=dtype, device=query.device)
    instead = f"pass True, or float weights of rows that broadcast to [..., H, T] = {list(sizes)}"
    received = check_tensor("received", received, instead, range(len(sizes) + 1))
    check_device("received", received, query.device)
    shape = (*(1,) * (len(sizes) - received.dim()), *received.shape)
    if not broadcasts(shape, sizes):
        refuse("received", f"has shape {shape_of(received)}", instead)
    return received.detach().reshape(shape).to(dtype)


def check_excluded(exclude_keys: Tensor | None, query: Tensor, sizes: tuple[int, int]) -> Tensor | None:
    """`exclude_keys` for sizes (B, S) as a contiguous `[B or 1, S]`."""
    if exclude_keys is None:
        return None
    B, S = sizes
    instead = f"pass bool [S] = [{S}] or [B, S] = [{B}, {S}], True for the keys to exclude"
    check_tensor("exclude_keys", exclude_keys, instead, (1, 2), (torch.bool,))
    *batch, keys = exclude_keys.shape
    if keys != S or (batch and batch[0] not in (1, B)):
        refuse("exclude_keys", f"has shape {shape_of(exclude_keys)}", instead)
    check_device("exclude_keys", exclude_keys, query.device)
    return (exclude_keys if batch else exclude_keys[None]).contiguous()
