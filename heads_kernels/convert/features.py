"""What the features of ordinary and of rotary heads have in common: their spectrum, order and scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from heads_kernels.call import MIXING_CHUNK, active_widths
from heads_kernels.checks import check_size, refuse

METHODS: Final = ("cp", "ragged")


def check_fit(dim: int, method: str, iterations: int) -> None:
    """Refuse arguments of `fit` that are invalid."""
    check_size("dim", dim)
    check_method(method)
    check_size("iterations", iterations)


def check_method(method: str) -> None:
    if method not in METHODS:
        refuse("method", f"is {method!r}", f"use one of {', '.join(map(repr, METHODS))}")


@dataclass(frozen=True, eq=False)
class Spectrum:
    """What features add to the scores of a layer, in groups from which the largest are chosen first.

    Attributes:
        values: `[H, R]`, by group and descending: a squared value is what a feature adds to the sum of squares of the
            weights of the scores, or with moments to their mean square, before the scale.
        content: the sum of squares of the heads' content weights, whitened.
        ranks: `[H]`: number of features with which a group is exact: values above rounding.
    """

    values: Tensor
    content: float
    ranks: Tensor

    @property
    def rank(self) -> int:
        """Number of features with which the scores of all heads are exact."""
        return int(self.ranks.sum())

    @property
    def square(self) -> float:
        """That of the scores of all heads, before the scale."""
        return float(self.values.square().sum()) + self.content

    def cut(self, dim: int) -> float:
        """Squared error of the products with the `dim` most important features."""
        return float(self._cuts()[min(dim, self.values.numel())])

    def errors(self) -> Tensor:
        """`[H R + 1]`: relative error of the scores with the 0, 1, ... most important features."""
        cuts = self._cuts()
        whole = (cuts[0] + self.content).clamp(min=torch.finfo(cuts.dtype).tiny)
        return (cuts / whole).sqrt()

    def _cuts(self) -> Tensor:
        rising = self.values.flatten().sort().values.square().cumsum(0)
        return torch.cat([rising.flip(0), rising.new_zeros(1)])


class SharedFeatures:
    """What factors tell of their `mixing` `[H, R]`, each column of which weighs `group` features."""

    mixing: Tensor
    group: ClassVar[int] = 1

    @property
    def dim(self) -> int:
        """Ds."""
        return self.group * self.mixing.shape[1]

    @property
    def features(self) -> list[int]:
        """Number of features that each head uses."""
        used: list[int] = (self.group * self.mixing.count_nonzero(1)).tolist()
        return used

    @property
    def executed_features(self) -> int:
        """Features that the scores of all heads use, in whole chunks."""
        return int(active_widths(self.mixing.repeat_interleave(self.group, 1)).sum())


def chunked(counts: list[int], chunk: int = MIXING_CHUNK) -> list[int]:
    """The head of each feature, ordered so that heads use few chunks.

    Whole chunks come first. The remainders of heads, the largest first, go into the first chunk where they fit whole,
    or else are split over the remaining space.
    """
    order = [head for head, count in enumerate(counts) for _ in range(count - count % chunk)]
    left = sum(counts) - len(order)
    bins: list[list[int]] = [[] for _ in range(-(-left // chunk))]
    space = [chunk] * (left // chunk) + [left % chunk] * (left % chunk > 0)
    rests = sorted(((count % chunk, head) for head, count in enumerate(counts)), reverse=True)
    homeless: list[int] = []
    for rest, head in rests:
        fits = next((n for n, size in enumerate(space) if size - len(bins[n]) >= rest), None)
        (homeless if fits is None else bins[fits]).extend([head] * rest)
    for size, features in zip(space, bins, strict=True):
        free = size - len(features)
        order += [*features, *homeless[:free]]
        homeless = homeless[free:]
    return order


def separate(counts: list[int], chunk: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """So many features of each head, which no other head uses, in the order of `chunked`.

    Returns:
        int64 `[R]` the head of each, and which of its head's features it is; mixing `[H, R]`, 1 for its head.
    """
    owner = torch.tensor(chunked(counts, chunk), device=device)
    own = torch.nn.functional.one_hot(owner, len(counts)).T
    return owner, (own.cumsum(1) * own).sum(0) - 1, own.double()


def balanced(query: Tensor, key: Tensor, mixing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same products of rows `[R, width]`, of equal norms for query and key and a largest mixing of 1."""
    peak = mixing.gather(0, mixing.abs().argmax(0, keepdim=True))[0]  # [R]
    peak = torch.where(peak == 0, 1.0, peak)
    norms = query.norm(dim=1), key.norm(dim=1)
    strength = (peak.abs() * norms[0] * norms[1]).sqrt()
    query, key = (
        rows * (strength / norm.where(norm != 0, 1.0))[:, None]
        for rows, norm in zip((query, key), norms, strict=True)
    )
    return query * peak.sign()[:, None], key, mixing / peak


def ratio(cut: float, whole: float) -> float:
    """The relative error of these squares: 0 where there was nothing and nothing was made of it."""
    if whole == 0:
        return 0.0 if cut == 0 else float("inf")
    return float((cut / whole) ** 0.5)
