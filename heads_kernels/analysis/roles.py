"""Roles of heads: positional, syntactic, rare words, and repeated tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from heads_kernels.analysis.head_scores import HeadScores, scores_of, short_name, text_table
from heads_kernels.analysis.observe import TokenKeys, each_batch, keys_by_kind, reading, run
from heads_kernels.analysis.positions import OffsetCounts
from heads_kernels.analysis.role_counts import (
    Counts,
    RareWordCounts,
    RareWords,
    Relation,
    RelationCounts,
    Relations,
    RepeatCounts,
    Repeats,
)
from heads_kernels.checks import check_flag, check_size, refuse
from heads_kernels.heads.layers import AttentionLayer, attention_layers, choose_layers
from heads_kernels.nn.attention_call import AttentionCall


@dataclass(frozen=True)
class Role:
    """A head with a role: `share` of its rows do `what`; `baseline` is the share for a head without the role."""

    layer: str
    head: int
    role: str
    what: str
    share: float
    baseline: float | None


@dataclass(frozen=True, eq=False, repr=False)
class HeadRoles:
    """The result of `roles`; `positional`, `syntactic`, `rare_word` and `repeating` list heads, and `print` shows them.

    Attributes:
        offset: int64 `[H]` of each layer: the most frequent offset of the most probable key from its row.
        offset_share: the share of the rows with that offset.
        relations: accuracy along each relation and direction.
        rare_words: None if no counts were given or no sentence has a rare token.
        repeats: scores of previous-token, duplicate-token and induction heads; None if they were not asked for.
    """

    offset: tuple[Tensor, ...]
    offset_share: HeadScores
    relations: tuple[Relation, ...] = ()
    rare_words: RareWords | None = None
    repeats: Repeats | None = None

    def positional(self, at_least: float = 0.9) -> list[Role]:
        """Heads whose most probable key is at one offset in 90 % of the rows (Voita et al. 2019, section 5.1)."""
        offsets = dict(zip(self.offset_share.layers, self.offset, strict=True))
        return [
            replace(role, what=f"offset {int(offsets[role.layer][role.head]):+d}")
            for role in _roles(self.offset_share, at_least, "positional")
        ]

    def syntactic(self, margin: float = 0.1) -> list[Role]:
        """Heads whose accuracy along a relation is 10 percentage points above its baseline (ibid., section 5.2)."""
        found: list[Role] = []
        for of in self.relations:
            what = f"{of.name} {of.direction}"
            found += _roles(of.accuracy, of.baseline + margin, "syntactic", what, of.baseline)
        return found

    def rare_word(self, at_least: float = 0.5) -> list[Role]:
        """Heads that look at the rarest token in half of the rows (ibid., section 5.3; there in the first layer).

        Since chance is high in short sentences, the share must also be at least midway between chance and 1.
        """
        if self.rare_words is None:
            return []
        chance = self.rare_words.chance[0]
        least = max(at_least, (1 + chance) / 2)
        return _roles(self.rare_words.rarest, least, "rare words", "the rarest token", chance)

    def repeating(self, at_least: float = 0.4) -> list[Role]:
        """Heads whose rows give 40 % of their attention to the previous token, to a copy of theirs, or behind it.

        The threshold is a heuristic; TransformerLens' head detector has none.
        """
        if (of := self.repeats) is None:
            return []
        return [
            *_roles(of.previous_token, at_least, "previous token", "the token before"),
            *_roles(of.duplicate_token, at_least, "duplicate token", "an earlier copy"),
            *_roles(of.induction, at_least, "induction", "behind an earlier copy"),
        ]

    def __repr__(self) -> str:
        found = self.positional() + self.syntactic() + self.rare_word() + self.repeating()
        heads = sum(map(len, self.offset))
        title = f"HeadRoles: {len({(r.layer, r.head) for r in found})} of {heads} heads have a role"
        if not found:
            most = max((float(each.max()) for each in self.offset_share.scores if len(each)), default=0)
            return f"{title}; the highest share of rows at one offset is {most:.2f}"
        header = ["layer", "role", "what", "head", "share", "baseline"]
        rows = []
        for r in found:
            baseline = "" if r.baseline is None else f"{r.baseline:.2f}"
            rows.append([short_name(r.layer), r.role, r.what, str(r.head), f"{r.share:.2f}", baseline])
        return f"{title}\n{text_table([header, *rows], left=3)}"


def _roles(scores: HeadScores, least: float, role: str, what: str = "", baseline: float | None = None) -> list[Role]:
    """The heads with a share of at least `least`."""
    return [
        Role(name, head, role, what, share, baseline)
        for name, layer in zip(scores.layers, scores.scores, strict=True)
        for head, share in enumerate(layer.tolist())
        if share >= least
    ]


def roles(
    model: nn.Module,
    data: Iterable[Any],
    *,
    layers: Iterable[int | str] | None = None,
    special: TokenKeys | None = None,
    relations: Sequence[Relations] | None = None,
    counts: Counts | None = None,
    common: int = 500,
    repeats: bool = False,
) -> HeadRoles:
    """Find roles of heads from the most probable key of each row (`hk.attention_statistics`).

    With `repeats` also previous-token, duplicate-token and induction heads, by the exact probability of the key that
    defines them, without maps. TransformerLens' head detector counts all earlier copies of a token and divides by all
    rows; here it is the latest copy and the rows that have one. For random tokens repeated once, the usual test, these
    are the same but for that divisor.

    All layers are searched for positional heads. Relations, counts and repeats apply to the self-attention of the
    encoder, or of the decoder if there is no encoder among `layers`. Padding on either side does not count. Heads have
    their current numbers. The model runs in evaluation mode.

    Args:
        model, data, layers: as in `statistics`.
        special: special tokens, such as [CLS], [SEP] or EOS, which count neither as rows nor as the most probable key.
            Token ids, looked up in the batch's `input_ids`, or a function of the batch that returns bool `[B, S]`.
        relations: a mapping `{relation: [(head, dependent), ...]}` for each example of the data, in order, from any
            parser. Token positions start at the first token that is not padding, such as [CLS].
        counts: how often each token id occurs in a corpus, for rare words; batches must then have `input_ids`.
        repeats: whether to score heads by repeated tokens; batches must then have `input_ids`.
        common: for rare words, sentences whose rarest token is among the `common` most frequent ones do not count.

    Raises:
        TypeError, ValueError: as `statistics`; also if relations name tokens that do not exist, or do not match the
            number of examples.
    """
    there = attention_layers(model)
    chosen = choose_layers(there, layers)
    check_flag("repeats", repeats)
    check_size("common", common, 0)
    encoder = [layer for layer in chosen if layer.kind == "encoder"]
    readers = encoder or [layer for layer in chosen if layer.kind == "decoder"]
    asked = (("relations", relations), ("counts", counts), ("repeats", repeats or None))
    for name, given in asked:
        if given is not None and not any(layer.num_heads for layer in readers):
            refuse(name, "is given, but no layer that reads the sentences has a head left", "leave it out")
    counters: dict[str, Any] = {}  # by the field of the result
    if relations is not None:
        counters["relations"] = RelationCounts(relations, readers)
    if counts is not None:
        counters["rare_words"] = RareWordCounts(counts, common, readers)
    if repeats:
        counters["repeats"] = RepeatCounts(readers)
    offsets = OffsetCounts(chosen)
    excluded: dict[str, Tensor] = {}  # of this batch, by kind of layer bool [B, S]

    def look(layer: AttentionLayer, call: AttentionCall) -> None:
        found = call.statistics(excluded.get(layer.kind))
        words = call.real_queries
        no_words = excluded.get("decoder" if layer.kind == "cross" else layer.kind)
        if no_words is not None:
            words = words & ~no_words
        offsets.add(layer, call, found.argmax, words)
        if layer in readers:
            for counter in counters.values():
                counter.look(layer, call, found, words)

    with reading(model, look, chosen):
        for batch in each_batch(data):
            excluded = keys_by_kind(special, batch, there, "special")
            for counter in counters.values():
                counter.next_batch(batch)
            run(model, batch)
    most = [_most_frequent(layer, offsets.counts[layer.index].cpu()) for layer in chosen]
    shares = (share for _, share in most)
    return HeadRoles(
        offset=tuple(offset for offset, _ in most),
        offset_share=scores_of(chosen, shares, "share of the most frequent offset"),
        **{name: counter.result() for name, counter in counters.items()},
    )


def _most_frequent(layer: AttentionLayer, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The most frequent offset of each head, and its share of the rows."""
    rows = counts.sum(1)
    if not bool(rows.all()):
        was = f"has no word that reaches {layer}"
        refuse("data", was, "pass batches with real tokens, or name the others in layers")
    count, place = counts.max(1)
    return place - counts.shape[1] // 2, count.double() / rows
