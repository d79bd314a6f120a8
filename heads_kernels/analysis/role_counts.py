"""What `roles` counts of syntactic relations, of the rarest tokens of a sentence, and of repeated tokens."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from heads_kernels.analysis.head_scores import HeadScores, Shares
from heads_kernels.analysis.positions import attended, first_real
from heads_kernels.checks import refuse, refuse_type
from heads_kernels.heads.layers import AttentionLayer
from heads_kernels.nn.attention_call import AttentionCall
from heads_kernels.ops.statistics import AttentionStatistics

#: Of one sentence: `{relation: [(head, dependent), ...]}`, tokens counted from the first that is no padding.
Relations: TypeAlias = Mapping[str, Sequence[tuple[int, int]]]


@dataclass(frozen=True, eq=False)
class Relation:
    """How well heads follow one relation in one direction.

    Attributes:
        name: of the relation, for example "nsubj".
        direction: "to head": rows are dependents and should look at their head; "to dependent": the other way.
        pairs: number of pairs.
        offset, baseline: the most frequent offset from the row to its partner, in tokens, and the share of the pairs
            that have it, which is the accuracy of a head that always looks at this offset.
        accuracy: share of the pairs in which the partner is the most probable key of the row; for a layer that runs
            several times in a pass (ALBERT) the mean over its runs.
    """

    name: str
    direction: str
    pairs: int
    offset: int
    baseline: float
    accuracy: HeadScores


class RelationCounts:
    """Hits of every head of `layers` along `relations`, an entry for each example of the data in its order."""

    def __init__(self, relations: Sequence[Relations], layers: Iterable[AttentionLayer]) -> None:
        if not isinstance(relations, Sequence):
            refuse_type("relations", relations, "pass a list with an entry for each example")
        self.sentences = [_checked(number, entry) for number, entry in enumerate(relations)]
        pairs = list(chain(*self.sentences))
        kinds = list(product(sorted({name for name, *_ in pairs}), ("to head", "to dependent")))
        self.numbers = {kind: number for number, kind in enumerate(kinds)}
        self.offsets: list[Counter[int]] = [Counter() for _ in kinds]
        for name, direction, row, key in pairs:
            self.offsets[self.numbers[name, direction]][key - row] += 1
        self.shares = Shares(layers, len(kinds))  # of pairs, once for each run
        self.first, self.B = 0, 0  # the first example of this batch, and its size once it is known
        self.pairs = torch.zeros(4, 0, dtype=torch.int64)

    def next_batch(self, batch: Any) -> None:
        self.first, self.B = self.first + self.B, 0

    def look(self, layer: AttentionLayer, call: AttentionCall, found: AttentionStatistics, words: Tensor) -> None:
        """Count the rows of a call whose most probable key is their partner."""
        if not self.B:
            self.B = call.B
            self.pairs = self._pairs(call.real_queries)
        relation, example, row, key = self.pairs
        hits = (found.argmax[example, :, row] == key[:, None]).long()  # [pairs, H]
        sums = hits.new_zeros(len(self.offsets), call.H).index_add(0, relation, hits)
        self.shares.add(layer, sums, torch.bincount(relation, minlength=len(self.offsets)))

    def _pairs(self, real: Tensor) -> Tensor:
        """Relation, example, row and key of the pairs of this batch, `[4, pairs]`."""
        sentences = self.sentences[self.first : self.first + len(real)]
        if len(sentences) < len(real):
            was = f"has {len(self.sentences)} entries, but data has more examples"
            refuse("relations", was, "pass one for each, empty where there is nothing to say")
        pairs = [
            (self.numbers[name, direction], example, row, key)
            for example, sentence in enumerate(sentences)
            for name, direction, row, key in sentence
        ]
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
        seen = self.first + self.B
        if seen < len(self.sentences):
            refuse("relations", f"has {len(self.sentences)} entries, but data has {seen} examples", "pass one for each")
        found = []
        for (name, direction), number in self.numbers.items():
            offsets = self.offsets[number]
            [(offset, count)] = offsets.most_common(1)
            baseline = count / offsets.total()
            accuracy = self.shares.scores(number, f"accuracy of {name} {direction}")
            found.append(Relation(name, direction, offsets.total(), offset, baseline, accuracy))
        return tuple(found)


def _checked(number: int, entry: Relations) -> list[tuple[str, str, int, int]]:
    """Relation, direction, row and key of the pairs of one sentence, in both directions."""
    instead = "pass {relation: [(head, dependent), ...]}, tokens counted from 0"
    if not isinstance(entry, Mapping):
        refuse_type(f"relations[{number}]", entry, instead)
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
            found.append((name, "to head", dependent, head))
            found.append((name, "to dependent", head, dependent))
    return found


# ---------------------------------------------------------------------- by token ids
class _TokenCounts(ABC):
    """Sums of every head of `layers`, by what `find` computes once for each batch from its `input_ids`.

    `argument` is the argument of `roles` that needs token ids; errors name it.
    """

    argument: str

    def __init__(self, layers: Iterable[AttentionLayer], n: int) -> None:
        self.shares = Shares(layers, n)

    @abstractmethod
    def find(self, ids: Tensor, words: Tensor) -> Tensor:
        """What all layers share, of ids `[B, T]` and the tokens that are rows and keys, bool `[B, T]`."""

    def next_batch(self, batch: Any) -> None:
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            refuse(self.argument, "is given, but a batch has no 'input_ids'", "pass it in a mapping")
        self.ids: Tensor = batch["input_ids"]
        self.found: Tensor | None = None

    def of_batch(self, layer: AttentionLayer, words: Tensor) -> Tensor:
        if self.found is None:
            ids = self.ids.to(words.device)
            if ids.shape != words.shape:
                was = f"has 'input_ids' {list(ids.shape)}, but {layer} runs on {list(words.shape)} tokens"
                refuse("data", was, "pass whole sequences, without a cache")
            self.found = self.find(ids, words)
        return self.found


# ---------------------------------------------------------------------- rare words
#: How often each token occurs in a corpus: `{token id: count}`, or a tensor `[vocabulary]`.
Counts: TypeAlias = Mapping[int, int] | Tensor


@dataclass(frozen=True, eq=False)
class RareWords:
    """How often heads look at the rarest tokens (Voita et al. 2019, section 5.3), in sentences with a rare token.

    Attributes:
        rarest: share of the rows whose most probable key has the lowest count in the sentence.
        two_rarest: the same for the two lowest counts.
        chance: both shares for a head that chooses among the words of the sentence at random.
        sentences: number of sentences with a rare token.
    """

    rarest: HeadScores
    two_rarest: HeadScores
    chance: tuple[float, float]
    sentences: int


class RareWordCounts(_TokenCounts):
    """Hits of every head of `layers` on the rarest tokens of its sentence; `counts` and `common` as in `roles`."""

    argument = "counts"

    def __init__(self, counts: Counts, common: int, layers: Iterable[AttentionLayer]) -> None:
        super().__init__(layers, 2)
        self.counts = _checked_counts(counts)  # of each token id, and 0 for those beyond
        descending = self.counts.sort(descending=True).values
        self.most = int(descending[min(common, len(descending) - 1)])
        # Each word of a sentence is a row, which at random chooses a target with their share of its words.
        self.expected = torch.zeros(2).double()
        self.words = self.sentences = 0

    def look(self, layer: AttentionLayer, call: AttentionCall, found: AttentionStatistics, words: Tensor) -> None:
        """Count the `words` `[B, T]` of a call whose most probable key is a target."""
        targets = self.of_batch(layer, words)
        chosen = found.argmax  # [B, H, T]
        hits = [each[:, None].expand(-1, call.H, -1).gather(2, chosen.clamp(min=0)) & (chosen >= 0) for each in targets]
        self.shares.add_rows(layer, hits, words & targets[0].any(1, keepdim=True))

    def find(self, ids: Tensor, words: Tensor) -> Tensor:
        """bool `[2, B, T]`: the rarest and the two rarest words of each sentence that has a rare one."""
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
        names = ("to the rarest", "to the two rarest")
        rarest, two_rarest = (self.shares.scores(n, what) for n, what in enumerate(names))
        one, two = (self.expected / self.words).tolist()
        return RareWords(rarest, two_rarest, (one, two), self.sentences)


def _checked_counts(counts: Counts) -> Tensor:
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
        refuse_type("counts", counts, instead)
    if bool((table < 0).any()):
        refuse("counts", f"has the count {int(table.min())}", "pass counts of at least 0")
    return torch.nn.functional.pad(table, (0, 1))


# ---------------------------------------------------------------------- repeated tokens
#: The kinds of heads, in the order of their sums.
_KINDS: Final = ("previous token", "duplicate token", "induction")


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


class RepeatCounts(_TokenCounts):
    """The sums of every head of `layers` for `Repeats`."""

    argument = "repeats"

    def __init__(self, layers: Iterable[AttentionLayer]) -> None:
        super().__init__(layers, len(_KINDS))

    def look(self, layer: AttentionLayer, call: AttentionCall, found: AttentionStatistics, words: Tensor) -> None:
        """Add the probabilities of a call; rows and keys are `words` `[B, T]`."""
        keys = self.of_batch(layer, words)
        ones = words.new_ones((1, call.S, 1))
        # Where there is no key, -1, the band is empty.
        shares = [attended(call, found.lse, key.clamp(min=0), key + 1, ones)[..., 0] for key in keys]
        sums = [share.double().sum((0, 2)) for share in shares]
        self.shares.add(layer, torch.stack(sums), (keys >= 0).sum((1, 2)))

    def find(self, ids: Tensor, words: Tensor) -> Tensor:
        """int64 `[3, B, T]`: the key that a row of each kind of head looks at; -1 where there is none."""
        place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
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

    def result(self) -> Repeats:
        rows = [self.shares.rows[layer.index] for layer in self.shares.layers if layer.num_heads]
        if not all(bool(each.all()) for each in rows):
            was = "is True, but no token of the data comes twice in an example"
            refuse("repeats", was, "pass longer texts, or random tokens repeated once")
        previous, duplicate, induction = (self.shares.scores(kind, what) for kind, what in enumerate(_KINDS))
        one, two, three = rows[0].long().tolist()
        return Repeats(previous, duplicate, induction, (one, two, three))
