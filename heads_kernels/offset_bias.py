"""A bias on the scores that depends only on the offset of the key from the query row."""

from __future__ import annotations

import math
from typing import Final, Literal

import torch
from torch import Tensor

from heads_kernels.checks import check_flag, check_int, check_size, check_tensor, refuse, shape_of, shown

#: Largest `max_distance` of T5's buckets, which are computed in float32: it represents all integers up to here.
_MAX_DISTANCE: Final = 1 << 24


class OffsetBias:
    """A bias on the scores that depends only on the offset `j - i` of key j from query row i.

        bias_hij = table[h, clamp(j - i - first, 0, n - 1)]

    Offsets beyond the table use its first or last column. Kernels read the table and never build `[T, S]`, forward or
    backward; memory is linear in T + S.

    Args:
        table: `[H, n]`, or `[1, n]` for all heads; any floating dtype. Differentiable.
        first: offset of the first column; default `-(n // 2)`, which puts offset 0 in the middle.

    `OffsetBias.alibi` and `OffsetBias.t5` create the two common kinds. The bias of a two-dimensional window (Swin,
    BEiT) is not a function of `j - i`: gather its table into a dense bias `[H, N, N]`.

    Raises:
        ValueError, TypeError: an argument is invalid; the message names it.
    """

    def __init__(self, table: Tensor, first: int | None = None) -> None:
        check_tensor("table", table)
        if table.dim() != 2 or 0 in table.shape:
            refuse("table", f"has shape {shape_of(table)}", "pass [H, n], or [1, n] for all heads")
        self.values = table
        self.first: int = -(table.shape[1] // 2) if first is None else check_int("first", first)
        self.kind: Literal["table", "alibi"] = "table"
        self.start = 0

    @classmethod
    def alibi(cls, slopes: Tensor) -> OffsetBias:
        """`-slopes[h] * |j - i|` (Press, Smith, Lewis 2022; BLOOM and MPT under a causal mask). `slopes`: `[H]`."""
        check_tensor("slopes", slopes)
        if slopes.dim() != 1 or not slopes.numel():
            refuse("slopes", f"has shape {shape_of(slopes)}", "pass one slope per head, [H]")
        bias = cls(slopes[:, None], 0)
        bias.kind = "alibi"
        return bias

    @classmethod
    def t5(cls, weight: Tensor, bidirectional: bool = True, max_distance: int = 128) -> OffsetBias:
        """Relative position buckets of T5 (Raffel et al. 2020).

        Half of the buckets cover one distance each, the other half cover ranges that grow geometrically up to
        `max_distance`.

        Args:
            weight: `[buckets, H]`, the weight of transformers' `relative_attention_bias`. Differentiable.
            bidirectional: keys after the query have their own buckets (encoders). False: they share bucket 0.
            max_distance: distances from here on share the last bucket.
        """
        check_tensor("weight", weight)
        check_flag("bidirectional", bidirectional)
        check_size("max_distance", max_distance)
        if max_distance > _MAX_DISTANCE:
            refuse("max_distance", f"is {shown(max_distance)}", f"pass at most {_MAX_DISTANCE}")
        least = 4 if bidirectional else 2
        if weight.dim() != 2 or weight.shape[0] < least:
            refuse("weight", f"has shape {shape_of(weight)}", f"pass [buckets, H], at least {least} buckets")
        last = max_distance if bidirectional else 0
        offsets = torch.arange(-max_distance, last + 1, device=weight.device)
        bucket = _t5_buckets(offsets, bidirectional, weight.shape[0], max_distance)
        return cls(_at_least_float32(weight)[bucket].mT, -max_distance)

    def starting_at(self, row: int) -> OffsetBias:
        """The bias for query rows that start at position `row`: `S - T` when decoding with a cache."""
        moved = OffsetBias(self.values, self.first)
        moved.kind, moved.start = self.kind, self.start + check_int("row", row)
        return moved

    @property
    def heads(self) -> int:
        """H, or 1 if all heads share it."""
        return self.values.shape[0]

    def table(self, T: int, S: int) -> Tensor:
        """`[H or 1, T + S - 1]`, at least one column: the bias at offsets `-(T - 1)` to `S - 1`, for the kernels."""
        count = max(T + S - 1, 1)
        first, columns = 1 - T - self.start, self.values.shape[1]
        # In compiled code the comparison would specialize the program to these lengths.
        if self.kind == "table" and not torch.compiler.is_compiling() and (self.first, columns) == (first, count):
            return self.values
        offsets = torch.arange(count, device=self.values.device) + first
        values = _at_least_float32(self.values)
        if self.kind == "alibi":
            return -values * offsets.abs()
        return values[:, (offsets - self.first).clamp(0, columns - 1)]

    def to_dense(self, T: int, S: int) -> Tensor:
        """The dense bias, `[H or 1, T, S]`."""
        return diagonals(self.table(T, S), T, S)

    def __repr__(self) -> str:
        if self.kind == "alibi":
            return f"OffsetBias.alibi({self.heads} slopes)"
        last = self.first + self.values.shape[1] - 1
        return f"OffsetBias({self.heads} heads, offsets {self.first} to {last})"


def diagonals(table: Tensor, T: int, S: int) -> Tensor:
    """The bias `[H, T, S]` from a table `[H, T + S - 1]`: element (i, j) is the entry of offset j - i."""
    rows = torch.arange(T, device=table.device)[:, None]
    keys = torch.arange(S, device=table.device)
    return table[:, keys - rows + T - 1]


def _at_least_float32(tensor: Tensor) -> Tensor:
    """In float32 distances are exact, and gradients of an entry that many offsets share are summed in float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _t5_buckets(offsets: Tensor, bidirectional: bool, buckets: int, max_distance: int) -> Tensor:
    """The bucket of each offset `j - i`."""
    distance, behind = (-offsets).clamp(min=0), torch.zeros_like(offsets)
    if bidirectional:
        buckets //= 2
        distance, behind = offsets.abs(), (offsets > 0) * buckets
    exact = buckets // 2
    if max_distance <= exact:
        refuse("max_distance", f"is {max_distance}", f"pass more than {exact}: smaller distances have one bucket each")
    # T5's order of operations: bucket borders are at integers, where rounding decides.
    share = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    wide = exact + (share * (buckets - exact)).long()
    return behind + torch.where(distance < exact, distance, wide.clamp(max=buckets - 1))


# for torch.load(weights_only=True)
torch.serialization.add_safe_globals([OffsetBias])
