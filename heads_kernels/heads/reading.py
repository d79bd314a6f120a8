"""What readers of heads share: a pass over data, and numbers of heads put together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from heads_kernels.errors import refuse
from heads_kernels.heads.layers import AttentionLayer
from heads_kernels.heads.observing import batches
from heads_kernels.heads.progress import bar, length
from heads_kernels.heads.scores import HeadScores


def each_batch(
    data: Iterable[Any], title: str, progress: bool, argument: str = "data"
) -> Iterator[Any]:
    """The batches of `data`, with a `bar` of that title if `progress`; errors call it `argument`.

    Raises:
        TypeError: `data` is no iterable of batches.
        ValueError: there is none in it.
    """
    checked = batches(data, argument)
    empty = True
    with bar(title, length(data), progress) as advance:
        for batch in checked:
            empty = False
            yield batch
            advance()
    if empty:
        refuse(argument, "has no batches", "pass [batch] for a single one; a generator serves once")


def scores_of(layers: Sequence[AttentionLayer], scores: Iterable[Tensor], what: str) -> HeadScores:
    """`HeadScores` of these layers, `[H]` each."""
    return HeadScores(
        layers=tuple(layer.name for layer in layers),
        kinds=tuple(layer.kind for layer in layers),
        scores=tuple(each.double().cpu() for each in scores),
        method=what,
    )
