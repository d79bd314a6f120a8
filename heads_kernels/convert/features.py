"""What the features of ordinary and of rotary heads have in common: their spectrum, order and scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from heads_kernels.call import MIXING_CHUNK, active_widths
from heads_kernels.checks import check_scale, check_tensor, refuse, shape_of

METHODS: Final = ("cp", "ragged")


@dataclass(frozen=True, eq=False)
class Spectrum:
    """What features add to the scores of a layer, in groups from which the largest are chosen first.

    Attributes:
        values: `[H, R]`, by group and descending: a squared value is what a feature adds to the sum of squares of the
            weights of the scores, or with moments to their mean square, before the scale.
            0 where it is no more than rounding.
        content: the sum of squares of the heads' content weights, whitened.
    """

    values: Tensor
    content: float

    @property
    def rank(self) -> int:
        """Number of features with which the scores of all heads are exact."""
        return int(self.values.count_nonzero())

    @property
    def square(self) -> float:
        """That of the scores of all heads, before the scale."""
        return float(self.values.square().sum()) + self.content

    def largest(self, dim: int, multiple: int = 1) -> Tensor:
        """int64 `[H]`: how many of the `dim` most important features each group has, `multiple` of them at a time.

        The last of a group may be fewer. At least one feature is kept in total.
        """
        squares = self.values.square()
        squares = torch.nn.functional.pad(squares, (0, -squares.shape[1] % multiple))
        parts = squares.view(len(squares), -1, multiple)  # [H, parts, multiple]
        sizes = parts.count_nonzero(2).flatten()
        order = (parts.sum(2).flatten() / sizes.clamp(min=1)).argsort(descending=True, stable=True)
        taken = order[sizes[order].cumsum(0) <= dim]
        counts = sizes.new_zeros(len(parts)).index_add(0, taken // parts.shape[1], sizes[taken])
        counts[0] += multiple * (not counts.any())
        return counts

    def cut(self, counts: Tensor) -> float:
        """What is lost of the square with so many features of each group."""
        places = torch.arange(self.values.shape[1], device=self.values.device)
        return float((self.values.square() * (places >= counts[:, None])).sum())

    def errors(self) -> Tensor:
        """`[H R + 1]`: relative error of the scores with the 0, 1, ... most important features."""
        rising = self.values.flatten().sort().values.square().cumsum(0)
        cuts = torch.cat([rising.flip(0), rising.new_zeros(1)])
        whole = (cuts[0] + self.content).clamp(min=torch.finfo(cuts.dtype).tiny)
        return (cuts / whole).sqrt()


@dataclass(frozen=True, eq=False)
class SharedFeatures:
    """The projections of a collaborative layer, float64; each column of `mixing` weighs `group` features."""

    query: Tensor
    key: Tensor
    mixing: Tensor
    scale: float
    error: float
    #: Features that come together.
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


def parse_weights(
    query: Tensor, key: Tensor, scale: float, query_bias: Tensor | None, key_bias: Tensor | None
) -> list[Tensor | None]:
    """The query, key and biases of heads, checked, in float64 and without gradient."""
    check_scale(scale, 1)
    given = {"query": query, "key": key, "query_bias": query_bias, "key_bias": key_bias}
    found: list[Tensor | None] = []
    for name, tensor in given.items():
        if tensor is None:
            found.append(None)
            continue
        form, rank = ("[H, D]", 2) if "bias" in name else ("[H, D, inputs]", 3)
        check_tensor(name, tensor, f"pass a floating tensor {form}", (rank,))
        if not tensor.numel() or tensor.shape[:2] != query.shape[:2]:
            instead = f"[H, D] of query are {list(query.shape[:2])}; repeat keys that heads share"
            refuse(name, f"has shape {shape_of(tensor)}", instead)
        if not bool(torch.isfinite(tensor).all()):
            refuse(name, "holds NaN or infinity", "correct these weights, or leave the layer out")
        found.append(tensor.detach().double())
    return found


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


def separate(counts: Tensor, chunk: int = MIXING_CHUNK) -> tuple[Tensor, Tensor, Tensor]:
    """So many features of each head, which no other head uses, in the order of `chunked`.

    Returns:
        int64 `[R]` the head of each, and which of its head's features it is; mixing `[H, R]`, 1 for its head.
    """
    owner = torch.tensor(chunked(counts.tolist(), chunk), device=counts.device)
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
    """The relative error of these squares; nothing is exact of nothing."""
    return (cut / whole) ** 0.5 if cut > 0 else 0.0
