"""What an observer of an attention module receives: one operator call with its operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from heads_kernels.batch import Batch, unflatten
from heads_kernels.call import Call, compute_dtype
from heads_kernels.checks import check_excluded, check_row_weights, check_size, refuse
from heads_kernels.dispatch import select
from heads_kernels.mask import Intervals, Mask
from heads_kernels.offset_bias import OffsetBias
from heads_kernels.ops import eager, scores
from heads_kernels.ops.statistics import AttentionStatistics, measure
from heads_kernels.parse import parse

#: 8 rows at least, for fewer make slow products. Heuristic.
_BLOCK: Final = 1 << 18
_LEAST_ROWS: Final = 8

#: How much less than the largest of its row what is added to a hidden key is. Heuristic: half of BERT's 10000.
_HIDES: Final = 5000.0


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of an operator by an attention module; see `hk.analysis.observe`.

    Attributes:
        query, key, value: as the operator got them: `[B, H, T, D]`, `[B, Hk, S, D]`, `[B, Hk, S, Dv]`; in collaborative
            attention `[B, T, Ds]`, `[B, S, Ds]`, `[B, Hv, S, Dv]`.
        mixing, content_bias: `[H, Ds]`, `[B, H, S]`, or None.
        mask: `hk.Mask` or bool tensor, True = visible.
        scale: the factor of scores.
        bias, softcap, sinks: as the operators take them, or None.
        alpha: `[H]` of entmax; None for softmax.
        batch: the batch dimensions of the layer's input and of `bias`, with product B, if there are several.
        self_attention: whether rows and keys belong to one sequence; the last row is then the last key.
        rows: bool `[B, T]`, True for tokens and False for padding, if known.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mixing: Tensor | None
    content_bias: Tensor | None
    mask: Mask | Tensor | None
    scale: float
    bias: Tensor | OffsetBias | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    batch: Batch = None
    self_attention: bool = True
    rows: Tensor | None = None
    alpha: Tensor | None = None

    @property
    def B(self) -> int:
        return self.query.shape[0]

    @property
    def H(self) -> int:
        return self.query.shape[1] if self.mixing is None else self.mixing.shape[0]

    @property
    def T(self) -> int:
        return self.query.shape[-2]

    @property
    def S(self) -> int:
        return self.key.shape[-2]

    # ------------------------------------------------------------------ tokens and padding
    @property
    def real_queries(self) -> Tensor:
        """bool `[B, T]`: rows that are tokens: `rows` if given, in self-attention rows that see themselves, otherwise
        rows that see a key."""
        if self.rows is not None:
            return self.rows
        if self.self_attention:
            return self._sees_itself
        lo, hi = self._bounds
        some = hi > lo
        if self._dense is not None:
            some = some & self._dense.any(-1).any(1)
        return some.expand(self.B, self.T)

    @property
    def real_keys(self) -> Tensor:
        """bool `[B, S]`: keys that are tokens: in self-attention without a cache those that see themselves, otherwise
        those that some row sees."""
        if self.self_attention and self.T == self.S:
            return self._sees_itself
        lo, hi = self._bounds
        j = torch.arange(self.S, device=lo.device)
        some = hi > lo
        first = torch.where(some, lo, self.S).amin(1, keepdim=True)
        last = torch.where(some, hi, 0).amax(1, keepdim=True)
        seen = (j >= first) & (j < last)
        if self._intervals.key_visible is not None:
            seen = seen & self._intervals.key_visible
        if self._dense is not None:
            seen = seen & self._dense.any(-2).any(1)
        return seen.expand(self.B, self.S)

    @property
    def is_causal(self) -> bool:
        """Whether no row sees a later key, with the last row at the last key. Reads the values of the mask."""
        own = torch.arange(self.T, device=self.query.device) + (self.S - self.T)
        if bool((self._bounds[1] <= own + 1).all()):
            return True
        dense, behind = self._dense, self.S - self.T + 1
        return (
            dense is not None
            and dense.shape[-2:] == (self.T, self.S)
            and not bool(dense.triu(behind).any())
        )

    @cached_property
    def _scores(self) -> Call:
        content_bias = self.content_bias
        call, _ = parse(
            "attention_statistics",
            self.batched(self.query),
            self.batched(self.key),
            mixing=self.mixing,
            content_bias=None if content_bias is None else self.batched(content_bias),
            attn_mask=self.mask,
            bias=self.bias,
            softcap=self.softcap,
            sinks=self.sinks,
            scale=self.scale,
        )
        return call

    def batched(self, tensor: Tensor) -> Tensor:
        """`tensor` `[B, ...]` with the batch dimensions of `bias`."""
        return unflatten(tensor, self.batch)

    @property
    def _intervals(self) -> Intervals:
        return self._scores.intervals

    @cached_property
    def _dense(self) -> Tensor | None:
        """bool `[B or 1, H or 1, T or 1, S or 1]`: what a dense mask, and a bias, leave visible."""
        dense, bias = self._intervals.dense, self.bias
        if not isinstance(bias, Tensor):
            return dense
        visible = visible_under(bias)
        if self.batch is not None and visible.dim() > 4:
            visible = visible.expand(*self.batch, *visible.shape[-3:]).flatten(0, -4)
        visible = visible[(None,) * (4 - visible.dim())]
        return visible if dense is None else visible & dense

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        """`[B or 1, T]` each: the half-open key range of every row, without `dense` and `key_visible`."""
        i = torch.arange(self.T, device=self.query.device)[None]
        mask = self._intervals
        lo, hi = (i + mask.band_lo).clamp(0, self.S), (i + mask.band_hi).clamp(0, self.S)
        if mask.k_lo is not None and mask.k_hi is not None:
            lo, hi = torch.maximum(lo, mask.k_lo), torch.minimum(hi, mask.k_hi)
        return lo, hi

    @cached_property
    def _sees_itself(self) -> Tensor:
        own = torch.arange(self.T, device=self.query.device) + (self.S - self.T)
        lo, hi = self._bounds
        sees = (lo <= own) & (own < hi)
        if self._intervals.key_visible is not None:
            sees = sees & self._intervals.key_visible[:, own]
        if self._dense is not None:
            dense = self._dense.expand(-1, -1, self.T, self.S)
            sees = sees & dense.diagonal(self.S - self.T, -2, -1).any(1)
        return sees.expand(self.B, self.T)

    # ------------------------------------------------------------------ attention
    def statistics(
        self, exclude_keys: Tensor | None = None, received: bool | Tensor | None = None
    ) -> AttentionStatistics:
        """`hk.attention_statistics` of the call; `exclude_keys` is bool `[S]` or `[B, S]`.

        Weights of rows, `received`, broadcast to `[B, H, T]`. True counts every row that sees a key, padding included;
        `real_queries[:, None].float()` counts tokens alone.

        Raises:
            ValueError: the call has entmax in the place of softmax.
        """
        self.check_softmax("statistics")
        call = self._scores
        excluded = check_excluded(exclude_keys, call.query, (self.B, self.S))
        dtype, sizes = compute_dtype(call.query.dtype), (self.B, self.H, self.T)
        weights = check_row_weights(received, call.query, sizes, dtype)
        call = call._replace(exclude_keys=excluded, row_weights=weights)
        return measure(call, select(call))

    @torch.no_grad()
    def probabilities(
        self, rows: slice = slice(None), heads: Sequence[int] | None = None
    ) -> Tensor:
        """`[B, heads, rows, S]`: attention probabilities, before dropout; zeros for a row that sees no key.

        float32, or float64 for float64 operands.

        Args:
            rows: a slice of the query rows, without a step; default all.
            heads: numbers of query heads; default all. Others are not computed.

        Raises:
            ValueError: a head does not exist; the slice has a step.
        """
        start, stop, step = rows.indices(self.T)
        if step != 1:
            refuse("rows", f"is {rows}", "pass a slice without a step")
        call = scores.of_rows(self._scores, start, stop)
        if self.alpha is not None:
            alpha = self.alpha.detach().to(compute_dtype(self.query.dtype))
            call = call._replace(alpha=alpha)
        if heads is not None:
            if absent := [head for head in heads if not 0 <= head < self.H]:
                refuse("heads", f"names head {absent[0]}", f"the call has heads 0 to {self.H - 1}")
            call = scores.of_heads(call, heads)
        return eager.row_probabilities(call)

    def support_sizes(self) -> Tensor:
        """int64 `[B, H, T]`: the number of keys to which each row gives a probability above 0.

        Blocks of rows are worked out one after the other.
        """
        found = [
            (self.probabilities(rows) > 0).sum(-1)
            for rows in blocks(self.T, self.B * self.H * self.S)
        ]
        empty = self.query.new_zeros((self.B, self.H, 0), dtype=torch.int64)
        return torch.cat([empty, *found], -1)

    def support_tiles(self, size: int = 64) -> Tensor:
        """int64 `[B, H]`: the number of tiles of `size` rows by `size` keys with a probability above 0.

        Tiles are counted from the first row and key on. With entmax all others are skipped in the backward pass, by the
        CPU kernels in tiles of 64 by 64.

        Raises:
            TypeError, ValueError: `size` is not an int of at least 1.
        """
        size = check_size("size", size)
        found = self.query.new_zeros((self.B, self.H), dtype=torch.int64)
        for start in range(0, self.T, size):
            above = (self.probabilities(slice(start, start + size)) > 0).any(2)  # [B, H, S]
            tiles = functional.pad(above, (0, -self.S % size)).view(*found.shape, -1, size)
            found += tiles.any(3).sum(2)
        return found

    def check_softmax(self, what: str) -> None:
        """Refuse, by the name of `what` is asked, a call with entmax in the place of softmax."""
        if self.alpha is not None:
            refuse(what, "is that of softmax, but the layer has entmax", "leave the layer out")


def visible_under(added: Tensor) -> Tensor:
    """Which keys a float tensor `[..., S]` that is added to scores leaves visible, bool.

    A key is hidden by -inf, by half of the dtype's lowest number, and by 5000 less than the largest of its row: models
    hide keys by -10000, -1e9 or the lowest number, to which another bias may have been added. The probability of such a
    key is 0 in float64 too, unless scores differ by thousands.
    """
    added = added.detach()
    lowest = torch.finfo(added.dtype).min / 2
    if not added.shape[-1]:
        return added > lowest
    return (added > lowest) & (added > added.amax(-1, keepdim=True) - _HIDES)


def blocks(T: int, width: int) -> list[slice]:
    """Rows 0 to T - 1 in slices of 2^18 numbers, of which a row has `width`, but 8 rows at least."""
    rows = max(_LEAST_ROWS, _BLOCK // max(1, width))
    return [slice(start, min(start + rows, T)) for start in range(0, T, rows)]
