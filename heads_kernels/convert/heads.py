"""Ordinary heads: the projections of a layer, and the features that stand for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heads_kernels.checks import check_choice, check_size, refuse
from heads_kernels.convert.budget import Sizes
from heads_kernels.convert.features import (
    METHODS,
    Products,
    SharedFeatures,
    Spectrum,
    balanced,
    parse_weights,
    ratio,
    separate,
)
from heads_kernels.convert.moments import Moments

#: Relative noise of the start of `cp`, which separates equal features (two rotated copies of one head would otherwise
#: stay equal). On the layers of MiniLM the error ended as low as without it or up to 2 % lower.
_NOISE = 0.5


@dataclass(frozen=True, eq=False)
class Heads:
    """The query and key weights of the heads of one attention layer, in float64.

        score_h(x, y) = scale * (W_Q^h x + b_Q^h) . (W_K^h y)

    A key bias adds the same number to every score of a query, which does not change the softmax, so it is left out.
    Keys that several heads share are repeated for each of them.

    Attributes:
        query: `[H, D, D_in]`, the rows of the query weights by head (`weight.view(H, D, D_in)` of an `nn.Linear`).
        key: `[H, D, D_in_k]`; `D_in_k`, the width of the keys' inputs, differs from `D_in` in some cross-attention.
        scale: the factor of the scores, which conversion keeps.
        query_bias: `[H, D]`, or None.

    Raises:
        TypeError, ValueError: a tensor is not floating, does not fit the others or is not finite; so is `scale`.
    """

    query: Tensor
    key: Tensor
    scale: float
    query_bias: Tensor | None = None

    def __post_init__(self) -> None:
        found = parse_weights(self.query, self.key, self.scale, self.query_bias, None)
        for name, tensor in zip(("query", "key", "query_bias"), found, strict=False):
            object.__setattr__(self, name, tensor)

    @property
    def sizes(self) -> Sizes:
        """What parameters and FLOPs are counted by."""
        H, D, D_in = self.query.shape
        return Sizes(D_in, self.key.shape[2], H * D, H, bias=self.query_bias is not None)

    def spectrum(self, moments: Moments | None = None, method: str = "ragged") -> HeadSpectrum:
        """What the features of `"ragged"` add to the scores; those of `"cp"` add more.

        `spectrum.errors()` is the relative error for `dim` 0 to R, where R is at most `H D`: that of the weights, or
        with moments that of the scores.
        """
        check_choice("method", method, METHODS)
        # Through a QR of either thin factor no product of the inputs' widths is built. With W_Q R = U_q R_q and
        # W_K R = U_k R_k (transposed), the product is U_q (A S B^T) U_k^T, and R_q^T A S^-1 needs no inverse: it is
        # R_k^T B of the other side.
        query, key = self._whiten(moments, self.query, self.key)
        query_r, key_r = (torch.linalg.qr(x.mT, mode="r").R for x in (query, key))
        left, values, right = torch.linalg.svd(query_r @ key_r.mT, full_matrices=False)
        floor = values.max() * self.query.shape[1] * torch.finfo(values.dtype).eps
        values = values.where(values > floor, 0.0)
        content = 0.0
        if moments is not None:
            content = float((self._content_weights(moments) @ moments.key_root).square().sum())
        return HeadSpectrum(values, content, self.scale, right @ key_r, left.mT @ query_r)

    def fit(
        self,
        dim: int,
        moments: Moments | None = None,
        *,
        method: str = "cp",
        multiple: int = 1,
        spectrum: HeadSpectrum | None = None,
    ) -> Factors:
        """The projections of `dim` features for all heads, with the smallest error that the method finds.

            W_Q^hT W_K^h ~ sum_r mixing_hr * query_r key_r^T

        `"ragged"` keeps the `dim` largest singular values of all heads, so heads may have different numbers of
        features; mixing is 1 for a head's own features and 0 elsewhere. No other choice of disjoint features has a
        smaller error (Eckart and Young, head by head). Scores use whole chunks of features, which are ordered so that
        each head uses as few chunks as possible.

        With `"cp"` all heads share all features, each with its own mixing vector (Cordonnier et al. 2020, section 4),
        by alternating least squares from the features of `"ragged"`. Every feature is a linear combination of the
        heads' weights, so all work is on Gram matrices `[H D, H D]`, and the tensor of all products is never formed.
        The error is at most that of `"ragged"`.

        Args:
            dim: Ds, at least 1. From the rank of all heads on, at most `H D`, the factors are exact, with only that
                many features, and those of `"ragged"`.
            moments: of the inputs of queries and keys; None weights all weights equally.
            method: "cp" or "ragged".
            multiple: with `"ragged"` heads get features in groups of this size, at most `dim`. With 1 the error is the
                smallest for its `dim`; with 16, the chunk of the operator, the smallest for its FLOPs.
            spectrum: that of these moments, if already computed.

        Raises:
            TypeError, ValueError: an argument is invalid, or moments do not fit the heads.
        """
        check_size("dim", dim)
        check_choice("method", method, METHODS)
        if not 1 <= multiple <= dim:
            refuse("multiple", f"is {multiple}", f"pass 1 to {dim}, which is dim")
        spectrum = self.spectrum(moments) if spectrum is None else spectrum
        counts = spectrum.largest(dim, 1 if method == "cp" else multiple)
        cut = spectrum.cut(counts)
        query, key, mixing = spectrum.own_features(counts)
        if method == "cp" and dim < spectrum.rank:
            rows = self._whiten(moments, self.query.flatten(0, 1), self.key.flatten(0, 1))
            query_gram, key_gram = (each @ each.T for each in rows)
            whole = spectrum.square - spectrum.content
            products = Products(query_gram, key_gram, len(self.query), whole, ridge=1e-12)
            generator = torch.Generator().manual_seed(0)
            fit = products.fit((_noisy(query, generator), _noisy(key, generator)))
            if fit.cut <= cut:
                query, key, mixing, cut = fit.query, fit.key, fit.mixing, fit.cut
        query, key = query.T @ self.query.flatten(0, 1), key.T @ self.key.flatten(0, 1)
        query, key, mixing = balanced(query, key, mixing)
        content = self._content_weights(moments)
        if moments is not None:  # with what features miss of the mean query, which then scores what it scored
            content = content - (mixing * (query @ moments.query_mean)) @ key
        return Factors(query, key, mixing, self.scale, ratio(cut, spectrum.square), content)

    def _whiten(self, moments: Moments | None, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Weight rows `[..., D_in]` and `[..., D_in_k]` for uncorrelated inputs of variance 1, for which a product's
        squared norm is the mean square of its scores; without moments the rows do not change."""
        if moments is None:
            return query, key
        moments.check((self.query.shape[2], self.key.shape[2]))
        return query @ moments.query_root, key @ moments.key_root

    def _content_weights(self, moments: Moments | None) -> Tensor:
        """`[H, D_in_k]`: scores of the mean query, `W_K^hT (b_Q^h + W_Q^h mean)`; without moments the mean is 0.

        Cordonnier et al. 2020, eq. 12, extended by the mean.
        """
        mean_query = self.query.new_zeros(self.query.shape[:2])
        if self.query_bias is not None:
            mean_query = self.query_bias
        if moments is not None:
            mean_query = mean_query + self.query @ moments.query_mean
        return torch.einsum("hd,hde->he", mean_query, self.key)


@dataclass(frozen=True, eq=False)
class HeadSpectrum(Spectrum):
    """The singular value decomposition of `W_Q^hT W_K^h` for every head, over whitened inputs if there are moments.

    The groups are the heads; R is the smallest of D, D_in and D_in_k.
    """

    query: Tensor  # [H, R, D]: feature r of head h is row r times the head's query weights, up to the norm
    key: Tensor  # [H, R, D], the same of the keys

    def own_features(self, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """So many features of each head, its best: queries and keys as coefficients `[H D, Ds]` over the weights of all
        heads, and mixing `[H, Ds]`."""
        owner, place, mixing = separate(counts)
        values = self.values[owner, place]
        weight = torch.where(values > 0, values, torch.inf).rsqrt()
        query, key = (mixing[:, None] * (own[owner, place].T * weight) for own in (self.query, self.key))
        return query.flatten(0, 1), key.flatten(0, 1), mixing


def _noisy(features: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(features.shape, dtype=features.dtype, generator=generator)
    size = _NOISE * features.norm() / features.numel() ** 0.5
    found: Tensor = features + size * noise.to(features.device)
    return found


@dataclass(frozen=True, eq=False)
class Factors(SharedFeatures):
    """The projections of a collaborative layer, float64 (Cordonnier et al. 2020, eq. 7 and 12).

        score_h(x, y) = scale * ((mixing_h * query x) . (key y) + content_h . y)

    Attributes:
        query: `[Ds, D_in]`, shared by all heads, without bias.
        key: `[Ds, D_in_k]`, without bias.
        mixing: `[H, Ds]`; the largest entry of a feature is 1, and its rows of `query` and `key` have equal norms.
        scale: that of the original layer.
        error: root mean square of what the scores are off by, relative to the scores, both without what a whole row
            shares, for the moments of `fit`; without moments `||T - T~|| / ||T||` over all heads, where
            `T_h = W_Q^hT W_K^h`.
        content: `[H, D_in_k]`: `content_bias` of the operator is `content` times the keys' inputs.
        dim, features, executed_features: Ds; how many features each head uses; how many the scores of all heads use, in
            whole chunks.
    """

    content: Tensor
