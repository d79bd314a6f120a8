"""Heads with rotary positions, and the features that they share: one decomposition for each frequency."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from heads_kernels.call import MIXING_CHUNK
from heads_kernels.checks import refuse
from heads_kernels.convert.counts import Sizes
from heads_kernels.convert.features import (
    SharedFeatures,
    Spectrum,
    balanced,
    check_fit,
    check_method,
    ratio,
    separate,
)
from heads_kernels.convert.heads import Factors, Heads, parse_weights
from heads_kernels.convert.least_squares import Fit, Products
from heads_kernels.convert.moments import Moments, Sums, causal_covariance, covariance_of_all, gram


@dataclass(frozen=True, eq=False)
class RotaryHeads:
    r"""The query and key weights of heads whose features rotate in pairs (Su et al. 2021), in float64.

    A pair of features is one complex number, and position t turns that of frequency f by `theta_f t`:

    .. math:: score_h(x_t, y_s) = scale \cdot Re \sum_f (W_Q^{hf} x_t + b_Q^{hf})
              \overline{(W_K^{hf} y_s + b_K^{hf})} e^{i \theta_f (t - s)}

    Keys that several heads share are repeated for each of them.

    Attributes:
        query: complex `[H, F, D_in + 1]`, the rows of the query weights by head and frequency, and the bias.
        key: complex `[H, F, D_in_k + 1]`.
        scale: the factor of the scores, which conversion keeps.
    """

    query: Tensor
    key: Tensor
    scale: float
    #: Features that come together.
    group: ClassVar[int] = 2

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        scale: float,
        query_bias: Tensor | None = None,
        key_bias: Tensor | None = None,
    ) -> RotaryHeads:
        """Heads whose pairs are features f and f + D/2.

        Args:
            query, key: weights `[H, D, D_in]` and `[H, D, D_in_k]` by head; D is even.
            scale: the factor of the scores.
            query_bias, key_bias: `[H, D]`, or None.

        Raises:
            TypeError, ValueError: a tensor is not floating, does not fit the others or is not finite; `scale` is not a
                finite number other than 0.
        """
        if isinstance(query, Tensor) and query.dim() == 3 and query.shape[1] % 2:
            was = f"has heads of width {query.shape[1]}"
            refuse("query", was, "pass an even width: features rotate in pairs")
        found = parse_weights(query, key, scale, query_bias, key_bias)
        sides = []
        for weight, bias in zip(found[:2], found[2:], strict=True):
            column = weight.new_zeros(weight.shape[:2]) if bias is None else bias
            sides.append(torch.complex(*torch.cat((weight, column[..., None]), 2).chunk(2, 1)))
        return cls(sides[0], sides[1], scale)

    @property
    def sizes(self) -> Sizes:
        """What parameters and FLOPs are counted by."""
        H, F, width = self.query.shape
        bias = bool(self.query[..., -1].any() or self.key[..., -1].any())
        return Sizes(width - 1, self.key.shape[2] - 1, 2 * H * F, H, bias=bias, rotary=True)

    def spectrum(self, moments: RotaryMoments | None = None, method: str = "ragged") -> Spectrum:
        """What the features of a method add to the scores; with `"cp"` no features add more.

        The groups are the frequencies; the two features of a pair have equal values.
        """
        check_method(method)
        moments = RotaryMoments.of_weights(self) if moments is None else moments
        squares = moments.shared_squares
        if method == "ragged":
            squares = moments.squares.sort(descending=True).values
        ranks = 2 * _above_rounding(squares).sum(1)
        return Spectrum((squares / 2).sqrt().repeat_interleave(2, 1), 0.0, ranks)

    def fit(
        self,
        dim: int,
        moments: RotaryMoments | None = None,
        *,
        method: str = "cp",
        iterations: int = 100,
        multiple: int = 1,
        spectrum: Spectrum | None = None,
    ) -> RotaryFactors:
        """The projections of `dim / 2` pairs for all heads, with the smallest error that the method finds.

        `"ragged"` keeps the pairs of all heads with the largest mean squares: no other choice of pairs has a smaller
        error. Mixing is 1 for a head's own pairs and 0 elsewhere; pairs are ordered so that heads use few chunks of
        features.

        With `"cp"` all heads share all pairs, each with its own real mixing vector. Frequencies get pairs by
        `RotaryMoments.shared_squares`. Alternating least squares starts from pairs of heads that differ. All pairs are
        combinations of the heads' pairs of the same frequency, so all work is on matrices `[H, H]`, of all frequencies
        at once. The error is at most that of `"ragged"`.

        Args:
            dim: Ds, an even number; from `2 H F` on the factors are exact.
            moments: of the heads' queries and keys; None weights all weights equally.
            method, iterations: as in `Heads.fit`.
            multiple, spectrum: not used; pairs come one by one.
        """
        check_fit(dim, method, iterations)
        moments = RotaryMoments.of_weights(self) if moments is None else moments
        chosen = _largest(moments.squares, dim)
        lost = float(moments.squares[~chosen].sum())
        if method == "cp":
            counts = _largest(moments.shared_squares, dim).sum(1)  # [F]
            used = torch.arange(int(counts.max()), device=counts.device) < counts[:, None]  # [F, R]
            fit = moments._shared(used, iterations)
            if fit.cut / 2 < lost:
                frequency, place = used.nonzero(as_tuple=True)
                query, key, mixing = (
                    each[frequency, :, place] for each in (fit.query, fit.key, fit.mixing)
                )
                return self._factors(moments, frequency, query, key, mixing.T, fit.cut / 2)
        owner, place, own = separate(chosen.sum(0).tolist(), MIXING_CHUNK // 2, chosen.device)
        frequency = chosen.T.long().argsort(dim=1, descending=True, stable=True)[owner, place]
        pairs = own.T.to(self.query.dtype)
        return self._factors(moments, frequency, pairs, pairs, own, lost)

    def error(self, factors: RotaryFactors, moments: RotaryMoments | None = None) -> float:
        """The relative error of factors of these heads.

        Without moments `||T - T~|| / ||T||` over all heads and frequencies, where T is the product of the weights of a
        pair. With the moments that they were made with it is `factors.error`.
        """
        if moments is not None:
            return factors.error
        query, key = (
            torch.view_as_complex(rows.view(-1, 2, rows.shape[1]).mT.contiguous())
            for rows in (factors.query, factors.key)
        )  # [R, D_in + 1]
        cut = whole = 0.0
        for f in range(self.query.shape[1]):
            shared = factors.frequency == f
            # Coordinates in a basis of all rows: no product of the inputs' widths is built.
            sides = [
                torch.linalg.qr(torch.cat((own[:, f], pairs[shared])).mT, mode="r").R.mT
                for own, pairs in ((self.query, query), (self.key, key))
            ]
            (own_query, query_pairs), (own_key, key_pairs) = (
                each.tensor_split([len(self.query)]) for each in sides
            )
            product = own_query[:, :, None] * own_key.conj()[:, None]
            whole += float(product.abs().square().sum())
            mixed = factors.mixing[:, shared, None] * query_pairs
            product = product - mixed.mT @ key_pairs.conj()
            cut += float(product.abs().square().sum())
        return ratio(cut, whole)

    def _factors(
        self,
        moments: RotaryMoments,
        frequency: Tensor,
        query: Tensor,
        key: Tensor,
        mixing: Tensor,
        cut: float,
    ) -> RotaryFactors:
        """Factors of pairs that are combinations `[R, H]` of the heads' own."""
        query, key = (
            torch.einsum("rh,hre->re", coefficients, weights[:, frequency])
            for coefficients, weights in ((query, self.query), (key, self.key))
        )
        query, key, mixing = balanced(query, key, mixing)
        query, key = (
            torch.view_as_real(rows).transpose(1, 2).flatten(0, 1) for rows in (query, key)
        )
        error = ratio(cut, float(moments.squares.sum()))
        return RotaryFactors(frequency, query, key, mixing, self.scale, error)


@dataclass(frozen=True, eq=False)
class RotaryMoments(Sums):
    """Second moments of the rotated queries and keys of all heads at each frequency, summed over query rows; complex.

    The keys' are within what a row sees, without the mean: scores that differ by one number per row give the same
    attention. The products of moments are the mean square of scores for phases that are spread evenly.

    Attributes:
        query: `[F, H, H]`, the sum of `q conj(q)^T`.
        key: `[F, H, H]`, the sum over rows of the covariance of the keys that a row sees.
        count: query rows.
    """

    query: Tensor
    key: Tensor
    count: Tensor

    @classmethod
    def of_weights(cls, heads: RotaryHeads) -> RotaryMoments:
        """Of inputs that are uncorrelated, of mean 0 and variance 1."""
        query, key = (
            torch.einsum("hfe,gfe->fhg", rows, rows.conj()) for rows in (heads.query, heads.key)
        )
        return cls(query, key, query.new_ones((), dtype=torch.float64))

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        *,
        query_mask: Tensor,
        key_mask: Tensor,
        is_causal: bool = False,
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
        return cls(torch.stack([gram(each) for each in queries]), found, query_mask.sum())

    @property
    def widths(self) -> tuple[int, int]:
        """`(H, F)`."""
        return self.query.shape[1], self.query.shape[0]

    @property
    def sums(self) -> tuple[Tensor, Tensor]:
        return self.query, self.key

    @cached_property
    def products(self) -> Tensor:
        """`[F, H, H]`: the mean product of what two heads' pairs give the scores, without the scale."""
        return (self.query * self.key.conj()).real / (2 * self.count**2)

    @cached_property
    def squares(self) -> Tensor:
        """`[F, H]`: the mean square of what each head's pair adds to its scores."""
        return self.products.diagonal(dim1=1, dim2=2)

    @cached_property
    def shared_squares(self) -> Tensor:
        """`[F, H]`: at most so much of the mean square R shared pairs of a frequency hold: the first R; descending.

        R pairs with a mixing vector each span R dimensions of the space of heads: these are its principal ones.
        """
        values: Tensor = torch.linalg.eigvalsh(self.products)
        return values.flip(1).clamp(min=0.0)

    def _shared(self, used: Tensor, iterations: int) -> Fit:
        """Pairs that all heads share, in the places that are `used` `[F, R]`; `cut` is twice the mean square.

        They start from own pairs of heads.
        """
        query, key = (each / self.count for each in (self.query, self.key))
        H = query.shape[1]
        products = Products(query, key, H, 2 * float(self.squares.sum()), ridge=1e-13)
        own = torch.nn.functional.one_hot(self._different(used.shape[1]), H).mT * used[:, None]
        own = own.to(query.dtype)
        return products.fit((own, own), iterations)

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
    r"""The projections of a collaborative layer whose shared features rotate in pairs, float64.

    .. math:: score_h(x_t, y_s) = scale \cdot Re \sum_r mixing_{hr} \, query_r(x_t)
              \overline{key_r(y_s)} e^{i \theta_{f_r} (t - s)}

    Attributes:
        frequency: int64 `[R]`, of each pair.
        query: `[2 R, D_in + 1]`, the two features of each pair one after the other; the last column is the bias.
        key: `[2 R, D_in_k + 1]`.
        mixing: `[H, R]`, the weight of a pair in a head, for both of its features; the largest of a pair is 1.
        scale: that of the original layer.
        error: root mean square of what the scores are off by, relative to the scores, as `RotaryMoments` counts them.
        dim, features, executed_features: Ds; how many features each head uses; how many the scores of all heads use, in
            whole chunks.
    """

    frequency: Tensor
    query: Tensor
    key: Tensor
    mixing: Tensor
    scale: float
    error: float

    group: ClassVar[int] = 2

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


def _largest(squares: Tensor, dim: int) -> Tensor:
    """bool like `squares`: the `dim / 2` largest, of those above rounding; at least one."""
    if dim % 2:
        refuse("dim", f"is {dim}", "pass an even number: features rotate in pairs")
    values = squares.flatten()
    count = max(1, min(dim // 2, int(_above_rounding(squares).sum())))
    chosen = torch.zeros_like(values, dtype=torch.bool)
    chosen[values.argsort(descending=True, stable=True)[:count]] = True
    return chosen.view_as(squares)


def _above_rounding(squares: Tensor) -> Tensor:
    return squares > squares.max() * squares.shape[1] * torch.finfo(squares.dtype).eps


AnyHeads: TypeAlias = Heads | RotaryHeads
AnyMoments: TypeAlias = Moments | RotaryMoments
AnyFactors: TypeAlias = Factors | RotaryFactors
