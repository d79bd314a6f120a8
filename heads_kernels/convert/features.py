"""What the features of ordinary and of rotary heads have in common: spectrum, order, scale, and least squares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from heads_kernels.call import MIXING_CHUNK, active_widths
from heads_kernels.checks import check_scale, check_tensor, refuse, shape_of

METHODS: Final = ("cp", "ragged")

#: A step of least squares without momentum that reduces the error by less than this share is the last.
_TOLERANCE = 1e-4
_ITERATIONS = 100


@dataclass(frozen=True, eq=False)
class Spectrum:
    """What features add to the scores of a layer, in groups from which the largest are chosen first.

    A squared value is what a feature adds to the sum of squares of the weights of the scores, or with moments to their
    mean square, before the scale; 0 where it is no more than rounding.
    """

    values: Tensor  # [H, R], by group and descending
    content: float  # the sum of squares of the heads' content weights, whitened
    scale: float  # the factor of the scores

    @property
    def rank(self) -> int:
        """Number of features with which the scores of all heads are exact."""
        return int(self.values.count_nonzero())

    @property
    def square(self) -> float:
        """That of the scores of all heads, before the scale."""
        return float(self.values.square().sum()) + self.content

    @property
    def score_square(self) -> float:
        """The mean square of the scores of all heads, scale included."""
        return self.scale**2 * self.square

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
    """The projections of a collaborative layer, float64; each column of `mixing` weighs one or two features."""

    query: Tensor
    key: Tensor
    mixing: Tensor
    scale: float
    error: float

    @property
    def dim(self) -> int:
        """Ds."""
        return len(self.query)

    @property
    def features(self) -> list[int]:
        """Number of features that each head uses."""
        used: list[int] = self._by_feature.count_nonzero(1).tolist()
        return used

    @property
    def executed_features(self) -> int:
        """Features that the scores of all heads use, in whole chunks."""
        return int(active_widths(self._by_feature).sum())

    @property
    def _by_feature(self) -> Tensor:
        return self.mixing.repeat_interleave(self.dim // self.mixing.shape[1], 1)


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
        rows * (strength / norm.where(norm != 0, 1.0))[:, None] for rows, norm in zip((query, key), norms, strict=True)
    )
    return query * peak.sign()[:, None], key, mixing / peak


def ratio(cut: float, whole: float) -> float:
    """The relative error of these squares; nothing is exact of nothing."""
    return (cut / whole) ** 0.5 if cut > 0 else 0.0


# ---------------------------------------------------------------------- alternating least squares
@dataclass(frozen=True, eq=False)
class Fit:
    """Features as coefficients over the rows of all heads, `[..., H D, R]`, of norm 1 over the (whitened) inputs."""

    query: Tensor
    key: Tensor
    scored: Tensor  # `key_gram` times the conjugate of `key`
    mixing: Tensor  # [..., H, R]
    cut: float  # the squared error


@dataclass(frozen=True, eq=False)
class Products:
    """The products of queries and keys of all heads, as Gram matrices of their rows over the inputs.

    Problems of a batch are independent; entries may be complex, those of mixing are real.
    """

    query_gram: Tensor  # [..., H D, H D]
    key_gram: Tensor  # [..., H D, H D]
    num_heads: int
    whole: float  # the sum of the squared norms of all products
    ridge: float  # relative to the diagonal of a Gram matrix: above its rounding, below every error of interest

    def fit(self, start: tuple[Tensor, Tensor]) -> Fit:
        """The best features from these coefficients of queries and keys on.

        Sweeps have Nesterov's momentum, which starts anew after one that gained little or is undone.
        """
        query, asked = _unit(start[0], self.query_gram)
        fit = self._mixed(query, asked, query.mT @ asked, *_unit(start[1], self.key_gram))
        before, momentum = fit, 0
        for _ in range(_ITERATIONS):
            ahead = momentum / (momentum + 3)
            starts = (
                now + ahead * (now - then)
                for now, then in ((fit.key, before.key), (fit.scored, before.scored), (fit.mixing, before.mixing))
            )
            found = self._sweep(*starts)
            little = found.cut >= (1 - _TOLERANCE) ** 2 * fit.cut
            done = little and momentum == 0
            before, fit = fit, found if found.cut < fit.cut else fit
            momentum = 0 if little else momentum + 1
            if done:
                break
        return fit

    def _sweep(self, key: Tensor, scored: Tensor, mixing: Tensor) -> Fit:
        """The best query features for these key features and mixing, then the best key features, then mixing."""
        alike = mixing.mT @ mixing  # [..., R, R]
        weights = mixing.repeat_interleave(key.shape[-2] // self.num_heads, -2)  # [..., H D, R]
        query = self._solve(alike * (key.mT @ scored).conj(), weights * scored.conj())
        query, asked = _unit(query, self.query_gram)
        query_alike = query.mT @ asked
        key = self._solve(alike * query_alike.conj(), weights * asked.conj())
        return self._mixed(query, asked, query_alike, *_unit(key, self.key_gram))

    def _mixed(self, query: Tensor, asked: Tensor, query_alike: Tensor, key: Tensor, scored: Tensor) -> Fit:
        """The best mixing of given features."""
        own = (asked * scored.conj()).real
        by_head = own.view(*own.shape[:-2], self.num_heads, -1, own.shape[-1])
        products = by_head.sum(-2)  # [..., H, R]
        mixing = self._solve((query_alike * (key.mT @ scored).conj()).real, products)
        cut = self.whole - float((products * mixing).sum())
        return Fit(query, key, scored, mixing, max(cut, 0.0))

    def _solve(self, gram: Tensor, rows: Tensor) -> Tensor:
        """`rows gram^-1` for Hermitian matrices `[..., R, R]`; 0 where a feature is."""
        diagonal = gram.diagonal(dim1=-2, dim2=-1).real
        added = torch.where(diagonal > 0, self.ridge * diagonal, 1.0)
        factor = torch.linalg.cholesky(gram + torch.diag_embed(added).to(gram.dtype))
        return torch.cholesky_solve(rows.mH, factor).mH


def _unit(coefficients: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients of features of norm 1, and the Gram matrix times their conjugates."""
    image = gram @ coefficients.conj()
    squares = (coefficients * image).real.sum(-2, keepdim=True)
    norms = squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt()
    return coefficients / norms, image / norms
