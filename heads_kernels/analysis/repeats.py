"""Heads that look at the previous token, at an earlier copy of their token, or behind it (induction)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from heads_kernels.analysis.batches import ids_of
from heads_kernels.analysis.head_scores import HeadScores, Shares
from heads_kernels.analysis.positions import Band, attended
from heads_kernels.checks import refuse
from heads_kernels.heads.layers import AttentionLayer
from heads_kernels.nn.attention_call import AttentionCall
from heads_kernels.ops.statistics import AttentionStatistics

#: The names of the three scores.
_WHAT: Final = ("previous token", "duplicate token", "induction")


@dataclass(frozen=True, eq=False)
class Repeats:
    """The mean probability that the rows of a head give to one key, over the rows that have such a key.

    Attributes:
        previous_token: the token before the row.
        duplicate_token: the latest earlier token with the row's own id.
        induction: the token after that one (Elhage et al. 2021, Olsson et al. 2022).
        rows: the number of rows with a key of each of these kinds.
    """

    previous_token: HeadScores
    duplicate_token: HeadScores
    induction: HeadScores
    rows: tuple[int, int, int]


class RepeatCounts:
    """The sums of every head of `layers` for `Repeats`.

    Raises:
        ValueError: a batch has no `input_ids`.
    """

    def __init__(self, layers: Iterable[AttentionLayer]) -> None:
        self.shares = Shares(layers, 3)
        self.keys: Tensor | None = None  # of this batch, int64 [3, B, T]; -1 where there is none

    def next_batch(self, batch: Any) -> None:
        self.ids, self.keys = ids_of(batch, "repeats"), None

    def look(
        self, layer: AttentionLayer, call: AttentionCall, found: AttentionStatistics, words: Tensor
    ) -> None:
        """Add the probabilities of a call; rows and keys are `words` `[B, T]`."""
        if self.keys is None:
            ids = self.ids.to(words.device)
            if ids.shape != words.shape:
                was = f"has 'input_ids' {list(ids.shape)}, but {layer} runs on {list(words.shape)} tokens"
                refuse("data", was, "pass whole sequences, without a cache")
            self.keys = earlier_keys(ids, words)
        ones = words.new_ones((1, call.S, 1))
        # Where there is no key, -1, the band is empty.
        bands = [Band(key.clamp(min=0), key + 1, ones) for key in self.keys]
        sums = [attended(call, found.lse, band)[..., 0].double().sum((0, 2)) for band in bands]
        self.shares.add(layer, torch.stack(sums), (self.keys >= 0).sum((1, 2)))

    def result(self) -> Repeats:
        rows = self.shares.rows
        if not all(bool(rows[x.index].all()) for x in self.shares.layers if x.num_heads):
            was = "is True, but no token of the data comes twice in an example"
            refuse("repeats", was, "pass longer texts, or random tokens repeated once")
        previous, duplicate, induction = (
            self.shares.scores(kind, what) for kind, what in enumerate(_WHAT)
        )
        one, two, three = rows[self.shares.layers[0].index].long().tolist()
        return Repeats(previous, duplicate, induction, (one, two, three))


def earlier_keys(ids: Tensor, words: Tensor) -> Tensor:
    """The key that a row of each kind of head looks at, int64 `[3, B, T]`; -1 where there is none.

    Args:
        ids: int64 `[B, T]`.
        words: bool `[B, T]`, the tokens that are rows and keys.
    """
    T = ids.shape[1]
    place = torch.arange(T, device=ids.device).expand_as(ids)
    # Sorted by id, and by place among equals, the token before is the latest earlier copy.
    order = torch.where(words, ids, -1).argsort(stable=True, dim=1)
    before = torch.nn.functional.pad(order[:, :-1], (1, 0))
    is_copy = (ids.gather(1, order) == ids.gather(1, before)) & words.gather(1, order)
    is_copy &= words.gather(1, before)
    is_copy[:, :1] = False
    copy = torch.full_like(ids, -1).scatter(1, order, torch.where(is_copy, before, -1))
    keys = torch.stack([place - 1, copy, torch.where(copy < 0, -1, copy + 1)])
    shown = words.expand(3, -1, -1).gather(2, keys.clamp(min=0))
    return torch.where((keys >= 0) & shown & words, keys, -1)
