"""A mask as kernels read it: two integers, int32 vectors, one byte per key and one per pair."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

#: An unlimited band: larger than any T or S (`MAX_LENGTH`), and added to a row index it still fits int32.
UNBOUNDED: Final = 1 << 30

Device = torch.device | str
Record = TypeVar("Record")


def by_identity(record: type[Record]) -> type[Record]:
    """Compare a NamedTuple by identity, because `==` of two tensors is not a bool."""
    for name in ("__eq__", "__ne__", "__hash__"):
        setattr(record, name, getattr(object, name))
    return record


@by_identity
class Intervals(NamedTuple):
    """The pair (query row i, key j) of batch b and head h is visible if it is visible in every part that is present.

    band_lo, band_hi  integers: `i + band_lo <= j < i + band_hi`; unlimited: -/+ `UNBOUNDED`
    k_lo, k_hi        int32 `[B or 1, H or 1, T]`, contiguous, within [0, S], both or neither:
                      `k_lo[b, h, i] <= j < k_hi[b, h, i]`; a row with `k_lo >= k_hi` sees at most first keys
    first_keys        int32 `[H or 1]`, contiguous, within [0, S], only with k_lo and k_hi: the lower limits `band_lo`
                      and `k_lo` do not hide keys `j < first_keys[h]`
    key_visible       bool `[B or 1, S]`, contiguous: False hides key j from every row
    dense_mask        bool `[B|1, H|1, T|1, S|1]`: False hides the pair
    """

    band_lo: int = -UNBOUNDED
    band_hi: int = UNBOUNDED
    k_lo: Tensor | None = None
    k_hi: Tensor | None = None
    first_keys: Tensor | None = None
    key_visible: Tensor | None = None
    dense_mask: Tensor | None = None

    def __and__(self, other: Intervals) -> Intervals:
        """The pairs visible in both. Bounds may have any integer dtype and be `[B or 1, H or 1, T or 1]` here.

        If one has first keys, the other must not limit them (`limits_first_keys`).
        """
        return Intervals(
            band_lo=max(self.band_lo, other.band_lo),
            band_hi=min(self.band_hi, other.band_hi),
            k_lo=_both(torch.maximum, self.k_lo, other.k_lo),
            k_hi=_both(torch.minimum, self.k_hi, other.k_hi),
            first_keys=other.first_keys if self.first_keys is None else self.first_keys,
            key_visible=_both(torch.logical_and, self.key_visible, other.key_visible),
            dense_mask=_both(torch.logical_and, self.dense_mask, other.dense_mask),
        )

    def laid_out(self, T: int) -> Intervals:
        """The same with bounds in the form that kernels read; `k_lo` is 0 if it is missing."""
        if self.k_hi is None:
            return self
        k_hi = _vectors(self.k_hi.expand(-1, -1, T))
        k_lo = torch.zeros_like(k_hi) if self.k_lo is None else _vectors(self.k_lo.expand_as(k_hi))
        return self._replace(k_lo=k_lo, k_hi=k_hi)

    def recordable(self) -> Intervals:
        """The same with copies of tensors from `torch.inference_mode`, which autograd cannot save for a backward.

        Not in code that is compiled, where Dynamo sees no such tensor, and Inductor would not keep the copy.
        """
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return self
        return Intervals._make(
            field.clone() if isinstance(field, Tensor) and field.is_inference() else field for field in self
        )

    def from_row(self, row: int) -> Intervals:
        """The same with the band of a call that starts at row `row` of this one; tensors are unchanged."""
        lo, hi = self.band_lo, self.band_hi
        return self._replace(band_lo=lo + row if lo > -UNBOUNDED else lo, band_hi=hi + row if hi < UNBOUNDED else hi)

    def at_keys(self, T: int, positions: Tensor) -> Intervals:
        """The intervals of a call with the same T rows and only the keys at `positions` (int64, ascending)."""
        lo, hi = self.bounds(T, positions.device)
        visible, dense = self.key_visible, self.dense_mask
        if visible is not None:
            visible = visible[:, positions]
        if dense is not None and dense.shape[3] != 1:
            dense = dense[..., positions]
        # Positions ascend, so those within [lo, hi) are consecutive, and so are first keys, which begin at key 0.
        at = functools.partial(torch.searchsorted, positions, out_int32=True)
        first = None if self.first_keys is None else at(self.first_keys.to(torch.int64))
        return Intervals(k_lo=at(lo), k_hi=at(hi), first_keys=first, key_visible=visible, dense_mask=dense)

    def bounds(self, T: int, device: Device) -> tuple[Tensor, Tensor]:
        """Band and vectors together, each `[B or 1, H or 1, T]`, not clamped: `lo <= j < hi`, first keys aside."""
        i = torch.arange(T, device=device)[None, None]  # [1, 1, T]
        lo, hi = i + self.band_lo, i + self.band_hi
        if self.k_lo is None or self.k_hi is None:
            return lo, hi
        return torch.maximum(lo, self.k_lo), torch.minimum(hi, self.k_hi)

    @property
    def by_head(self) -> bool:
        """Whether `k_lo` and `k_hi`, or `first_keys`, differ between heads."""
        several = self.first_keys is not None and self.first_keys.shape[0] != 1
        return several or (self.k_lo is not None and self.k_lo.shape[1] != 1)

    @property
    def limits_first_keys(self) -> bool:
        """Whether its lower limits hide keys that `key_visible` does not; it cannot be joined with first keys then."""
        limited = self.k_lo is not None and self.key_visible is None
        return limited or self.band_lo > -UNBOUNDED or self.first_keys is not None

    @property
    def hides(self) -> bool:
        """Whether any part is present: False where every pair is visible."""
        parts = self.k_lo, self.key_visible, self.dense_mask
        limited = self.band_lo > -UNBOUNDED or self.band_hi < UNBOUNDED
        return limited or any(part is not None for part in parts)

    @property
    def device(self) -> torch.device:
        """The device of its tensors; the CPU if there are none."""
        return device_of((self.k_lo, self.key_visible, self.dense_mask))

    def to_dense(self, T: int, S: int, device: Device | None = None) -> Tensor:
        """A bool tensor `[B or 1, H or 1, T, S]`, True = visible."""
        device = self.device if device is None else device
        j = torch.arange(S, device=device)  # [S]
        lo, hi = (limits[..., None] for limits in self.bounds(T, device))
        visible = j >= lo  # [B or 1, H or 1, T, S]
        if self.first_keys is not None:
            visible = visible | (j < self.first_keys[:, None, None])
        visible = visible & (j < hi)
        if self.key_visible is not None:
            visible = visible & self.key_visible[:, None, None, :]
        return visible if self.dense_mask is None else visible & self.dense_mask

    def visible_pairs(self, B: int, T: int, S: int) -> Tensor:
        """Number of visible pairs (i, j) in every batch and head, exact: int64 `[B, H or 1]`, on `self.device`."""
        return self.visible_keys(B, T, S, self.device).sum(2).expand(B, -1)

    def visible_keys(self, B: int, T: int, S: int, device: Device) -> Tensor:
        """Number of keys that every row sees, exact: int64 `[B or 1, H or 1, T]`, which is `to_dense(T, S).sum(3)`.

        Without `dense_mask`, memory is O(B H (T + S)), or O(B (T + S)) where all heads see the same.
        """
        if self.dense_mask is not None:
            return self.to_dense(T, S, device).sum(3)
        lo, hi = (each.clamp(0, S) for each in self.bounds(T, device))  # [B or 1, H or 1, T]
        counted = self._keys_below(torch.maximum(hi, lo), B) - self._keys_below(lo, B)
        if self.first_keys is not None:
            first = torch.minimum(torch.minimum(lo, hi), self.first_keys[:, None])
            counted = counted + self._keys_below(first, B)
        return counted

    def _keys_below(self, limits: Tensor, B: int) -> Tensor:
        """How many keys `key_visible` shows before each of `limits` `[B or 1, H or 1, T]`."""
        if self.key_visible is None:
            return limits
        before = torch.nn.functional.pad(self.key_visible.cumsum(1), (1, 0))  # [B or 1, S + 1]
        limits = limits.expand(B, -1, -1)
        return before[:, None].expand(B, limits.shape[1], -1).gather(2, limits)


def _vectors(bounds: Tensor) -> Tensor:
    return bounds.to(torch.int32).contiguous()


def _both(operation: Callable[[Tensor, Tensor], Tensor], a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return operation(a, b)


def device_of(values: Iterable[object]) -> torch.device:
    """The device of the first tensor in `values`; the CPU if there is none."""
    for value in values:
        if isinstance(value, Tensor):
            return value.device
    return torch.device("cpu")
