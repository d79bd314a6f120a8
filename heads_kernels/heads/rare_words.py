"""Heads that look at the rarest token of a sentence."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from heads_kernels.errors import refuse
from heads_kernels.heads.layers import AttentionLayer
from heads_kernels.heads.reading import scores_of
from heads_kernels.heads.scores import HeadScores
from heads_kernels.nn.observing import AttentionCall

#: How often each token occurs in a corpus: `{token id: count}`, or a tensor `[vocabulary]`.
Counts: TypeAlias = Mapping[int, int] | Tensor


@dataclass(frozen=True, eq=False)
class RareWords:
    """How often heads look at the rarest tokens (Voita et al. 2019, section 5.3), in sentences that have a rare one.

    Attributes:
        rarest: share of the rows whose most probable key is of the least count in the sentence.
        two_rarest: the same for the two least counts.
        chance: both shares of a head that chose among the words of the sentence at random.
        sentences: how many had a rare token.
    """

    rarest: HeadScores
    two_rarest: HeadScores
    chance: tuple[float, float]
    sentences: int


class RareWordCounts:
    """Hits of every head of `layers` on the rarest tokens of its sentence.

    Args:
        counts: of a corpus; tokens that are not in it have 0.
        common: only sentences count whose rarest token is not among so many most frequent ones.

    Raises:
        TypeError, ValueError: counts of another form; a batch without `input_ids`.
    """

    def __init__(self, counts: Counts, common: int, layers: Iterable[AttentionLayer]) -> None:
        self.counts = _checked(counts)  # of each token id, and 0 for those beyond
        descending = self.counts.sort(descending=True).values
        self.most = int(descending[min(common, len(descending) - 1)])
        self.layers = list(layers)
        self.hits = {layer.index: torch.zeros(2, layer.num_heads).double() for layer in self.layers}
        self.rows = {layer.index: torch.zeros(()).double() for layer in self.layers}
        # Each word of a sentence is a row, which at random chooses a target with their share of its words.
        self.expected = torch.zeros(2).double()
        self.words = self.sentences = 0
        self.targets: Tensor | None = (
            None  # of this batch, bool [2, B, T]: the rarest, the two rarest
        )
        self.batch: Any = None

    def next_batch(self, batch: Any) -> None:
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            refuse("counts", "are given, but a batch has no 'input_ids'", "pass it in a mapping")
        self.batch, self.targets = batch, None

    def look(
        self, layer: AttentionLayer, call: AttentionCall, chosen: Tensor, words: Tensor
    ) -> None:
        """Count the hits of `chosen` `[B, H, T]`, the most probable key of each row; rows are `words` `[B, T]`."""
        if layer.index not in self.hits:
            return
        if self.targets is None:
            self.targets = self._targets(words)
        rows = words & self.targets[0].any(1, keepdim=True)  # [B, T]
        counted = (rows[:, None] & (chosen >= 0)).double()
        targets = self.targets[:, :, None].expand(-1, -1, call.H, -1)
        hits = targets.gather(3, chosen.clamp(min=0).expand(2, -1, -1, -1)) * counted
        self.hits[layer.index] = self.hits[layer.index].to(hits.device) + hits.sum((1, 3))
        self.rows[layer.index] = self.rows[layer.index].to(hits.device) + rows.sum()

    def _targets(self, words: Tensor) -> Tensor:
        """The rarest and the two rarest of `words` in each sentence of the batch that has a rare one."""
        ids = self.batch["input_ids"]
        counts = self.counts.to(ids.device)[ids.clamp(max=len(self.counts) - 1)]
        counts = counts.masked_fill(~words, torch.iinfo(torch.int64).max)
        least = counts.amin(1, keepdim=True)
        rare = words & (least <= self.most)
        beyond = counts.masked_fill(counts == least, torch.iinfo(torch.int64).max)
        second = beyond.amin(1, keepdim=True)
        targets = torch.stack([counts == least, counts <= second]) & rare
        self.expected += targets.sum((1, 2)).double().cpu()
        self.words += int(rare.sum())
        self.sentences += int(rare.any(1).sum())
        return targets

    def result(self) -> RareWords | None:
        """None where no sentence has a rare token."""
        if not self.sentences:
            return None
        shares = [self.hits[layer.index] / self.rows[layer.index] for layer in self.layers]
        rarest = scores_of(self.layers, [each[0] for each in shares], "to the rarest")
        two_rarest = scores_of(self.layers, [each[1] for each in shares], "to the two rarest")
        one, two = (self.expected / self.words).tolist()
        return RareWords(rarest, two_rarest, (one, two), self.sentences)


def _checked(counts: Counts) -> Tensor:
    """int64 `[V + 1]`: the count of each token id, and a 0 for ids beyond."""
    instead = "pass {token id: count}, or an integer tensor [vocabulary]"
    if isinstance(counts, Mapping):
        try:
            ids, times = [[*map(operator.index, each)] for each in (counts, counts.values())]
        except TypeError:
            refuse("counts", "holds something else than ints", instead)
        if not ids or min(ids) < 0:
            refuse("counts", "has a negative token id" if ids else "is empty", instead)
        table = torch.zeros(max(ids) + 1, dtype=torch.int64)
        table[ids] = torch.tensor(times)
    elif isinstance(counts, Tensor):
        if counts.dim() != 1 or counts.is_floating_point() or not len(counts):
            refuse("counts", f"is {counts.dtype} {list(counts.shape)}", instead)
        table = counts.long().cpu()
    else:
        refuse("counts", f"is a {type(counts).__name__}", instead, TypeError)
    if bool((table < 0).any()):
        refuse("counts", f"has the count {int(table.min())}", "pass counts of at least 0")
    return torch.nn.functional.pad(table, (0, 1))
