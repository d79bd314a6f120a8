"""Masks are data: which keys every query row may see, as one half-open interval per row.

    Mask       what a caller writes: a tuple of terms, one for each argument, ANDed
    Term       one reason to hide keys; it gives its `Intervals` and knows nothing of kernels
    Intervals  what kernels read: two integers, two int32 vectors, one byte a key, or a dense mask

A new mask is one small `Term` and one line in `Mask.__init__`; no kernel changes. Nothing here
waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor

#: A band limit that limits nothing: larger than any T or S, and twice it still fits int32.
UNBOUNDED: Final = 1 << 30

Alignment = Literal["upper_left", "lower_right"]
Device = torch.device | str


# ---------------------------------------------------------------------- what kernels read
@dataclass(frozen=True, eq=False)
class Intervals:
    """The pair (query row i, key j) of batch b is visible when every part that is present says so.

    band_lo, band_hi  integers: `i + band_lo <= j < i + band_hi`; unlimited: -/+ `UNBOUNDED`
    k_lo, k_hi        int32 `[B or 1, T]`, contiguous, within [0, S], both or none:
                      `k_lo[b, i] <= j < k_hi[b, i]`; a row with `k_lo >= k_hi` sees nothing
    key_visible       bool `[B or 1, S]`, contiguous: False hides key j from every row
    dense             bool `[B|1, H|1, T|1, S|1]`: False hides the pair; only `eager` reads it
    """

    band_lo: int = -UNBOUNDED
    band_hi: int = UNBOUNDED
    k_lo: Tensor | None = None
    k_hi: Tensor | None = None
    key_visible: Tensor | None = None
    dense: Tensor | None = None

    def __and__(self, other: Intervals) -> Intervals:
        """The pairs that both let through."""
        return Intervals(
            band_lo=_larger(self.band_lo, other.band_lo),
            band_hi=_smaller(self.band_hi, other.band_hi),
            k_lo=_both(torch.maximum, self.k_lo, other.k_lo),
            k_hi=_both(torch.minimum, self.k_hi, other.k_hi),
            key_visible=_both(torch.logical_and, self.key_visible, other.key_visible),
            dense=_both(torch.logical_and, self.dense, other.dense),
        )

    @property
    def device(self) -> torch.device:
        """Where its tensors are; the CPU when it has none."""
        return _device_of((self.k_lo, self.key_visible, self.dense))

    def to_dense(self, T: int, S: int, device: Device | None = None) -> Tensor:
        """The same as a bool tensor `[B or 1, H or 1, T, S]`, True = visible."""
        device = self.device if device is None else device
        i = torch.arange(T, device=device)[:, None]  # [T, 1]
        j = torch.arange(S, device=device)  # [S]
        visible = ((j >= i + self.band_lo) & (j < i + self.band_hi))[None, None]  # [1, 1, T, S]
        if self.k_lo is not None and self.k_hi is not None:
            k_lo, k_hi = self.k_lo[:, None, :, None], self.k_hi[:, None, :, None]
            visible = visible & (j >= k_lo) & (j < k_hi)
        if self.key_visible is not None:
            visible = visible & self.key_visible[:, None, None, :]
        return visible if self.dense is None else visible & self.dense

    def visible_pairs(self, B: int, T: int, S: int) -> Tensor:
        """Number of visible pairs (i, j) in every batch, exact: int64 `[B]`, on `self.device`.

        It is `to_dense(T, S).sum((1, 2, 3))` spread over B: a `dense` part that tells heads apart
        counts the pairs of all of them. Without one, memory is O(B (T + S)).
        """
        if self.dense is not None:
            return self.to_dense(T, S).sum((1, 2, 3)).expand(B)
        i = torch.arange(T, device=self.device)[None]  # [1, T]
        lo, hi = i + self.band_lo, i + self.band_hi
        if self.k_lo is not None and self.k_hi is not None:
            lo, hi = torch.maximum(lo, self.k_lo), torch.minimum(hi, self.k_hi)
        lo = lo.clamp(0, S)  # [B or 1, T]
        hi = torch.maximum(hi.clamp(0, S), lo)
        if self.key_visible is None:
            return (hi - lo).sum(1).expand(B)
        # before[b, j]: visible keys left of key j, [B, S + 1]
        before = torch.nn.functional.pad(self.key_visible.cumsum(1), (1, 0)).expand(B, -1)
        lo, hi = lo.expand(B, -1), hi.expand(B, -1)
        return (before.gather(1, hi) - before.gather(1, lo)).sum(1)


# Comparing symbolic sizes would fix their order for good under torch.export; sym_max does not.
_sym_max: Final[Callable[[int, int], int]] = torch.sym_max
_sym_min: Final[Callable[[int, int], int]] = torch.sym_min


def _larger(a: int, b: int) -> int:
    return max(a, b) if type(a) is int and type(b) is int else _sym_max(a, b)


def _smaller(a: int, b: int) -> int:
    return min(a, b) if type(a) is int and type(b) is int else _sym_min(a, b)


def _both(
    operation: Callable[[Tensor, Tensor], Tensor], a: Tensor | None, b: Tensor | None
) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return operation(a, b)


def _device_of(values: Iterable[object]) -> torch.device:
    """The device of the first tensor among them; the CPU when there is none."""
    for value in values:
        if isinstance(value, Tensor):
            return value.device
    return torch.device("cpu")


# ---------------------------------------------------------------------- terms: one per argument
class Term:
    """One reason to hide keys: a frozen dataclass of tensors, strings and tuples of integers.

    Its first field is the value of `argument`, the name by which errors and `repr` call it.
    """

    argument: str

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        """Its `Intervals` for a call of these sizes; raises ValueError where it does not fit."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{self.argument}={_describe(next(iter(vars(self).values())))}"


@dataclass(frozen=True, eq=False)
class Causal(Term):
    """Row i sees keys `<= i` (upper_left) or `<= i + S - T` (lower_right)."""

    align: Alignment

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        return Intervals(band_hi=_offset(self.align, T, S) + 1)

    def __str__(self) -> str:
        return "causal=True" if self.align == "upper_left" else f"causal={self.align!r}"


@dataclass(frozen=True, eq=False)
class Window(Term):
    """Row i sees keys `i - left` to `i + right`, both included; -1: unlimited. Aligned as Causal"""

    sides: tuple[int, int]
    align: Alignment

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        (left, right), offset = self.sides, _offset(self.align, T, S)
        return Intervals(
            band_lo=-UNBOUNDED if left == -1 else offset - left,
            band_hi=UNBOUNDED if right == -1 else offset + right + 1,
        )

    def __str__(self) -> str:
        return f"window={self.sides}{'' if self.align == 'upper_left' else ' ' + self.align}"


@dataclass(frozen=True, eq=False)
class Prefix(Term):
    """Prefix-LM: row i sees keys `< max(i + offset + 1, lengths[b])`, causal or in the prefix."""

    lengths: Tensor | tuple[int, ...]
    align: Alignment
    argument: str = "prefix_lengths"

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        lengths = _lengths(self.argument, self.lengths, B, S, "S", device)
        causal = torch.arange(T, dtype=torch.int32, device=device) + (_offset(self.align, T, S) + 1)
        return _leading(torch.maximum(causal, lengths[:, None]).clamp(0, S))

    def __str__(self) -> str:
        return f"{Causal(self.align)}, {super().__str__()}"


@dataclass(frozen=True, eq=False)
class KeyLengths(Term):
    """Keys `>= lengths[b]` are hidden."""

    lengths: Tensor | tuple[int, ...]
    argument: str = "key_lengths"

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        lengths = _lengths(self.argument, self.lengths, B, S, "S", device)
        return _leading(lengths[:, None].expand(-1, T).contiguous())


@dataclass(frozen=True, eq=False)
class QueryLengths(Term):
    """Rows `>= lengths[b]` see nothing."""

    lengths: Tensor | tuple[int, ...]
    argument: str = "query_lengths"

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        lengths = _lengths(self.argument, self.lengths, B, T, "T", device)
        real = torch.arange(T, device=device) < lengths[:, None]  # [B or 1, T]
        return _leading(real.to(torch.int32) * S)


@dataclass(frozen=True, eq=False)
class KeyMask(Term):
    """Keys where `real` is False are hidden; the interval is the span of those where it is True."""

    real: Tensor
    argument: str = "key_mask"

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        _check_rows(self.argument, self.real, B, S, "S", device)
        if S == 0:  # no key to take a maximum over, and none to hide
            return Intervals()
        from_left = torch.arange(1, S + 1, dtype=torch.int32, device=device)
        from_right = torch.arange(S, 0, -1, dtype=torch.int32, device=device)
        first = S - (self.real * from_right).amax(1, keepdim=True)  # [B or 1, 1]; S if all hidden
        end = (self.real * from_left).amax(1, keepdim=True)  # [B or 1, 1]; 0 if all hidden
        return Intervals(
            k_lo=first.expand(-1, T).contiguous(),
            k_hi=end.expand(-1, T).contiguous(),
            key_visible=self.real.contiguous(),
        )


@dataclass(frozen=True, eq=False)
class QueryMask(Term):
    """Rows where `real` is False see nothing."""

    real: Tensor
    argument: str = "query_mask"

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        _check_rows(self.argument, self.real, B, T, "T", device)
        return _leading(self.real.to(torch.int32, memory_format=torch.contiguous_format) * S)


@dataclass(frozen=True, eq=False)
class Documents(Term):
    """Row i sees the keys whose id is its own. Ids of keys ascend; one tensor may be both."""

    query_ids: Tensor
    key_ids: Tensor
    argument: str = "document_ids"

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        if self.query_ids is self.key_ids and T != S:
            instead = "pass a pair (query_ids, key_ids)"
            _refuse(self.argument, f"serve rows and keys alike, but T is {T} and S is {S}", instead)
        queries = self.query_ids[None] if self.query_ids.dim() == 1 else self.query_ids
        keys = self.key_ids[None] if self.key_ids.dim() == 1 else self.key_ids
        _check_rows(self.argument, queries, B, T, "T", device)
        _check_rows(self.argument, keys, B, S, "S", device)
        if queries.shape[0] != keys.shape[0]:
            queries, keys = queries.expand(B, -1), keys.expand(B, -1)
        if queries.dtype != keys.dtype:
            queries, keys = queries.to(torch.int64), keys.to(torch.int64)
        queries, keys = queries.contiguous(), keys.contiguous()
        return Intervals(
            k_lo=torch.searchsorted(keys, queries, out_int32=True),
            k_hi=torch.searchsorted(keys, queries, out_int32=True, right=True),
        )

    def __str__(self) -> str:
        if self.query_ids is self.key_ids:
            return super().__str__()
        return f"{self.argument}=({_describe(self.query_ids)}, {_describe(self.key_ids)})"


@dataclass(frozen=True, eq=False)
class Dense(Term):
    """Pairs where `visible`, `[B|1, H|1, T|1, S|1]`, is False are hidden."""

    visible: Tensor
    argument: str = "attn_mask"

    def intervals(self, B: int, H: int, T: int, S: int, device: Device) -> Intervals:
        _check_broadcast(self.visible, (B, H, T, S))
        _check_device(self.argument, self.visible, device)
        return Intervals(dense=self.visible)


def _offset(align: Alignment, T: int, S: int) -> int:
    """The key beside row 0, such that the first (last) row stands beside the first (last) key."""
    return 0 if align == "upper_left" else S - T


def _leading(k_hi: Tensor) -> Intervals:
    """Row i sees the keys before `k_hi[b, i]`."""
    return Intervals(k_lo=torch.zeros_like(k_hi), k_hi=k_hi)


# ---------------------------------------------------------------------- what callers write
@dataclass(frozen=True, eq=False, repr=False, init=False)
class Mask:
    """Which keys every query row may see. `a & b`, and arguments together: what all let through.

    Row i of T queries and key j of S keys, in batch b:

    causal          True or "upper_left": `j <= i`, as in `scaled_dot_product_attention`;
                    "lower_right": `j <= i + S - T`, for decoding with a cache
    key_lengths     integers `[B]` or `[1]`: `j < key_lengths[b]`
    query_lengths   integers `[B]` or `[1]`: rows `i >= query_lengths[b]` see nothing
    key_mask        bool `[B or 1, S]`, True = real key: padding on either side, holes anywhere
    query_mask      bool `[B or 1, T]`, True = real row: the other rows see nothing
    window          `(left, right)`, -1 unlimited: `i - left <= j <= i + right`;
                    `i + S - T` stands for i with causal="lower_right"
    document_ids    integers `[S]` or `[B or 1, S]` (T == S), ascending along the row, or a pair
                    `(query_ids, key_ids)`, key_ids ascending: keys of the row's own id
    prefix_lengths  integers `[B]` or `[1]`, beside causal: `j < prefix_lengths[b]` is visible too

    Tensors are kept by reference, get no gradient and must be on the query's device. Lengths may
    also be a list of ints, which is copied to the device in every call.

    Raises TypeError or ValueError that names the argument: here for what it is, in `intervals`
    for how it fits B, T and S. Values (lengths in range, ids ascending) are checked where looking
    at them is free: on the CPU and outside `torch.compile`. Elsewhere lengths are clamped to
    [0, S] or [0, T], and the mask of unsorted ids is unspecified.

        hk.Mask(causal=True, key_mask=tokens != pad)
        hk.Mask(causal="lower_right", window=(4095, 0))
        hk.Mask.from_cu_seqlens(cu_seqlens, total) & hk.Mask(causal=True)
    """

    terms: tuple[Term, ...]

    def __init__(
        self,
        causal: bool | Alignment = False,
        key_lengths: Tensor | Sequence[int] | None = None,
        query_lengths: Tensor | Sequence[int] | None = None,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        window: tuple[int, int] | None = None,
        document_ids: Tensor | tuple[Tensor, Tensor] | None = None,
        prefix_lengths: Tensor | Sequence[int] | None = None,
    ) -> None:
        align = _parse_causal(causal)
        terms: tuple[Term, ...] = ()
        if prefix_lengths is not None:
            if align is None:
                instead = "pass causal=True or causal='lower_right' too"
                _refuse("prefix_lengths", "come without causal", instead)
            terms += (Prefix(_parse_lengths("prefix_lengths", prefix_lengths), align),)
        elif align is not None:
            terms += (Causal(align),)
        if window is not None:
            terms += (Window(_parse_window(window), align or "upper_left"),)
        if key_lengths is not None:
            terms += (KeyLengths(_parse_lengths("key_lengths", key_lengths)),)
        if query_lengths is not None:
            terms += (QueryLengths(_parse_lengths("query_lengths", query_lengths)),)
        if key_mask is not None:
            terms += (KeyMask(_parse_real("key_mask", key_mask, "[B, S], True = real key")),)
        if query_mask is not None:
            terms += (QueryMask(_parse_real("query_mask", query_mask, "[B, T], True = real row")),)
        if document_ids is not None:
            terms += (Documents(*_parse_documents(document_ids)),)
        object.__setattr__(self, "terms", terms)

    @classmethod
    def _of(cls, terms: tuple[Term, ...]) -> Mask:
        mask = cls()
        object.__setattr__(mask, "terms", terms)
        return mask

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, total: int) -> Mask:
        """Packed documents by their borders: document d is [cu_seqlens[d], cu_seqlens[d + 1]).

        `cu_seqlens`: integers `[documents + 1]`, ascending from 0. `total`: T = S, an int; what
        lies between `cu_seqlens[-1]` and `total` (padding) is one more document.
        """
        layout = "pass an integer tensor [documents + 1]"
        cu_seqlens = _parse_tensor("cu_seqlens", cu_seqlens, _INTEGERS, (1,), layout)
        if not _is_int(total):
            instead = "pass the packed length as an int"
            _refuse("total", f"is a {type(total).__name__}", instead, TypeError)
        if _readable(cu_seqlens):
            borders = cu_seqlens.tolist()
            if borders[:1] != [0] or borders != sorted(borders) or borders[-1] > total:
                instead = f"pass ascending borders, from 0 to at most total = {total}"
                _refuse("cu_seqlens", f"is {borders}", instead)
        j = torch.arange(total, device=cu_seqlens.device)
        return cls(document_ids=torch.searchsorted(cu_seqlens.to(torch.int64), j, right=True))

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        if not self.terms or not other.terms:
            return self if self.terms else other
        return Mask._of(self.terms + other.terms)

    def intervals(self, B: int, H: int, T: int, S: int, device: Device | None = None) -> Intervals:
        """Its `Intervals` for a call of these sizes on `device` (default: where its tensors are).

        Costs a few integers where only `causal` and `window` are given, no tensor.
        """
        if device is None:
            device = _device_of(value for term in self.terms for value in vars(term).values())
        combined: Intervals | None = None
        for term in self.terms:
            part = term.intervals(B, H, T, S, device)
            combined = part if combined is None else combined & part
        return Intervals() if combined is None else combined

    def to_dense(self, B: int, H: int, T: int, S: int, device: Device | None = None) -> Tensor:
        """The same as a bool tensor `[B or 1, H or 1, T, S]`, True = visible."""
        return self.intervals(B, H, T, S, device).to_dense(T, S, device)

    def __repr__(self) -> str:
        return f"Mask({', '.join(map(str, self.terms))})"


def as_mask(attn_mask: Mask | Tensor | None, shape: tuple[int, int, int, int]) -> Mask:
    """The `attn_mask` of an operator as a `Mask`, for a call of `shape` = (B, H, T, S).

    A bool tensor means what it means to `scaled_dot_product_attention`: True = may attend,
    broadcastable to `[B, H, T, S]` from the right, so that 2-D is `[T, S]`. `[B|1, 1, 1, S|1]` is
    taken as a key mask and `[B|1, 1, T, 1]` as a query mask, anything else as a dense mask.
    """
    if attn_mask is None:
        return Mask()
    if isinstance(attn_mask, Mask):
        return attn_mask
    instead = "pass a hk.Mask, or a bool tensor with True = may attend"
    if isinstance(attn_mask, Tensor) and attn_mask.dtype != torch.bool:
        if attn_mask.requires_grad:
            instead += ". Masks are data and get no gradient; the differentiable bias is"
            instead += " content_bias of collaborative_attention"
        elif attn_mask.is_floating_point():
            instead += " (additive masks are not served)"
    _parse_tensor("attn_mask", attn_mask, (torch.bool,), range(5), instead)
    _check_broadcast(attn_mask, shape)
    visible = attn_mask[(None,) * (4 - attn_mask.dim())]  # [B|1, H|1, T|1, S|1]
    if visible.shape[1] == 1 and visible.shape[2] == 1:
        return Mask._of((KeyMask(visible[:, 0, 0].expand(-1, shape[3]), "attn_mask"),))
    if visible.shape[1] == 1 and visible.shape[3] == 1:
        return Mask._of((QueryMask(visible[:, 0, :, 0], "attn_mask"),))
    return Mask._of((Dense(visible),))


# ---------------------------------------------------------------------- what an argument is
_INTEGERS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _refuse(argument: str, was: str, instead: str, kind: type[Exception] = ValueError) -> NoReturn:
    raise kind(f"{argument} {was}; {instead}.")


def _is_int(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _readable(tensor: Tensor) -> bool:
    """Whether its values may be looked at: on the CPU, not traced, not fake."""
    if torch.compiler.is_compiling():
        return False
    return type(tensor) is Tensor and tensor.device.type == "cpu"


def _describe(value: object) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    where = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{where}"


def _parse_tensor(
    argument: str,
    tensor: object,
    dtypes: Sequence[torch.dtype],
    ranks: Sequence[int],
    instead: str,
) -> Tensor:
    if not isinstance(tensor, Tensor):
        _refuse(argument, f"is a {type(tensor).__name__}", instead, TypeError)
    if tensor.dtype not in dtypes:
        _refuse(argument, f"has dtype {tensor.dtype}", instead, TypeError)
    if tensor.dim() not in ranks:
        _refuse(argument, f"has shape {list(tensor.shape)}", instead)
    return tensor


def _parse_causal(causal: object) -> Alignment | None:
    if causal is False:
        return None
    if causal is True or causal == "upper_left":
        return "upper_left"
    if causal == "lower_right":
        return "lower_right"
    _refuse("causal", f"is {causal!r}", "use False, True (= 'upper_left') or 'lower_right'")


def _parse_window(window: object) -> tuple[int, int]:
    instead = "pass (left, right), inclusive counts of keys on either side, -1 = unlimited"
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        _refuse("window", f"is {window!r}", instead)
    if not all(map(_is_int, window)):
        _refuse("window", f"is {window!r}", instead, TypeError)
    left, right = window
    if left < -1 or right < -1:
        _refuse("window", f"is {window!r}", instead)
    return (-1 if left >= UNBOUNDED else left), (-1 if right >= UNBOUNDED else right)


def _parse_lengths(argument: str, lengths: object) -> Tensor | tuple[int, ...]:
    instead = "pass an integer tensor [B] or a list of B ints"
    if not isinstance(lengths, (tuple, list)):
        return _parse_tensor(argument, lengths, _INTEGERS, (1,), instead)
    if not all(map(_is_int, lengths)):
        _refuse(argument, f"is {lengths!r}", instead, TypeError)
    return tuple(lengths)


def _parse_real(argument: str, real: object, layout: str) -> Tensor:
    return _parse_tensor(argument, real, (torch.bool,), (2,), f"pass a bool tensor {layout}")


def _parse_documents(document_ids: object) -> tuple[Tensor, Tensor]:
    instead = "pass an integer tensor [S] or [B, S], or a pair (query_ids, key_ids)"
    pair = document_ids if isinstance(document_ids, (tuple, list)) else (document_ids,) * 2
    if len(pair) != 2:
        _refuse("document_ids", f"has {len(pair)} parts", instead)
    queries, keys = pair
    queries = _parse_tensor("document_ids", queries, _INTEGERS, (1, 2), instead)
    keys = _parse_tensor("document_ids", keys, _INTEGERS, (1, 2), instead)
    if _readable(keys) and not bool((keys[..., 1:] >= keys[..., :-1]).all()):
        instead = "number the documents in the order in which their keys stand"
        _refuse("document_ids", "does not ascend along the row", instead)
    return queries, keys


# ---------------------------------------------------------------------- how it fits a call
def _check_rows(
    argument: str, tensor: Tensor, B: int, size: int, letter: str, device: Device
) -> None:
    """`tensor` is `[B or 1, size]` on `device`."""
    batch, width = tensor.shape
    if (batch != 1 and batch != B) or width != size:
        was = f"has shape {list(tensor.shape)}, but B is {B} and {letter} is {size}"
        _refuse(argument, was, f"pass [{B} or 1, {size}]")
    _check_device(argument, tensor, device)


def _check_device(argument: str, tensor: Tensor, device: Device) -> None:
    wanted = torch.device(device)
    indices = {tensor.device.index, wanted.index} - {None}  # "cuda" means whichever
    if tensor.device.type != wanted.type or len(indices) > 1:
        was = f"is on {tensor.device}, but query is on {wanted}"
        _refuse(argument, was, "move it there once, before the call")


def _check_broadcast(attn_mask: Tensor, shape: tuple[int, int, int, int]) -> None:
    """`attn_mask` broadcasts to `shape`, aligned right."""
    got, wanted = list(attn_mask.shape), list(shape)[4 - attn_mask.dim() :]
    if any(size != 1 and size != want for size, want in zip(got, wanted, strict=True)):
        instead = "make every size equal, or 1"
        if got == [shape[0], shape[3]]:
            instead = "2-D is [T, S]; a padding mask [B, S] goes as hk.Mask(key_mask=...)"
        _refuse("attn_mask", f"has shape {got}, but [B, H, T, S] is {list(shape)}", instead)


def _lengths(
    argument: str,
    lengths: Tensor | tuple[int, ...],
    B: int,
    limit: int,
    letter: str,
    device: Device,
) -> Tensor:
    """`lengths` as int32 `[B or 1]` on `device`, within [0, limit]."""
    count = lengths.shape[0] if isinstance(lengths, Tensor) else len(lengths)
    if count != 1 and count != B:
        _refuse(argument, f"holds {count} lengths, but B is {B}", f"pass {B}, or 1 for all")
    values: Sequence[int] = ()
    if isinstance(lengths, Tensor):
        _check_device(argument, lengths, device)
        values = lengths.tolist() if _readable(lengths) else ()
    else:
        values = () if torch.compiler.is_compiling() else lengths
        lengths = torch.tensor(lengths, dtype=torch.int64, device=device)
    if values and not 0 <= min(values) <= max(values) <= limit:
        _refuse(argument, f"is {list(values)}", f"lengths go from 0 to {letter} = {limit}")
    return lengths.to(torch.int64).clamp(0, limit).to(torch.int32)


# ---------------------------------------------------------------------- a Mask as a pytree
# So torch.export takes one as an input. Leaves are its tensors. The rest is a tuple of strings and
# tuples, which survives JSON: per term its name and fields, None in the place of each tensor.
def _constant(value: object) -> bool:
    return isinstance(value, (str, tuple))


def _flatten(mask: Mask) -> tuple[list[Any], Any]:
    rows = [list(vars(term).values()) for term in mask.terms]
    return [value for row in rows for value in row if not _constant(value)], tuple(
        (type(term).__name__, tuple(value if _constant(value) else None for value in row))
        for term, row in zip(mask.terms, rows, strict=True)
    )


def _flatten_with_keys(mask: Mask) -> tuple[list[tuple[Any, Any]], Any]:
    leaves, context = _flatten(mask)
    return [(pytree.SequenceKey(n), leaf) for n, leaf in enumerate(leaves)], context


def _unflatten(leaves: Iterable[Any], context: Any) -> Mask:
    kinds = {kind.__name__: kind for kind in Term.__subclasses__()}
    rest = iter(leaves)
    return Mask._of(
        tuple(
            kinds[name](*(next(rest) if value is None else value for value in row))
            for name, row in context
        )
    )


def _from_json(context: Any) -> Any:
    """Tuples that JSON made lists, made tuples again."""
    return tuple(map(_from_json, context)) if isinstance(context, list) else context


pytree.register_pytree_node(
    Mask,
    _flatten,
    _unflatten,
    serialized_type_name="heads_kernels.mask.Mask",
    to_dumpable_context=lambda context: context,
    from_dumpable_context=_from_json,
    flatten_with_keys_fn=_flatten_with_keys,
)
# And torch.load(weights_only=True), which reads the example inputs of a saved export, knows them.
torch.serialization.add_safe_globals([Mask, *Term.__subclasses__()])
