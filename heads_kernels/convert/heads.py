"""Ordinary heads: the projections of a layer, and the features that stand for them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

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
from heads_kernels.convert.least_squares import Products
from heads_kernels.convert.moments import Moments

#: Relative noise of the start of `cp`, which separates equal features (two rotated copies of one head would otherwise
#: stay equal). On the layers of MiniLM the error ended as low as without it or up to 2 % lower.
_NOISE = 0.5


@dataclass(frozen=True, eq=False)
class Heads:
    r"""The query and key weights of the heads of one attention layer, in float64.

    .. math:: score_h(x, y) = scale \cdot (W_Q^h x + b_Q^h) \cdot (W_K^h y)

    A key bias adds the same number to every score of a query, which does not change the softmax, so it is left out.
    Keys that several heads share are repeated for each of them.

    Attributes:
        query: `[H, D, D_in]`, the rows of the query weights by head (`weight.view(H, D, D_in)` of an `nn.Linear`).
        key: `[H, D, D_in_k]`; `D_in_k`, the width of the keys' inputs, differs from `D_in` in some cross-attention.
        scale: the factor of the scores, which conversion keeps.
        query_bias: `[H, D]`, or None.

    Raises:
        TypeError, ValueError: a tensor is not floating, does not fit the others or is not finite; `scale` is not a
            finite number other than 0.
    """

    query: Tensor
    key: Tensor
    scale: float
    query_bias: Tensor | None = None

    #: Features that come together.
    group: ClassVar[int] = 1

    def __post_init__(self) -> None:
        query, key, bias, _ = parse_weights(self.query, self.key, self.scale, self.query_bias)
        for name, tensor in (("query", query), ("key", key), ("query_bias", bias)):
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
        check_method(method)
        # Through a QR of either thin factor no product of the inputs' widths is built. With W_Q R = U_q R_q and
        # W_K R = U_k R_k (transposed), the product is U_q (A S B^T) U_k^T, and R_q^T A S^-1 needs no inverse: it is
        # R_k^T B of the other side.
        query, key = self._whiten(moments, self.query, self.key)
        query_r, key_r = (torch.linalg.qr(x.mT, mode="r").R for x in (query, key))
        left, values, right = torch.linalg.svd(query_r @ key_r.mT, full_matrices=False)
        content = 0.0
        if moments is not None:
            content = float((self._content_weights(moments) @ moments.key_root).square().sum())
        floor = values.max() * self.query.shape[1] * torch.finfo(values.dtype).eps
        ranks = (values > floor).sum(1)
        return HeadSpectrum(values, content, ranks, right @ key_r, left.mT @ query_r)

    def fit(
        self,
        dim: int,
        moments: Moments | None = None,
        *,
        method: str = "cp",
        iterations: int = 100,
        multiple: int = 1,
        spectrum: HeadSpectrum | None = None,
    ) -> Factors:
        r"""The projections of `dim` features for all heads, with the smallest error that the method finds.

        .. math:: W_Q^{hT} W_K^h \approx \sum_r mixing_{hr} \, query_r \, key_r^T

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
            iterations: maximum number of iterations of `"cp"`.
            multiple: with `"ragged"` heads get features in groups of this size, at most `dim`. With 1 the error is the
                smallest for its `dim`; with 16, the chunk of the operator, the smallest for its FLOPs.
            spectrum: that of these moments, if already computed.

        Returns:
            The same numbers in every call.

        Raises:
            TypeError, ValueError: an argument is invalid, or moments do not fit the heads.
        """
        check_fit(dim, method, iterations)
        if not 1 <= multiple <= dim:
            refuse("multiple", f"is {multiple}", f"pass 1 to {dim}, which is dim")
        spectrum = self.spectrum(moments) if spectrum is None else spectrum
        if method == "cp":
            if dim < spectrum.rank:
                products = self._products(moments)
                fit = products.fit(spectrum.noisy_features(dim), iterations)
                if fit.cut <= spectrum.cut(dim):
                    query, key = (
                        coefficients.T @ own.flatten(0, 1)
                        for coefficients, own in ((fit.query, self.query), (fit.key, self.key))
                    )
                    return self._factors(moments, query, key, fit.mixing)
            multiple = 1
        owner, query, key, mixing = spectrum.own_features(spectrum.largest(dim, multiple))
        query = torch.einsum("nd,nde->ne", query, self.query[owner])
        key = torch.einsum("nd,nde->ne", key, self.key[owner])
        return self._factors(moments, query, key, mixing)

    def error(self, factors: Factors, moments: Moments | None = None) -> float:
        """The relative error of factors of these heads.

        Without moments that of the weights, `||T - T~|| / ||T||` over all heads, where `T_h = W_Q^hT W_K^h`; biases do
        not count. With moments the root mean square of what scores are off by, relative to the scores, both without
        what a whole row shares, for queries' inputs that are independent of the keys'.
        """
        # In closed form: |C_q^1/2 (T_h - T~_h) C_k^1/2|^2 and the square of the content weights at the mean query.
        expected = [len(self.query), self.query.shape[2], self.key.shape[2]]
        found = [len(factors.mixing), factors.query.shape[1], factors.key.shape[1]]
        if found != expected:
            was = f"have [H, D_in, D_in_k] = {found}"
            refuse("factors", was, f"those of the heads have {expected}")
        query, key = self._whiten(moments, self.query, self.key)
        shared_query, shared_key = self._whiten(moments, factors.query, factors.key)
        cut = whole = 0.0
        for own_query, own_key, mixing in zip(query, key, factors.mixing, strict=True):
            product = own_query.T @ own_key
            used = mixing != 0
            whole += float(product.square().sum())
            mixed = shared_query[used] * mixing[used, None]
            cut += float(torch.addmm(product, mixed.T, shared_key[used], alpha=-1).square().sum())
        if moments is not None:
            content = self._content_weights(moments)
            mean = factors.query @ moments.query_mean
            scored = factors.content + (factors.mixing * mean) @ factors.key
            cut += float(((content - scored) @ moments.key_root).square().sum())
            whole += float((content @ moments.key_root).square().sum())
        return ratio(cut, whole)

    def _whiten(self, moments: Moments | None, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Weight rows `[..., D_in]` and `[..., D_in_k]` for uncorrelated inputs of variance 1, for which a product's
        squared norm is the mean square of its scores; without moments the rows do not change.

        Raises:
            ValueError: the moments have no tokens, other widths or are not finite.
        """
        if moments is None:
            return query, key
        widths = self.query.shape[2], self.key.shape[2]
        if moments.widths != widths:
            was = f"are of inputs of widths {moments.widths}"
            refuse("moments", was, f"those of the layer are {widths}")
        if not moments.count > 0:
            refuse("moments", "are of no tokens", "add a batch with real tokens")
        if not all(bool(each.isfinite().all()) for each in moments.sums):
            refuse("moments", "hold NaN or infinity", "look for them in the calibration inputs")
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

    def _products(self, moments: Moments | None) -> Products:
        rows = self._whiten(moments, self.query.flatten(0, 1), self.key.flatten(0, 1))
        query, key = (x @ x.T for x in rows)
        H, D = self.query.shape[:2]
        whole = float((query * key).view(H, D, H, D).diagonal(dim1=0, dim2=2).sum())
        return Products(query, key, H, whole, ridge=1e-12)

    def _factors(
        self, moments: Moments | None, query: Tensor, key: Tensor, mixing: Tensor
    ) -> Factors:
        """What the features miss of the mean of the queries' inputs is in `content`, so the mean query scores what it
        scored."""
        query, key, mixing = balanced(query, key, mixing)
        content = self._content_weights(moments)
        if moments is not None:
            content = content - (mixing * (query @ moments.query_mean)) @ key
        return Factors(query, key, mixing, content, self.scale)


@dataclass(frozen=True, eq=False)
class HeadSpectrum(Spectrum):
    """The singular value decomposition of `W_Q^hT W_K^h` for every head, over whitened inputs if there are moments.

    The groups are the heads; R is the smallest of D, D_in and D_in_k.

    Attributes:
        query: `[H, R, D]`: feature r of head h is row r times the head's query weights, up to the norm.
        key: `[H, R, D]`, the same of the keys.
    """

    query: Tensor
    key: Tensor

    def largest(self, dim: int, multiple: int = 1) -> list[int]:
        """How many of the `dim` most important features each head has, in groups of `multiple`.

        The last group of a head may be smaller. At least one feature is kept in total.
        """
        places = torch.arange(self.values.shape[1], device=self.values.device)
        squares = self.values.square() * (places < self.ranks[:, None])
        squares = torch.nn.functional.pad(squares, (0, -len(places) % multiple))
        groups = squares.reshape(len(squares), -1, multiple)  # [H, groups, multiple]
        sizes = groups.count_nonzero(2).flatten()
        order = (groups.sum(2).flatten() / sizes.clamp(min=1)).argsort(descending=True, stable=True)
        taken = order[sizes[order].cumsum(0) <= dim]
        head = taken // groups.shape[1]
        counts: list[int] = sizes.new_zeros(len(groups)).index_add_(0, head, sizes[taken]).tolist()
        return counts if any(counts) else [1, *counts[1:]]

    def own_features(self, counts: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """So many features of each head, its best: the heads `[Ds]` that they belong to, query and key `[Ds, D]` over
        the head's own weights, and mixing `[H, Ds]`."""
        owner, place, mixing = separate(counts, MIXING_CHUNK, self.values.device)
        values = self.values[owner, place]
        weight = torch.where(values > 0, values, torch.inf).rsqrt()[:, None]
        return owner, self.query[owner, place] * weight, self.key[owner, place] * weight, mixing

    def noisy_features(self, dim: int) -> tuple[Tensor, Tensor]:
        """The features of "ragged" with noise, as coefficients `[H D, Ds]` over the weights of all heads."""
        _, query, key, mixing = self.own_features(self.largest(dim))
        generator = torch.Generator().manual_seed(0)

        def noisy(own: Tensor) -> Tensor:
            features = (mixing[:, None] * own.T).flatten(0, 1)
            noise = torch.randn(features.shape, dtype=features.dtype, generator=generator)
            size = _NOISE * features.norm() / features.numel() ** 0.5
            found: Tensor = features + size * noise.to(features.device)
            return found

        return noisy(query), noisy(key)


@dataclass(frozen=True, eq=False)
class Factors(SharedFeatures):
    r"""The projections of a collaborative layer, float64 (Cordonnier et al. 2020, eq. 7 and 12).

    .. math:: score_h(x, y) = scale \cdot ((query \, x \circ mixing_h) \cdot (key \, y) + content_h \cdot y)

    Attributes:
        query: `[Ds, D_in]`, shared by all heads, without bias.
        key: `[Ds, D_in_k]`, without bias.
        mixing: `[H, Ds]`; the largest entry of a feature is 1, and its rows of `query` and `key` have equal norms.
        content: `[H, D_in_k]`: `content_bias` of the operator is `content` times the keys' inputs.
        scale: that of the original layer.
        dim, features, executed_features: Ds; how many features each head uses; how many the scores of all heads use, in
            whole chunks.
    """

    query: Tensor
    key: Tensor
    mixing: Tensor
    content: Tensor
    scale: float


def parse_weights(
    query: Tensor,
    key: Tensor,
    scale: float,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The weights and biases of heads, checked, in float64 and without gradient."""
    query = _floating("query", query, "[H, D, D_in]", 3)
    key = _floating("key", key, "[H, D, D_in_k]", 3)
    H, D = query.shape[:2]
    if key.shape[:2] != (H, D):
        was = f"has {key.shape[0]} heads of width {key.shape[1]}"
        refuse("key", was, f"query has {H} of width {D}; repeat keys that heads share")
    biases = []
    for name, bias in (("query_bias", query_bias), ("key_bias", key_bias)):
        if bias is not None:
            bias = _floating(name, bias, "[H, D]", 2)
            if bias.shape != (H, D):
                refuse(name, f"has shape {list(bias.shape)}", f"pass [H, D] = [{H}, {D}]")
        biases.append(bias)
    if not math.isfinite(scale) or scale == 0:
        refuse("scale", f"is {scale}", "pass the factor of the layer's scores")
    return query, key, biases[0], biases[1]


def _floating(name: str, tensor: Tensor, form: str, rank: int) -> Tensor:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        was = f"has dtype {tensor.dtype}" if isinstance(tensor, Tensor) else f"is {tensor!r}"
        refuse(name, was, f"pass a floating tensor {form}", TypeError)
    if tensor.dim() != rank or tensor.numel() == 0:
        refuse(name, f"has shape {list(tensor.shape)}", f"pass {form}")
    if not bool(torch.isfinite(tensor).all()):
        refuse(name, "holds NaN or infinity", "correct these weights, or leave the layer out")
    return tensor.detach().double()
