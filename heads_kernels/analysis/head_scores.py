"""`HeadScores`: a score for each head of a model, rankings and correlations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from heads_kernels.checks import as_int, check_size, refuse
from heads_kernels.heads.layers import AttentionLayer

#: Characters of a layer's name that are shown. Heuristic.
_NAME: Final = 40


@dataclass(frozen=True, eq=False, repr=False)
class HeadScores:
    """One score for each head of each attention layer of a model; a higher score means that the head matters more.

    `print` shows a grid, a row for each layer and a column for each head.

        scores = hk.analysis.importance(model, data, loss)
        hk.heads.prune(model, scores.lowest(12, keep_at_least=1))

    Attributes:
        layers: names of the layers, in the order of `attention_layers`.
        kinds: "encoder", "decoder" or "cross" of each.
        scores: float64 `[H]` of each, on the CPU, by current head number; `[0]` if no head is left.
        method: how the scores were computed.

    Raises:
        ValueError: attributes have different lengths, or a score is NaN.
    """

    layers: tuple[str, ...]
    kinds: tuple[str, ...]
    scores: tuple[Tensor, ...]
    method: str

    def __post_init__(self) -> None:
        lengths = [len(self.layers), len(self.kinds), len(self.scores)]
        if len(set(lengths)) > 1:
            refuse("HeadScores", f"of {lengths} layers, kinds and scores", "pass one of each for every layer")
        for layer, scores in zip(self.layers, self.scores, strict=True):
            if scores.dim() != 1 or bool(scores.isnan().any()):
                refuse(f"scores of {layer!r}", f"are {scores.tolist()}", "pass [H], a number for each head")

    def __repr__(self) -> str:
        return f"HeadScores: {self.method}\n{grid(self)}"

    def ranked(self) -> list[tuple[str, int]]:
        """All heads as (layer name, head), the lowest first; ties by layer and head."""
        flat = [
            (float(score), index, head) for index, scores in enumerate(self.scores) for head, score in enumerate(scores)
        ]
        return [(self.layers[index], head) for _, index, head in sorted(flat)]

    def lowest(self, count: int, *, keep_at_least: int = 0) -> dict[str, list[int]]:
        """The heads with the lowest scores of all layers, for `prune` and `close`.

        Args:
            count: number of heads.
            keep_at_least: number of heads to keep in each layer, those with the highest scores.

        Returns:
            `{layer name: [heads]}`, without layers that have none of them.

        Raises:
            TypeError, ValueError: `count` is larger than the number of heads, or than `keep_at_least` allows.
        """
        check_size("keep_at_least", keep_at_least, 0)
        left = {name: len(scores) - keep_at_least for name, scores in zip(self.layers, self.scores, strict=True)}
        most = sum(max(0, number) for number in left.values())
        number = as_int(count)
        if number is None or not 0 <= number <= most:
            kept = f" ({keep_at_least} stay in each layer)" if keep_at_least else ""
            refuse("count", f"is {count!r}", f"pass an int from 0 to {most}{kept}")
        chosen: dict[str, list[int]] = {}
        for name, head in self.ranked():
            if number and left[name] > 0:
                chosen.setdefault(name, []).append(head)
                number, left[name] = number - 1, left[name] - 1
        return {name: sorted(chosen[name]) for name in self.layers if name in chosen}

    def spearman(self, other: HeadScores) -> float:
        """Spearman's rank correlation with other scores of the same heads; ties have their mean rank.

        NaN if either has the same score for all heads.

        Raises:
            ValueError: `other` has other layers or numbers of heads.
        """
        if self._sizes() != other._sizes():
            refuse("other", f"is of {other._sizes()}", f"pass scores of the same heads: {self._sizes()}")
        ranks = [_ranks(torch.cat(scores.scores)) for scores in (self, other)]
        centred = [each - each.mean() for each in ranks]
        norm = centred[0].norm() * centred[1].norm()
        return float((centred[0] @ centred[1]) / norm)

    def normalised(self) -> HeadScores:
        """The scores of each layer divided by their l2 norm, as in Michel et al. 2019 (section 4.1).

        This hides differences between layers. A layer of zeros stays zero.
        """
        scores = (each / norm if (norm := each.norm()) > 0 else each for each in self.scores)
        return replace(self, scores=tuple(scores), method=f"{self.method}, l2 per layer")

    def table(self) -> Tensor:
        """`[L, H]`, a row per layer; layers with fewer heads are padded with NaN."""
        return pad_sequence(list(self.scores), batch_first=True, padding_value=torch.nan)

    def _sizes(self) -> dict[str, int]:
        return {name: len(scores) for name, scores in zip(self.layers, self.scores, strict=True)}


def grid(scores: HeadScores) -> str:
    """Rows are layers, columns heads."""
    numbers = [[f"{score:.3g}" for score in each.tolist()] for each in scores.scores]
    width = max(map(len, numbers), default=0)
    header = ["layer", "kind", *(str(head) if head else "head 0" for head in range(width))]
    rows = [
        [short_name(name), kind, *own, *[""] * (width - len(own))]
        for name, kind, own in zip(scores.layers, scores.kinds, numbers, strict=True)
    ]
    return text_table([header, *rows], left=2)


def text_table(lines: Sequence[Sequence[str]], left: int) -> str:
    """A header and rows: the first `left` columns are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([*map(str.ljust, line[:left], widths), *map(str.rjust, line[left:], widths[left:])]).rstrip()
        for line in lines
    )


def short_name(name: str) -> str:
    """The end of a long name, its most specific part."""
    return name if len(name) <= _NAME else f"...{name[3 - _NAME :]}"


def _ranks(values: Tensor) -> Tensor:
    """Rank of each value, from 1; equal values have their mean rank."""
    below = values[:, None] > values
    equal = values[:, None] == values
    return below.sum(1) + (equal.sum(1) + 1).double() / 2


class Shares:
    """Sums of hits `[n, H]` and of rows `[n]` for each of `layers`, and the shares that they give."""

    def __init__(self, layers: Iterable[AttentionLayer], n: int) -> None:
        self.layers = list(layers)
        sizes = {layer.index: layer.num_heads for layer in self.layers}
        self.hits = {index: torch.zeros(n, H).double() for index, H in sizes.items()}
        self.rows = {index: torch.zeros(n).double() for index in sizes}

    def add(self, layer: AttentionLayer, hits: Tensor, rows: Tensor) -> None:
        index = layer.index
        self.hits[index] = self.hits[index].to(hits.device) + hits.double()
        self.rows[index] = self.rows[index].to(hits.device) + rows.double()

    def add_rows(self, layer: AttentionLayer, values: Sequence[Tensor], rows: Tensor) -> None:
        """Add n values `[B, H, T]` of the `rows`, bool `[B, T]`."""
        sums = [torch.where(rows[:, None], x, 0).sum((0, 2), dtype=torch.float64) for x in values]
        self.add(layer, torch.stack(sums), rows.sum().expand(len(sums)))

    def scores(self, n: int, what: str) -> HeadScores:
        """The share of the hits in the rows, at place n; 0 where there are no rows."""
        shares = (self.hits[x.index][n] / self.rows[x.index][n].clamp(min=1) for x in self.layers)
        return scores_of(self.layers, shares, what)


def scores_of(layers: Sequence[AttentionLayer], scores: Iterable[Tensor], what: str) -> HeadScores:
    return HeadScores(
        layers=tuple(layer.name for layer in layers),
        kinds=tuple(layer.kind for layer in layers),
        scores=tuple(each.double().cpu() for each in scores),
        method=what,
    )
