"""What an observer of an attention module sees: the operands of one operator call, read without a map of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from heads_kernels.checks import check_excluded
from heads_kernels.functional import attention_statistics
from heads_kernels.mask import Intervals, Mask
from heads_kernels.ops import formula
from heads_kernels.ops.attention_statistics import eager
from heads_kernels.ops.attention_statistics.op import AttentionStatistics, allocate
from heads_kernels.ops.layout import compute_dtype
from heads_kernels.problem import Problem


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of an operator by an attention module; see `hk.heads.observe`.

    Attributes:
        query, key, value: as the operator got them: `[B, H, T, D]`, `[B, Hk, S, D]`, `[B, Hk, S, Dv]`; in collaborative
            attention `[B, T, Ds]`, `[B, S, Ds]`, `[B, H, S, Dv]`.
        mixing, content_bias: `[H, Ds]`, `[B, H, S]`, or None.
        mask: `hk.Mask` or bool tensor, True = visible.
        scale: the factor of scores.
        bias: what is added to scores after the scale, broadcastable to `[B, H, T, S]` (T5); no operator takes one.
        self_attention: whether rows and keys are of one sequence; the last row is then the last key.
        rows: `[B, T]`, rows that are known to be tokens, not padding.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mixing: Tensor | None
    content_bias: Tensor | None
    mask: Mask | Tensor | None
    scale: float
    bias: Tensor | None = None
    self_attention: bool = True
    rows: Tensor | None = None

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

    # ------------------------------------------------------------------ who is there
    @property
    def real_queries(self) -> Tensor:
        """bool `[B, T]`: rows that are tokens. In self-attention they are those that see themselves; elsewhere, where
        nothing else is known, those that see a key."""
        if self.rows is not None:
            return self.rows
        if self.self_attention:
            return self._sees_itself
        lo, hi = self._bounds
        some = hi > lo
        if self._intervals.dense is not None:
            some = some & self._intervals.dense.any(-1).any(1)
        return some.expand(self.B, self.T)

    @property
    def real_keys(self) -> Tensor:
        """bool `[B, S]`: keys that are tokens. In self-attention without a cache they are its rows, elsewhere the keys
        that some row sees."""
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
        if self._intervals.dense is not None:
            seen = seen & self._intervals.dense.any(-2).any(1)
        return seen.expand(self.B, self.S)

    @property
    def is_causal(self) -> bool:
        """Whether no row sees a key behind its own place, the last row beside the last key. It reads the mask."""
        own = torch.arange(self.T, device=self.query.device) + (self.S - self.T)
        if bool((self._bounds[1] <= own + 1).all()):
            return True
        dense = self._intervals.dense
        if dense is None or dense.shape[-2] == 1:
            return False
        return not bool(dense.triu(self.S - self.T + 1).any())

    @cached_property
    def _intervals(self) -> Intervals:
        return Problem.statistics(
            self.query, self.key, mixing=self.mixing, attn_mask=self.mask
        ).intervals

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        """`[B or 1, T]` each: the half-open range of keys of every row, `dense` and `key_visible` apart."""
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
        if self._intervals.dense is not None:
            dense = self._intervals.dense.expand(-1, -1, self.T, self.S)
            sees = sees & dense.diagonal(self.S - self.T, -2, -1).any(1)
        return sees.expand(self.B, self.T)

    # ------------------------------------------------------------------ what they attend to
    @torch.no_grad()
    def statistics(self, exclude_keys: Tensor | None = None) -> AttentionStatistics:
        """`hk.attention_statistics` of the call; with a `bias` by blocks of rows in plain PyTorch.

        Args:
            exclude_keys: as there.
        """
        if self.bias is None:
            return attention_statistics(
                self.query,
                self.key,
                mixing=self.mixing,
                content_bias=self.content_bias,
                attn_mask=self.mask,
                scale=self.scale,
                exclude_keys=exclude_keys,
            )
        excluded = check_excluded(exclude_keys, self.query, (self.B, self.S))
        if excluded is not None:
            excluded = excluded.expand(self.B, self.S)
        found = allocate(self.query, self.mixing)
        for start in range(0, self.T, eager.BLOCK_M):
            rows = slice(start, start + eager.BLOCK_M)
            block = eager.of_scores(*self._scores(rows), excluded)
            for whole, part in zip(found, block, strict=True):
                whole[..., rows] = part
        return found

    @torch.no_grad()
    def probabilities(self, rows: slice) -> Tensor:
        """`[B, H, rows, S]` of these rows alone, before dropout; float32, or float64 of float64 operands.

        A row that sees no key has zeros.

        Args:
            rows: a slice with a start and a stop.
        """
        return formula.softmax(*self._scores(rows))[0]

    @formula.without_autocast
    def _scores(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Scores `[B, H, rows, S]` in the compute dtype, and which of them are visible."""
        query = self.query[..., rows, :]
        if self.mixing is None:
            key = formula.per_head(self.key, query)
            scores = self.scale * (query.to(key.dtype) @ key.mT)
        else:
            mixed = formula.mixed_query(query, self.mixing)
            scores = formula.collaborative_scores(mixed, self.key, self.content_bias, self.scale)
        if self.bias is not None:
            bias = self.bias.to(compute_dtype(self.query.dtype))
            scores = scores + (bias if bias.shape[-2] == 1 else bias[..., rows, :])
        start, stop, _ = rows.indices(self.T)
        visible = formula.visible_matrix(formula.rows_of(self._intervals, start, stop), scores)
        return scores, visible
