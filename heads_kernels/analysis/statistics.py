"""Statistics of each head: how sharply and how far it attends, to what, and what the tokens of each example receive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final

import torch
from torch import Tensor, nn

from heads_kernels.analysis.head_scores import HeadScores, Shares, grid
from heads_kernels.analysis.observe import TokenKeys, each_batch, keys_by_kind, reading, run
from heads_kernels.analysis.positions import OffsetCounts, attended, own_keys
from heads_kernels.checks import check_size, refuse, refuse_type
from heads_kernels.heads.layers import AttentionLayer, attention_layers, choose_layers
from heads_kernels.nn.attention_call import AttentionCall

#: The measures of each head, in this order, before the token sets.
MEASURES = ("confidence", "entropy", "distance", "to_self", "to_previous", "to_next")


#: The units of measures that are not probabilities.
_UNITS: Final = {"entropy": "nats", "distance": "tokens"}


@dataclass(frozen=True, eq=False, repr=False)
class HeadStatistics:
    """Means over real query rows, for each head of each attention layer.

    `print` shows a grid for each mean, a row per layer and a column per head.

    Attributes:
        confidence: the largest probability of a row (Voita et al. 2019, section 4).
        entropy: of the probabilities of a row, in nats.
        distance: `sum_j p_ij |j - i|`, in tokens.
        to_self, to_previous, to_next: probability of the row's own token, the previous and the next one.
        to_tokens: probability of a set of tokens, by the name of the set.
        offsets: int64 `[H, 2 N + 1]` of each layer: number of rows whose most probable key is -N, ..., N tokens from
            the row; rows with only excluded keys do not count.
        rows: number of rows of each layer, 0 for layers without heads.
    """

    confidence: HeadScores
    entropy: HeadScores
    distance: HeadScores
    to_self: HeadScores
    to_previous: HeadScores
    to_next: HeadScores
    to_tokens: dict[str, HeadScores]
    offsets: tuple[Tensor, ...]
    rows: tuple[int, ...]

    @property
    def measures(self) -> dict[str, HeadScores]:
        """All means by name; those of token sets are named `to_<name of the set>`."""
        sets = {f"to_{name}": scores for name, scores in self.to_tokens.items()}
        return {**{name: getattr(self, name) for name in MEASURES}, **sets}

    def __repr__(self) -> str:
        fewest, most = min(self.rows), max(self.rows)
        of = str(most) if fewest == most else f"{fewest} to {most}"
        grids = [
            f"{name} ({_UNITS.get(name, 'probability')})\n{grid(scores)}" for name, scores in self.measures.items()
        ]
        return "\n\n".join([f"HeadStatistics: means over {of} query rows of a layer", *grids])


def statistics(
    model: nn.Module,
    data: Iterable[Any],
    *,
    layers: Iterable[int | str] | None = None,
    exclude_keys: TokenKeys | None = None,
    token_sets: Mapping[str, TokenKeys] | None = None,
) -> HeadStatistics:
    """Statistics of what the heads of a model attend to, computed while it runs without storing maps `[T, S]`.

    Confidence, entropy and the most probable key come from `hk.attention_statistics`. The rest are sums
    `sum_j p_ij f_j` within bands of keys, which the operator computes with features of the keys (1, position, token
    sets) as values. Memory beyond the model's own is a few numbers per head and row.

    Padding counts neither as a row nor in distances: results do not depend on the side of the padding. In
    encoder-decoder attention, positions are counted from the first real row and the first real key, so that "self" is
    the key at the same position. Padding in the middle of a sequence counts as positions. For a layer that runs several
    times in a pass (ALBERT) the mean is over its runs. Heads have their current numbers. The model runs in evaluation
    mode.

    Args:
        model: with attention layers (`hk.heads.attention_layers`); a transformers model after
            `hk.integrations.transformers.use(model)`.
        data: an iterable of batches, each a mapping of keyword arguments, a tuple or list of arguments, or one argument
            of the model.
        layers: indices or names of the layers to read; default all. If the data reach only one tower of a model, name
            its layers.
        exclude_keys: tokens that may not be the most probable key, for `confidence` and `offsets`: [CLS], [SEP], EOS.
            Nothing is renormalised, and their rows count. Token ids, looked up in the batch's `input_ids`
            (`decoder_input_ids` for the keys of a decoder), or a function of the batch that returns bool `[B, S]`, or
            one per kind of layer, `{"encoder" | "decoder" | "cross": [B, S]}`.
        token_sets: for `to_tokens`, `{name: tokens}`, with tokens as in `exclude_keys`.

    Raises:
        TypeError, ValueError: an argument is invalid; data has no batches, or no token that reaches a layer; the
            attention function of a transformers model is not this package's.
    """
    there = attention_layers(model)
    chosen = choose_layers(there, layers)
    if not isinstance(token_sets, (Mapping, NoneType)):
        refuse_type("token_sets", token_sets, "pass {name: token ids or function of a batch}")
    sets = token_sets or {}
    measures = [*MEASURES, *(f"to {name}" for name in sets)]
    means, offsets = Shares(chosen, len(measures)), OffsetCounts(chosen)
    excluded: dict[str, Tensor] = {}  # of this batch, by kind of layer bool [B, S]
    members: dict[str, dict[str, Tensor]] = {}

    def look(layer: AttentionLayer, call: AttentionCall) -> None:
        rows = call.real_queries
        found = call.statistics(excluded.get(layer.kind))
        own_sets = [_set(name, member.get(layer.kind), call) for name, member in members.items()]
        means.add_rows(layer, [found.max_prob, found.entropy, *_shares(call, found.lse, own_sets)], rows)
        offsets.add(layer, call, found.argmax, rows)

    with reading(model, look, chosen):
        for batch in each_batch(data):
            excluded = keys_by_kind(exclude_keys, batch, there, "exclude_keys")
            members = {
                name: keys_by_kind(tokens, batch, there, f"token_sets[{name!r}]") for name, tokens in sets.items()
            }
            run(model, batch)
    for layer in chosen:
        if layer.num_heads and not means.rows[layer.index].any():
            was = f"has no token that reaches {layer}"
            refuse("data", was, "pass batches with real ones, or name the others in layers")
    found = [means.scores(n, what) for n, what in enumerate(measures)]
    return HeadStatistics(
        **dict(zip(MEASURES, found, strict=False)),
        to_tokens=dict(zip(sets, found[len(MEASURES) :], strict=True)),
        offsets=tuple(each.cpu() for each in offsets.counts.values()),
        rows=tuple(int(each[0]) for each in means.rows.values()),
    )


def _set(name: str, member: Tensor | None, call: AttentionCall) -> Tensor:
    """A token set among the keys of a call; empty for kinds of layers that it does not name."""
    sizes = (call.B, call.S)
    if member is None:
        return call.real_keys.new_zeros(sizes)
    if member.dtype != torch.bool or member.shape != sizes:
        was = f"is {member.dtype} {list(member.shape)}"
        refuse(f"token_sets[{name!r}]", was, f"give bool [B, S] = {list(sizes)}, True for members")
    return member


def _shares(call: AttentionCall, lse: Tensor, sets: list[Tensor]) -> list[Tensor]:
    """Distance, the shares of the row's own token, the previous and the next, and those of `sets`, `[B, H, T]` each."""
    own = own_keys(call)  # [B or 1, T]
    place = torch.arange(call.S, device=own.device)
    one = torch.ones_like(place)
    features = torch.stack([x.expand(call.B, -1).double() for x in (one, place, *sets)], -1)
    # Three consecutive keys have different remainders modulo 3.
    remainder = torch.nn.functional.one_hot(place % 3, 3)[None]
    start, end = torch.zeros_like(own), torch.full_like(own, call.S)
    behind, ahead, near = (
        attended(call, lse, *band)
        for band in ((start, own + 1, features), (own + 1, end, features), (own - 1, own + 2, remainder))
    )
    share, place_sum = (behind - ahead)[..., :2].unbind(-1)
    distance = own[:, None] * share - place_sum
    beside = [
        near.gather(3, ((own + step) % 3)[:, None, :, None].expand(*near.shape[:3], 1))[..., 0] for step in (0, -1, 1)
    ]
    return [distance, *beside, *(behind + ahead)[..., 2:].unbind(-1)]


# ---------------------------------------------------------------------- received by tokens
@dataclass(frozen=True, eq=False)
class HeadReceived:
    """The mean attention that the tokens of each example receive from its query rows.

    Attributes:
        layers, kinds: as in `HeadScores`.
        examples: of each layer and each example `[H, S]`, float, on the CPU: a number for each head and each of the
            example's keys that is a token. Without sinks they sum to 1 over the keys. A layer without heads has none.
    """

    layers: tuple[str, ...]
    kinds: tuple[str, ...]
    examples: tuple[tuple[Tensor, ...], ...]


def received(model: nn.Module, data: Iterable[Any], *, last_rows: int | None = None) -> HeadReceived:
    """The mean attention that each token of each example receives, computed while the model runs without storing maps.

        r_j = sum_i p_ij / n

    over the n query rows i of the example, for each layer and head, by `hk.attention_statistics(..., received=)`. Such
    scores choose the tokens that a cache keeps, by all rows (H2O: Zhang et al. 2023; FastV: Chen et al. 2024) or by the
    last ones (SnapKV: Li et al. 2024). Padding counts neither as a row nor as a key. Layers that run several times,
    numbers of heads and the mode of the model are as in `statistics`.

    Args:
        model, data: as in `statistics`.
        last_rows: the number of each example's last query rows that count; None: all rows.

    Raises:
        TypeError, ValueError: as `statistics`; also if a layer has entmax in the place of softmax, or runs on different
            tokens in one pass.
    """
    if last_rows is not None:
        check_size("last_rows", last_rows)
    layers = attention_layers(model)
    examples: dict[int, list[Tensor]] = {layer.index: [] for layer in layers}
    #: Of each run of a layer in this batch what the tokens of each example receive, [H, S].
    runs: dict[int, list[list[Tensor]]] = {layer.index: [] for layer in layers}

    def look(layer: AttentionLayer, call: AttentionCall) -> None:
        rows = call.real_queries  # [B, T]
        if last_rows is not None:
            behind = rows.flip(1).long().cumsum(1).flip(1)  # real rows from here on
            rows = rows & (behind <= last_rows)
        weights = rows.double() / rows.sum(1, keepdim=True).clamp(min=1)
        sums = call.statistics(received=weights[:, None]).received
        assert sums is not None
        runs[layer.index].append([each[:, real] for each, real in zip(sums, call.real_keys, strict=True)])

    with reading(model, look, layers):
        for batch in each_batch(data):
            run(model, batch)
            for layer in layers:
                examples[layer.index] += _means(layer, runs[layer.index])
                runs[layer.index].clear()
    return HeadReceived(
        tuple(layer.name for layer in layers),
        tuple(layer.kind for layer in layers),
        tuple(tuple(examples[layer.index]) for layer in layers),
    )


def _means(layer: AttentionLayer, runs: list[list[Tensor]]) -> list[Tensor]:
    """The mean over the runs of a layer, for each example."""
    if any([each.shape for each in found] != [each.shape for each in runs[0]] for found in runs):
        instead = "pass whole sequences in one forward pass, without a cache"
        refuse("data", f"has a pass in which {layer} runs on different tokens", instead)
    return [torch.stack(each).mean(0).cpu() for each in zip(*runs, strict=True)]
