"""Orders in which heads are removed from a model: by every measure of importance, at random, reversed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from lab import Lab
from torch import Tensor, nn

import heads_kernels as hk

#: Heads as (layer name, head) in the order of removal; lists in JSON.
Ranking = Sequence[Sequence[Any]]
Loss = Callable[[Any, Any], Tensor]

#: The options of `hk.analysis.importance`, by measure; None is the confidence of `hk.analysis.statistics`.
MEASURES: Final[dict[str, dict[str, str] | None]] = {
    "leave one out": {"method": "leave_one_out"},
    "gradient": {"method": "gradient"},
    "gradient by token": {"method": "gradient", "reduce": "token"},
    "gradient, l2 per layer": {"method": "gradient"},
    "Fisher": {"method": "fisher"},
    "confidence": None,
}


def scores_of(
    lab: Lab,
    model: nn.Module,
    data: Iterable[Any],
    loss: Loss,
    special: Any,
    measures: Iterable[str] = MEASURES,
) -> dict[str, hk.analysis.HeadScores]:
    """Scores by each measure, from the same data. Confidence excludes `special` keys."""
    scores = {}
    for name in measures:
        lab.bar.start(f"importance: {name}", 1)
        options: Any = MEASURES[name]
        if options is None:
            scores[name] = hk.analysis.statistics(model, data, exclude_keys=special).confidence
        else:
            scores[name] = hk.analysis.importance(model, data, loss, **options)
        if name.endswith("l2 per layer"):
            scores[name] = scores[name].normalised()
        lab.bar.step(1, "")
    return scores


def relevance_of(
    lab: Lab, model: nn.Module, data: Iterable[Any], output: Callable[[Any, Any], Any]
) -> hk.analysis.HeadScores:
    """The shares of the heads in the relevance of the output (`hk.analysis.relevance`)."""
    lab.bar.start("importance: relevance", 1)
    scores = hk.analysis.relevance(model, data, output)
    lab.bar.step(1, "")
    return scores


def random_ranking(model: nn.Module, seed: int) -> Ranking:
    """All heads in a random order."""
    heads = [(layer.name, head) for layer in hk.heads.attention_layers(model) for head in range(layer.num_heads)]
    return random.Random(seed).sample(heads, len(heads))


def by_layer(ranking: Ranking) -> dict[str, list[int]]:
    """`{layer name: [heads]}`, as `prune` and `close` take them."""
    heads: dict[str, list[int]] = {}
    for layer, head in ranking:
        heads.setdefault(layer, []).append(head)
    return heads
