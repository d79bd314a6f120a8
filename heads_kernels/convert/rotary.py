"""Heads with rotary positions, and the features that they share: one decomposition for each frequency."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from heads_kernels.call import MIXING_CHUNK
from heads_kernels.checks import refuse
from heads_kernels.convert.budget import Sizes
from heads_kernels.convert.features import (
    Fit,
    Products,
    SharedFeatures,
    Spectrum,
    balanced,
    parse_weights,
    ratio,
    separate,
)
from heads_kernels.convert.heads import Factors, Heads
from heads_kernels.convert.moments import Moments, Sums, causal_covariance, covariance_of_all, gram


@dataclass(frozen=True, eq=False)
class RotaryHeads:
    """The query and key weights of heads whose features rotate in pairs (Su et al. 2021), in float64.

    A pair of features is one complex number, and position t turns that of frequency f by `theta_f t`:

        score_h(x_t, y_s) = scale * Re sum_f query_hf(x_t) * conj(key_hf(y_s)) * exp(i * theta_f * (t - s))
        query_hf(x) = W_Q^hf x + b_Q^hf, key_hf(y) = W_K^hf y + b_K^hf

    Keys that several heads share are repeated for each of them.
    """

    query: Tensor  # complex [H, F, D_in + 1], the rows of the query weights by head and frequency, and the bias
    key: Tensor  # complex [H, F, D_in_k + 1]
    scale: float  # the factor of the scores, which conversion keeps
    bias: bool = False  # queries or keys have biases, which otherwise are 0

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, scale: float, query_bias: Tensor | None = None, key_bias: Tensor | None = None
    ) -> RotaryHeads:
        """Heads `[H, D, inputs]`, with biases `[H, D]`, whose pairs are features f and f + D/2."""
        found = parse_weights(query, key, scale, query_bias, key_bias)
        sides = []
        for weight, bias in zip(found[:2], found[2:], strict=True):
            assert weight is not None
            column = weight.new_zeros(weight.shape[:2]) if bias is None else bias
            sides.append(torch.complex(*torch.cat((weight, column[..., None]), 2).chunk(2, 1)))
        has_bias = query_bias is not None or key_bias is not None
        return cls(sides[0], sides[1], scale, has_bias)

    @property
    def sizes(self) -> Sizes:
        """What parameters and FLOPs are counted by."""
        H, F, width = self.query.shape
        D_in_k = self.key.shape[2] - 1
        return Sizes(width - 1, D_in_k, 2 * H * F, H, bias=self.bias, rotary=True)

    def spectrum(self, moments: RotaryMoments | None = None, method: str = "ragged") -> Spectrum:
        """What the features of a method add to the scores; with `"cp"` no features add more.

        The groups are the heads, with `"cp"` the frequencies; the two features of a pair have equal values.
        """
        moments = RotaryMoments.of_weights(self) if moments is None else moments
        squares = moments.shared_squares
        if method == "ragged":
            squares = moments.squares.T.sort(descending=True).values
        return Spectrum((squares / 2).sqrt().repeat_interleave(2, 1), 0.0, self.scale)

    def fit(self, dim: int, moments: RotaryMoments | None = None, *, method: str = "cp") -> RotaryFactors:
        """The projections of `dim / 2` pairs for all heads, with the smallest error that the method finds.

        `"ragged"` keeps the pairs of all heads with the largest mean squares, which is the best choice of pairs. With
        `"cp"` all heads share all pairs, each with its own real mixing vector, by alternating least squares from pairs
        of heads that differ. Pairs are combinations of the heads' pairs of the same frequency, so all work is on
        matrices `[H, H]`, of all frequencies at once.

        Args:
            dim, moments, method: as in `Heads.fit`; `dim` is even.
        """
        if dim % 2:
            refuse("dim", f"is {dim}", "pass an even number: features rotate in pairs")
        moments = RotaryMoments.of_weights(self) if moments is None else moments
        own, whole = self.spectrum(moments), float(moments.squares.sum())
        counts = own.largest(dim, 2)  # [H]
        cut = own.cut(counts)
        owner, place, mixing = separate(counts // 2, MIXING_CHUNK // 2)
        by_size = moments.squares.T.argsort(dim=1, descending=True, stable=True)  # [H, F]
        frequency = by_size[owner, place]
        of_query = of_key = mixing.T.to(self.query.dtype)  # of each pair, over the heads' own, [R, H]
        if method == "cp":
            pairs = self.spectrum(moments, "cp").largest(dim, 2) // 2
            used = torch.arange(int(pairs.max()), device=pairs.device) < pairs[:, None]  # [F, R]
            fit = moments._shared(used)
            if fit.cut / 2 < cut:
                cut = fit.cut / 2
                frequency, place = used.nonzero(as_tuple=True)
                of_query, of_key, shared = (each[frequency, :, place] for each in (fit.query, fit.key, fit.mixing))
                mixing = shared.T
        query, key = (
            torch.einsum("rh,hre->re", coefficients, weights[:, frequency])
            for coefficients, weights in ((of_query, self.query), (of_key, self.key))
        )
        query, key, mixing = balanced(query, key, mixing)
        query, key = (torch.view_as_real(rows).transpose(1, 2).flatten(0, 1) for rows in (query, key))
        return RotaryFactors(query, key, mixing, self.scale, ratio(cut, whole), frequency)


@dataclass(frozen=True, eq=False)
class RotaryMoments(Sums):
    """Second moments of the rotated queries and keys of all heads at each frequency, summed over query rows; complex.

    The keys' are within what a row sees, without the mean: scores that differ by one number per row give the same
    attention. The products of moments are the mean square of scores for phases that are spread evenly.

    `query_outer` `[F, H, H]` is the sum of `q conj(q)^T`, `key_outer` `[F, H, H]` that over rows of the covariance of
    the keys that a row sees.
    """

    @classmethod
    def of_weights(cls, heads: RotaryHeads) -> RotaryMoments:
        """Of inputs that are uncorrelated, of mean 0 and variance 1."""
        query, key = (torch.einsum("hfe,gfe->fhg", rows, rows.conj()) for rows in (heads.query, heads.key))
        return cls(query.new_ones((), dtype=torch.float64), query, key)

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, *, query_mask: Tensor, key_mask: Tensor, is_causal: bool = False
    ) -> RotaryMoments:
        """Of one batch: rotated queries `[B, H, T, D]` and keys `[B, Hk, S, D]`; masks bool `[B, T]` and `[B, S]`, True
        for real tokens. With `is_causal`, T is S, and a row sees the keys up to its own position."""
        pairs = []
        for rows, mask in ((query, query_mask), (key, key_mask)):
            rows = rows.detach().double().where(mask[:, None, :, None], 0.0)
            pairs.append(torch.complex(*rows.chunk(2, 3)).permute(3, 0, 2, 1))  # [F, B, T, heads]
        queries, keys = pairs
        group = queries.shape[3] // keys.shape[3]
        covariance = causal_covariance if is_causal else covariance_of_all
        found = torch.stack([covariance(each, query_mask, key_mask) for each in keys])
        found = found.repeat_interleave(group, 1).repeat_interleave(group, 2)
        return cls(query_mask.sum(), torch.stack([gram(each) for each in queries]), found)

    @cached_property
    def products(self) -> Tensor:
        """`[F, H, H]`: the mean product of what two heads' pairs give the scores, without the scale."""
        return (self.query_outer * self.key_outer.conj()).real / (2 * self.count**2)

    @cached_property
    def squares(self) -> Tensor:
        """`[F, H]`: the mean square of what each head's pair adds to its scores."""
        return _above_rounding(self.products.diagonal(dim1=1, dim2=2))

    @cached_property
    def shared_squares(self) -> Tensor:
        """`[F, H]`: at most so much of the mean square R shared pairs of a frequency hold: the first R; descending.

        R pairs with a mixing vector each span R dimensions of the space of heads: these are its principal ones.
        """
        values: Tensor = torch.linalg.eigvalsh(self.products)
        return _above_rounding(values.flip(1))

    def _shared(self, used: Tensor) -> Fit:
        """Pairs that all heads share, in the places that are `used` `[F, R]`; `cut` is twice the mean square.

        They start from own pairs of heads.
        """
        query, key = (each / self.count for each in (self.query_outer, self.key_outer))
        H = query.shape[1]
        products = Products(query, key, H, 2 * float(self.squares.sum()), ridge=1e-13)
        own = torch.nn.functional.one_hot(self._different(used.shape[1]), H).mT * used[:, None]
        own = own.to(query.dtype)
        return products.fit((own, own))

    def _different(self, count: int) -> Tensor:
        """int64 `[F, count]`: heads of which each adds most to the scores that those before it do not hold."""
        left = self.products
        places = torch.arange(len(left), device=left.device)
        found = []
        for _ in range(count):
            squares = left.diagonal(dim1=1, dim2=2)
            head = squares.argmax(1)
            found.append(head)
            column = left[places, :, head]  # [F, H]
            pivot = squares[places, head].clamp(min=torch.finfo(left.dtype).tiny)
            left = left - column[:, :, None] * (column / pivot[:, None])[:, None]
        return torch.stack(found, 1)


@dataclass(frozen=True, eq=False)
class RotaryFactors(SharedFeatures):
    """The projections of a collaborative layer whose shared features rotate in pairs, float64.

        score_h(x_t, y_s) = scale * Re sum_r mixing_hr * query_r(x_t) * conj(key_r(y_s)) * exp(i * theta_r * (t - s))

    Attributes:
        query: `[2 R, D_in + 1]`, the two features of each pair one after the other; the last column is the bias.
        key: `[2 R, D_in_k + 1]`.
        mixing: `[H, R]`, the weight of a pair in a head, for both of its features; the largest of a pair is 1.
        error: root mean square of what the scores are off by, relative to the scores, as `RotaryMoments` counts them.
        frequency: int64 `[R]`, of each pair.
    """

    frequency: Tensor

    def places(self, frequencies: int) -> tuple[Tensor, int]:
        """Where a module that rotates heads of `2 frequencies` features has each feature, int64 `[Ds]`, and the number
        of such heads (`hk.heads.shared.SharedProjection`)."""
        same = self.frequency[:, None] == self.frequency
        slot = same.tril(-1).sum(1)  # how many pairs of this frequency come before
        first = 2 * frequencies * slot + self.frequency
        slots = int(slot.max()) + 1
        # One head with a feature in every place has the shape of the features in a cache.
        if slots == 1 and self.dim == 2 * frequencies:
            slots = 2
        return torch.stack((first, first + frequencies), 1).flatten(), slots


def _above_rounding(squares: Tensor) -> Tensor:
    """The same, 0 where it is no more than rounding."""
    floor = squares.max() * squares.shape[1] * torch.finfo(squares.dtype).eps
    return squares.where(squares > floor, 0.0)


AnyHeads: TypeAlias = Heads | RotaryHeads
AnyMoments: TypeAlias = Moments | RotaryMoments
AnyFactors: TypeAlias = Factors | RotaryFactors
