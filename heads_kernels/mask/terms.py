"""The terms of a mask, and what its arguments may be: their types, ranks and, where they can be read, their values.

A new kind of mask is one `Term` here and one line in `Mask.__init__`; no kernel changes. Nothing here waits for the
device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import torch
from torch import Tensor

from heads_kernels.checks import (
    MAX_LENGTH,
    check_broadcast,
    check_device,
    check_tensor,
    is_any_int,
    is_int,
    refuse,
    shown,
)
from heads_kernels.dtensor import is_sharded
from heads_kernels.mask.intervals import UNBOUNDED, Device, Intervals
from heads_kernels.mask.kept import distances_on, lengths_on, readable

Alignment = Literal["upper_left", "lower_right"]


class Term(ABC):
    """One condition that hides keys: a frozen dataclass of tensors, strings, tuples of integers and None.

    `argument` is its name in errors and `repr`.
    """

    argument: str
    __match_args__: ClassVar[tuple[str, ...]]  # the names of its fields, which dataclasses fill in

    @abstractmethod
    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        """The `Intervals` of this term for a call of these sizes; raises ValueError if it does not fit them.

        Bounds may have any integer dtype and sizes `[B or 1, H or 1, T or 1]`, and `k_lo` may be None for 0:
        `Intervals.laid_out` comes later. int32 bounds share no memory with tensors of the caller.
        """

    def values(self) -> list[Any]:
        """The values of its fields, in order."""
        return [getattr(self, name) for name in self.__match_args__]

    def __str__(self) -> str:
        fields = [getattr(self, name) for name in self.__match_args__ if name != "argument"]
        return f"{self.argument}={' '.join(_describe(each) for each in fields if each is not None)}"


@dataclass(frozen=True, eq=False)
class Causal(Term):
    """Row i sees keys `<= i` (upper_left) or `<= i + S - T` (lower_right)."""

    align: Alignment
    argument: str = "causal"

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        return Intervals(band_hi=_offset(self.align, T, S) + 1)


@dataclass(frozen=True, eq=False)
class Window(Term):
    """Row i sees keys `i - left` to `i + right`, inclusive; -1: unlimited. Aligned like `Causal`."""

    sides: tuple[int, int]
    align: Alignment
    argument: str = "window"

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        (left, right), offset = self.sides, _offset(self.align, T, S)
        return Intervals(
            band_lo=-UNBOUNDED if left == -1 else _within(offset - left),
            band_hi=UNBOUNDED if right == -1 else _within(offset + right + 1),
        )


@dataclass(frozen=True, eq=False)
class HeadWindows(Term):
    """A `Window` for each head, `[H or 1, 2]`, whose left side does not hide keys `< first_keys[h]`; None: no key."""

    sides: Tensor | tuple[tuple[int, int], ...]
    first_keys: Tensor | tuple[int, ...] | None
    align: Alignment
    argument: str = "window"

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        sides = _of_heads(self.argument, self.sides, H, device).clamp(-1, UNBOUNDED)
        left, right = sides.reshape(-1, 2, 1).unbind(1)  # [H or 1, 1]
        i = torch.arange(T, device=device) + _offset(self.align, T, S)
        k_lo = torch.where(left < 0, 0, i - left)
        k_hi = torch.where(right < 0, S, i + right + 1)
        first = self.first_keys
        if first is not None:
            first = _of_heads("first_keys", first, H, device).clamp(0, S).to(torch.int32)
        return Intervals(k_lo=k_lo.clamp(0, S)[None], k_hi=k_hi.clamp(0, S)[None], first_keys=first)


@dataclass(frozen=True, eq=False)
class Prefix(Term):
    """Prefix-LM: row i sees keys `< max(i + offset + 1, lengths[b])`, causal or in the prefix."""

    lengths: Tensor | tuple[int, ...]
    align: Alignment
    argument: str = "prefix_lengths"

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        lengths = _lengths(self.argument, self.lengths, B, S, "S", device)
        causal = torch.arange(T, device=device) + (_offset(self.align, T, S) + 1)
        return Intervals(k_hi=torch.maximum(causal, lengths).clamp(0, S))


@dataclass(frozen=True, eq=False)
class KeyLengths(Term):
    """Keys `>= lengths[b]` are hidden."""

    lengths: Tensor | tuple[int, ...]
    argument: str = "key_lengths"

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        return Intervals(k_hi=_lengths(self.argument, self.lengths, B, S, "S", device))


@dataclass(frozen=True, eq=False)
class QueryLengths(Term):
    """Rows `>= lengths[b]` see no key."""

    lengths: Tensor | tuple[int, ...]
    argument: str = "query_lengths"

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        lengths = _lengths(self.argument, self.lengths, B, T, "T", device)
        return Intervals(k_hi=(torch.arange(T, device=device) < lengths) * S)


@dataclass(frozen=True, eq=False)
class KeyMask(Term):
    """Keys where `real` is False are hidden; the interval is the span of those where it is True."""

    real: Tensor
    argument: str = "key_mask"

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        _check_rows(self.argument, self.real, B, S, "S", device)
        if S == 0:  # no key to take a maximum over, and none to hide
            return Intervals()
        distances = distances_on(torch.device(device), S)
        # [B or 1, 1, T] each, a view of [B or 1, 1, 1]; 0 if all are hidden
        spans = (self.real * distances).amax(2, keepdim=True)[..., None]
        from_end, end = spans.expand(-1, -1, -1, T).unbind()
        return Intervals(k_lo=S - from_end, k_hi=end, key_visible=self.real.contiguous())


@dataclass(frozen=True, eq=False)
class QueryMask(Term):
    """Rows where `real` is False see no key."""

    real: Tensor
    argument: str = "query_mask"

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        _check_rows(self.argument, self.real, B, T, "T", device)
        return Intervals(k_hi=torch.where(self.real, S, 0).unsqueeze(1))


@dataclass(frozen=True, eq=False)
class Documents(Term):
    """Row i sees the keys with its own id. Key ids ascend; None: those of the queries."""

    query_ids: Tensor
    key_ids: Tensor | None = None
    argument: str = "document_ids"

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        if self.key_ids is None and T != S:
            refuse(self.argument, f"is one tensor, but T is {T} and S is {S}", "pass a pair (query_ids, key_ids)")
        queries, keys = self.query_ids, self.query_ids if self.key_ids is None else self.key_ids
        dtype = torch.promote_types(queries.dtype, keys.dtype)
        queries, keys = torch.atleast_2d(queries.to(dtype), keys.to(dtype))  # type: ignore[no-untyped-call]
        _check_rows(self.argument, queries, B, T, "T", device)
        _check_rows(self.argument, keys, B, S, "S", device)
        if queries.shape[0] != keys.shape[0]:
            queries, keys = queries.expand(B, -1), keys.expand(B, -1)
        queries, keys = queries.contiguous(), keys.contiguous()
        return Intervals(
            k_lo=torch.searchsorted(keys, queries, out_int32=True)[:, None],
            k_hi=torch.searchsorted(keys, queries, out_int32=True, right=True)[:, None],
        )


@dataclass(frozen=True, eq=False)
class Dense(Term):
    """Pairs where `visible`, `[B|1, H|1, T|1, S|1]`, is False are hidden."""

    visible: Tensor
    argument: str = "attn_mask"

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        check_broadcast(self.argument, self.visible, (B, H, T, S))
        check_device(self.argument, self.visible, device)
        return Intervals(dense_mask=self.visible)


@dataclass(frozen=True, eq=False)
class Bounds(Term):
    """`k_lo`, `k_hi` `[B or 1, H or 1, T]` and `first_keys` `[H or 1]` of `Intervals`."""

    k_lo: Tensor
    k_hi: Tensor
    first_keys: Tensor | None = None
    argument: str = "rows"

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        batch, heads, rows = self.k_lo.shape
        if heads == 1 and self.first_keys is not None:
            heads = self.first_keys.shape[0]
        if batch not in (1, B) or heads not in (1, H) or rows != T:
            was = f"has shape {[batch, heads, rows]}, but B is {B}, H is {H} and T is {T}"
            refuse(self.argument, was, "call it with as many batches, heads and positions")
        check_device(self.argument, self.k_lo, device)
        k_lo, k_hi = self.k_lo.clamp(0, S), self.k_hi.clamp(0, S)
        return Intervals(k_lo=k_lo, k_hi=k_hi, first_keys=self.first_keys)


def _offset(align: Alignment, T: int, S: int) -> int:
    """The key that row 0 is aligned with."""
    return 0 if align == "upper_left" else S - T


def _within(limit: int) -> int:
    """`limit` clamped to +/- `UNBOUNDED`, which means the same and fits int32; symbolic limits are unchanged."""
    return max(-UNBOUNDED, min(limit, UNBOUNDED)) if is_int(limit) else limit


def _describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    where = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{where}"


# ---------------------------------------------------------------------- checks against a call
def _check_rows(argument: str, tensor: Tensor, B: int, size: int, letter: str, device: Device) -> None:
    """Check that `tensor` is `[B or 1, size]` on `device`."""
    batch, width = tensor.shape
    if (batch != 1 and batch != B) or width != size:
        was = f"has shape {list(tensor.shape)}, but B is {B} and {letter} is {size}"
        refuse(argument, was, f"pass [{B} or 1, {size}]")
    check_device(argument, tensor, device)


def _of_heads(
    argument: str, given: Tensor | tuple[int, ...] | tuple[tuple[int, int], ...], H: int, device: Device
) -> Tensor:
    """Numbers of heads, `[H or 1]` or more, as int64 on `device`."""
    if len(given) not in (1, H):
        refuse(argument, f"is of {len(given)} heads, but H is {H}", f"pass {H}, or one for all heads")
    if isinstance(given, Tensor):
        check_device(argument, given, device)
        return given.to(torch.int64)
    flat = tuple(n for each in given for n in (each if isinstance(each, tuple) else (each,)))
    return lengths_on(torch.device(device), flat)


def _lengths(
    argument: str, lengths: Tensor | tuple[int, ...], B: int, limit: int, letter: str, device: Device
) -> Tensor:
    """`lengths` as integers `[B or 1, 1, 1]` on `device`, within [0, limit]."""
    count = lengths.shape[0] if isinstance(lengths, Tensor) else len(lengths)
    if count != 1 and count != B:
        refuse(argument, f"holds {count} lengths, but B is {B}", f"pass {B}, or 1 for all")
    values: Sequence[int] = ()
    if isinstance(lengths, Tensor):
        check_device(argument, lengths, device)
        values = lengths.tolist() if readable(lengths) else ()
    else:
        values = () if torch.compiler.is_compiling() else lengths
        lengths = lengths_on(torch.device(device), lengths)
    lengths = lengths.to(torch.int64)
    if not values:
        lengths = lengths.clamp(0, limit)
    elif not 0 <= min(values) <= max(values) <= limit:
        refuse(argument, f"is {list(values)}", f"lengths go from 0 to {letter} = {limit}")
    return lengths[:, None, None]


# ---------------------------------------------------------------------- the arguments of `Mask`
#: Dtypes of integers.
INTEGERS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def parse_tensor(
    argument: str, tensor: object, dtypes: Sequence[torch.dtype], ranks: Sequence[int], instead: str
) -> Tensor:
    if is_sharded(tensor):
        whole = "pass full_tensor(): masks are those of the whole call"
        refuse(argument, "is a DTensor", whole, TypeError)
    return check_tensor(argument, tensor, instead, ranks, dtypes)


def parse_causal(causal: object) -> Alignment | None:
    if causal is True or causal == "upper_left":
        return "upper_left"
    if causal == "lower_right":
        return "lower_right"
    if causal is not False:
        refuse("causal", f"is {causal!r}", "use False, True (= 'upper_left') or 'lower_right'")
    return None


def parse_window(window: object) -> tuple[int, int]:
    instead = "pass (left, right), inclusive counts of keys on either side, -1 = unlimited,"
    instead += " or one for each head: a list of H such pairs or an integer tensor [H, 2]"
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        refuse("window", f"is {window!r}", instead)
    if not all(map(is_any_int, window)):
        refuse("window", f"is {window!r}", instead, TypeError)
    left, right = window
    if left < -1 or right < -1:
        refuse("window", f"is {window!r}", instead)
    return (-1 if left >= UNBOUNDED else left), (-1 if right >= UNBOUNDED else right)


def parse_windows(window: object, first_keys: object, align: Alignment) -> Term:
    sides: Tensor | tuple[tuple[int, int], ...]
    if isinstance(window, Tensor):
        layout = "pass (left, right), or one for each head as an integer tensor [H, 2]"
        sides = parse_tensor("window", window, INTEGERS, (2,), layout)
        if sides.shape[1] != 2:
            refuse("window", f"has shape {list(sides.shape)}", layout)
        if readable(sides) and sides.numel() and int(sides.min()) < -1:
            refuse("window", f"has {int(sides.min())}", "-1 is unlimited")
    elif isinstance(window, (tuple, list)) and any(isinstance(each, (tuple, list)) for each in window):
        sides = tuple(map(parse_window, window))
    elif first_keys is None:
        return Window(parse_window(window), align)
    else:
        sides = (parse_window(window),)
    return HeadWindows(sides, parse_first_keys(first_keys), align)


def parse_first_keys(first_keys: object) -> Tensor | tuple[int, ...] | None:
    if first_keys is None:
        return None
    instead = "pass an int, or one for each head: a list of H ints or an integer tensor [H]"
    given = (first_keys,) if is_any_int(first_keys) else first_keys
    counts = _parse_integers("first_keys", given, instead)
    if isinstance(counts, Tensor):
        if readable(counts) and counts.numel() and int(counts.min()) < 0:
            refuse("first_keys", f"has {int(counts.min())}", instead)
    elif any(is_int(count) and not 0 <= count <= UNBOUNDED for count in counts):
        refuse("first_keys", f"is {first_keys!r}", "counts go from 0 to S")
    return counts


def parse_lengths(argument: str, given: object) -> Tensor | tuple[int, ...]:
    lengths = _parse_integers(argument, given, "pass an integer tensor [B] or a list of B ints")
    for length in () if isinstance(lengths, Tensor) else lengths:
        if is_int(length) and abs(length) > MAX_LENGTH:
            refuse(argument, f"has {shown(length)}", f"lengths go from 0 to T or S, at most {MAX_LENGTH}")
    return lengths


def _parse_integers(argument: str, given: object, instead: str) -> Tensor | tuple[int, ...]:
    if not isinstance(given, (tuple, list)):
        return parse_tensor(argument, given, INTEGERS, (1,), instead)
    if not all(map(is_any_int, given)):
        refuse(argument, f"is {given!r}", instead, TypeError)
    return tuple(given)


def parse_documents(document_ids: object) -> Documents:
    instead = "pass an integer tensor [S] or [B, S], or a pair (query_ids, key_ids)"
    given = document_ids if isinstance(document_ids, (tuple, list)) else (document_ids,)
    if isinstance(document_ids, (tuple, list)) and len(given) != 2:
        refuse("document_ids", f"has {len(given)} parts", instead)
    ids = [parse_tensor("document_ids", each, INTEGERS, (1, 2), instead) for each in given]
    keys = ids[-1]
    if readable(keys) and not bool((keys[..., 1:] >= keys[..., :-1]).all()):
        refuse("document_ids", "does not ascend along the keys", "number the documents in the order of their keys")
    return Documents(ids[0], ids[1] if len(ids) == 2 else None)
