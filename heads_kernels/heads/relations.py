"""Heads that look along syntactic relations: from a word to its head, or from the head to it."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from heads_kernels.errors import refuse
from heads_kernels.heads.layers import AttentionLayer
from heads_kernels.heads.places import first_real
from heads_kernels.heads.reading import scores_of
from heads_kernels.heads.scores import HeadScores
from heads_kernels.nn.observing import AttentionCall

#: Of one sentence: `{relation: [(head, dependent), ...]}`, tokens counted from the first that is no padding.
Relations: TypeAlias = Mapping[str, Sequence[tuple[int, int]]]


@dataclass(frozen=True, eq=False)
class Relation:
    """How well heads follow one relation in one direction.

    Attributes:
        name: of the relation, for example "nsubj".
        direction: "to head": rows are dependents and should look at their head; "to dependent": the other way.
        pairs: how many there were.
        offset, baseline: the most frequent offset from the row to its partner, in tokens, and the share of the pairs
            that have it: what a head would reach that looked at this offset always.
        accuracy: share of the pairs whose row has its partner as most probable key; of a layer that runs several times
            in a pass (ALBERT) the mean over its runs.
    """

    name: str
    direction: str
    pairs: int
    offset: int
    baseline: float
    accuracy: HeadScores


class RelationCounts:
    """Hits of every head of `layers` along `relations`, an entry for each example of the data in its order.

    Raises:
        TypeError, ValueError: entries that are no `{relation: [(head, dependent), ...]}` of tokens that exist, or not
            as many as there are examples.
    """

    def __init__(self, relations: Sequence[Relations], layers: Iterable[AttentionLayer]) -> None:
        if not isinstance(relations, Sequence):
            was = f"is a {type(relations).__name__}"
            refuse("relations", was, "pass a list with an entry for each example", TypeError)
        self.sentences = [_checked(number, entry) for number, entry in enumerate(relations)]
        names = sorted({name for sentence in self.sentences for name, _, _ in sentence})
        self.numbers = {name: 2 * number for number, name in enumerate(names)}
        self.offsets: list[Counter[int]] = [Counter() for _ in range(2 * len(names))]
        self.layers = list(layers)
        self.hits = {
            layer.index: torch.zeros(len(self.offsets), layer.num_heads, dtype=torch.int64)
            for layer in self.layers
        }
        self.looked = {  # pairs, once for each run
            layer.index: torch.zeros(len(self.offsets), dtype=torch.int64) for layer in self.layers
        }
        self.first, self.B = 0, 0  # the first example of this batch, and its size once it is known
        self.pairs = torch.zeros(4, 0, dtype=torch.int64)

    def next_batch(self) -> None:
        self.first, self.B = self.first + self.B, 0

    def look(self, layer: AttentionLayer, call: AttentionCall, chosen: Tensor) -> None:
        """Count the hits of `chosen` `[B, H, T]`, the most probable key of each row."""
        if layer.index not in self.hits:
            return
        if not self.B:
            self.B = call.B
            self.pairs = self._pairs(call.real_queries)
        relation, example, row, key = self.pairs
        hits = (chosen[example, :, row] == key[:, None]).long()  # [pairs, H]
        self.hits[layer.index] = self.hits[layer.index].to(hits.device).index_add(0, relation, hits)
        looked = torch.bincount(relation, minlength=len(self.offsets))
        self.looked[layer.index] = self.looked[layer.index].to(hits.device) + looked

    def _pairs(self, real: Tensor) -> Tensor:
        """Relation, example, row and key of the pairs of this batch, `[4, pairs]`."""
        sentences = self.sentences[self.first : self.first + len(real)]
        if len(sentences) < len(real):
            was = f"has {len(self.sentences)} entries, but data has more examples"
            refuse("relations", was, "pass one for each, empty where there is nothing to say")
        pairs = []
        for example, sentence in enumerate(sentences):
            for name, head, dependent in sentence:
                number = self.numbers[name]
                pairs += [
                    (number, example, dependent, head),
                    (number + 1, example, head, dependent),
                ]
        for number, _, row, key in pairs:
            self.offsets[number][key - row] += 1
        found = torch.tensor(pairs, dtype=torch.int64, device=real.device).view(-1, 4).T
        found[2:] += first_real(real)[found[1]]
        outside = found[2] >= real.shape[1]
        outside |= ~real[found[1], found[2].clamp(max=real.shape[1] - 1)]
        if bool(outside.any()):
            example = int(found[1, outside][0])
            was = f"names a token beyond the {int(real[example].sum())}"
            refuse("relations", f"{was} of example {self.first + example}", "count from its first")
        return found

    def result(self) -> tuple[Relation, ...]:
        """Both directions of each relation, those without pairs left out."""
        seen = self.first + self.B
        if seen < len(self.sentences):
            was = f"has {len(self.sentences)} entries, but data has {seen} examples"
            refuse("relations", was, "pass one for each")
        return tuple(
            self._relation(name, number + way, direction)
            for name, number in self.numbers.items()
            for way, direction in enumerate(("to head", "to dependent"))
        )

    def _relation(self, name: str, number: int, direction: str) -> Relation:
        pairs = self.offsets[number].total()
        offset, count = self.offsets[number].most_common(1)[0]
        shares = (
            self.hits[layer.index][number] / self.looked[layer.index][number].clamp(min=1)
            for layer in self.layers
        )
        accuracy = scores_of(self.layers, shares, f"accuracy of {name} {direction}")
        return Relation(name, direction, pairs, offset, count / pairs, accuracy)


def _checked(number: int, entry: Relations) -> list[tuple[str, int, int]]:
    """The pairs of one sentence, (relation, head, dependent) each."""
    instead = "pass {relation: [(head, dependent), ...]}, tokens counted from 0"
    if not isinstance(entry, Mapping):
        refuse(f"relations[{number}]", f"is a {type(entry).__name__}", instead, TypeError)
    found = []
    for name, pairs in entry.items():
        argument = f"relations[{number}][{name!r}]"
        if not isinstance(pairs, Iterable):
            refuse(argument, f"is {pairs!r}", instead, TypeError)
        for pair in pairs:
            try:
                head, dependent = map(operator.index, pair)
            except (TypeError, ValueError):
                refuse(argument, f"has {pair!r}", instead)
            if head < 0 or dependent < 0:
                refuse(argument, f"has {pair!r}", instead)
            found.append((name, head, dependent))
    return found
