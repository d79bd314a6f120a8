"""What an observer of an attention module receives: the `Call` of its operator, and which rows and keys are tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor, nn

from heads_kernels.backends import select
from heads_kernels.batch import expand_bias
from heads_kernels.call import Call, compute_dtype
from heads_kernels.checks import check_excluded, check_heads, check_row_weights, check_rows, refuse
from heads_kernels.offset_bias import diagonals
from heads_kernels.ops import eager
from heads_kernels.ops.statistics import AttentionStatistics, measure
from heads_kernels.parse import parse

#: Probabilities of a block of query rows, 1 MiB of float32: they stay in a cache of the second level. A block has at
#: least 8 rows, for fewer make slow products. Heuristic.
_BLOCK: Final = 1 << 18
_LEAST_ROWS: Final = 8

#: How much less than the largest of its row what is added to a hidden key is. Heuristic: half of BERT's 10000.
_HIDES: Final = 5000.0


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of an operator by an attention module; see `hk.analysis.observe`.

    It has the attributes of `call` too: the operands `query`, `key`, `value`, `mixing`, `content_bias` and `alpha`, as
    the operator reads them; `bias`, `sinks`, `softcap`, `scale` and `intervals` (what its mask shows); the sizes `B`,
    `H`, `T`, `S`, `D` and `Dv`; and `flops()`.

    Attributes:
        call: the operator's `Call`, without gate and dropout. Batch dimensions are one: B is their product.
        self_attention: whether rows and keys belong to one sequence; the last row is then the last key, unless `first`
            is given.
        rows: bool `[B, T]`, True for tokens and False for padding, if known.
        first: in self-attention, the number of the key at the position of the first row, an int or a tensor; None is
            S - T. In a cache that has memory for more tokens it is smaller.
    """

    call: Call
    self_attention: bool = True
    rows: Tensor | None = None
    first: int | Tensor | None = None

    @classmethod
    def of(
        cls,
        operator: Callable[..., Any],
        *args: Any,
        self_attention: bool = True,
        first: int | Tensor | None = None,
        **kwargs: Any,
    ) -> AttentionCall:
        """The call `operator(*args, **kwargs)`, which is checked and does not run."""
        arguments = signature(operator).bind(*args, **kwargs)
        arguments.apply_defaults()  # of alpha
        given = {name: each for name, each in arguments.arguments.items() if name not in ("return_lse", "backend")}
        call = parse(operator.__name__, **given)[0]
        return cls(call._replace(gate=None, gate_activation="identity", dropout_p=0.0), self_attention, first=first)

    def __getattr__(self, name: str) -> Any:
        if name not in ("call", "__setstate__"):  # of a copy that has no attributes yet
            return getattr(self.call, name)
        raise AttributeError(name)

    # ------------------------------------------------------------------ tokens and padding
    def up_to_last_seen(self) -> AttentionCall:
        """The call whose last row is at the last key that any row sees: a cache may have memory for more tokens."""
        if self.call.T >= self.call.S:
            return self
        numbers = torch.arange(1, self.call.S + 1, device=self.query.device)
        return replace(self, first=(numbers * self.real_keys.any(0)).amax() - self.call.T)

    @property
    def own_keys(self) -> Tensor:
        """int64 `[T]`: in self-attention, the number of the key at the position of each row."""
        first = self.call.S - self.call.T if self.first is None else self.first
        return torch.arange(self.call.T, device=self.query.device) + first

    @property
    def real_queries(self) -> Tensor:
        """bool `[B, T]`: rows that are tokens: `rows` if given, in self-attention rows that see themselves, otherwise
        rows that see a key."""
        if self.rows is not None:
            return self.rows
        if self.self_attention:
            return self._sees_itself
        visible = self.call.intervals._replace(dense_mask=self._dense)
        keys = visible.visible_keys(self.call.B, self.call.T, self.call.S, self.query.device)
        return (keys > 0).any(1).expand(self.call.B, self.call.T)

    @property
    def real_keys(self) -> Tensor:
        """bool `[B, S]`: keys that are tokens: in self-attention without a cache those that see themselves, otherwise
        those that some row sees."""
        if self.self_attention and self.call.T == self.call.S:
            return self._sees_itself
        if self._dense is not None and self._dense.shape[-2] != 1:
            return self._pairs.any(2).any(1).expand(self.call.B, self.call.S)
        lo, hi, first = self._bounds
        j = torch.arange(self.call.S, device=lo.device)
        some = (hi > lo).long()
        # How many more rows see a key than the one before it: a range adds 1 where it begins, and takes 1 at its end.
        more = some.new_zeros(*some.shape[:2], self.call.S + 1).scatter_add(2, lo, some).scatter_add(2, hi, -some)
        in_front = nn.functional.pad(torch.minimum(hi, first), (0, 1)).amax(2, keepdim=True)  # 0 without rows
        seen = (more.cumsum(2)[..., :-1] > 0) | (j < in_front)  # [B or 1, H or 1, S]
        if self.call.key_visible is not None:
            seen = seen & self.call.key_visible[:, None]
        if self._dense is not None:
            seen = seen & self._dense[:, :, 0]
        return seen.any(1).expand(self.call.B, self.call.S)

    @property
    def is_causal(self) -> bool:
        """Whether no row sees a later key than its own. Reads the values of the mask."""
        own = self.own_keys
        if bool((self._bounds[1] <= (own + 1).clamp(min=0)).all()):
            return True
        dense = self._dense
        later = torch.arange(self.call.S, device=own.device) > own[:, None]
        of_pairs = dense is not None and dense.shape[-2:] == (self.call.T, self.call.S)
        return of_pairs and not bool((self._pairs & later).any())

    @property
    def _pairs(self) -> Tensor:
        """bool `[B or 1, H or 1, T, S]`: what is visible, by mask and biases."""
        return self.call.intervals._replace(dense_mask=self._dense).to_dense(
            self.call.T, self.call.S, self.query.device
        )

    @cached_property
    def _dense(self) -> Tensor | None:
        """bool `[B or 1, H or 1, T or 1, S or 1]`: what a dense mask, and biases, leave visible.

        A table of offsets hides keys by -inf and its lowest numbers alone: ALiBi's may differ by thousands.
        """
        dense, bias, of_offsets = self.call.dense_mask, self.call.bias, self.call.offset_bias
        if bias is not None:
            visible = expand_bias(_visible_under(bias), self.call.B)
            dense = visible if dense is None else visible & dense
        if of_offsets is not None:
            seen = of_offsets > torch.finfo(of_offsets.dtype).min / 2
            if not bool(seen.all()):
                visible = diagonals(seen, self.call.T, self.call.S)[None]
                dense = visible if dense is None else visible & dense
        return dense

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor, Tensor]:
        """The half-open key range of every row, `[B or 1, H or 1, T]` each, and the first keys, `[H or 1, 1]`.

        Without `dense` and `key_visible`.
        """
        mask = self.call.intervals
        lo, hi = (x.clamp(0, self.call.S) for x in mask.bounds(self.call.T, self.query.device))
        first = mask.first_keys
        return lo, hi, lo.new_zeros(1, 1) if first is None else first[:, None]

    @cached_property
    def _sees_itself(self) -> Tensor:
        own = self.own_keys
        lo, hi, first = self._bounds
        there = (own >= 0) & (own < self.call.S)
        sees = ((lo <= own) | (own < first)) & (own < hi) & there  # [B or 1, H or 1, T]
        if self.call.S == 0:  # there is no key to look up
            return sees.any(1).expand(self.call.B, self.call.T)
        own = own.clamp(0, self.call.S - 1)
        if self.call.key_visible is not None:
            sees = sees & self.call.key_visible[:, None, own]
        if self._dense is not None:
            dense = self._dense.expand(-1, -1, self.call.T, self.call.S)
            sees = sees & dense[:, :, torch.arange(self.call.T, device=own.device), own]
        return sees.any(1).expand(self.call.B, self.call.T)

    # ------------------------------------------------------------------ attention
    def statistics(
        self, exclude_keys: Tensor | None = None, received: bool | Tensor | None = None
    ) -> AttentionStatistics:
        """`hk.attention_statistics` of the call; `exclude_keys` is bool `[S]` or `[B, S]`.

        Weights of rows, `received`, broadcast to `[B, H, T]`. True counts every row that sees a key, padding included;
        `real_queries[:, None].float()` counts tokens alone. Calls with entmax are refused.
        """
        self.check_softmax("statistics")
        B, H, T, S = self.call.sizes
        query = self.call.query
        call = self.call._replace(
            value=None,
            exclude_keys=check_excluded(exclude_keys, query, (B, S)),
            row_weights=check_row_weights(received, query, (B, H, T), compute_dtype(query.dtype)),
        )
        return measure(call, select(call))

    @torch.no_grad()
    def probabilities(self, rows: slice = slice(None), heads: Sequence[int] | None = None) -> Tensor:
        """`[B, heads, rows, S]`: attention probabilities, before dropout; zeros for a row that sees no key.

        float32, or float64 for float64 operands.

        Args:
            rows: a slice of the query rows, without a step; default all.
            heads: numbers of query heads; default all. Others are not computed.
        """
        check_rows(rows)
        start, stop, _ = rows.indices(self.call.T)
        call = self.call.of_rows(start, stop)
        if heads is not None:
            there = f"the call has heads 0 to {self.call.H - 1}"
            call = call.of_heads(check_heads(heads, self.call.H, "heads", there))
        return eager.row_probabilities(call)

    def support_sizes(self) -> Tensor:
        """int64 `[B, H, T]`: the number of keys to which each row gives a probability above 0."""
        found = [
            (self.probabilities(rows) > 0).sum(-1)
            for rows in blocks(self.call.T, self.call.B * self.call.H * self.call.S)
        ]
        empty = self.call.query.new_zeros((self.call.B, self.call.H, 0), dtype=torch.int64)
        return torch.cat([empty, *found], -1)

    def check_softmax(self, what: str) -> None:
        """Refuse, by the name of `what` is asked, a call with entmax in the place of softmax."""
        if self.alpha is not None:
            refuse(what, "is that of softmax, but the layer has entmax", "leave the layer out")


def _visible_under(added: Tensor) -> Tensor:
    """Which keys a float tensor `[..., S]` that is added to scores leaves visible, bool.

    A key is hidden by -inf, by half of the dtype's lowest number, and by 5000 less than the largest of its row: models
    hide keys by -10000, -1e9 or the lowest number, to which another bias may have been added.
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
