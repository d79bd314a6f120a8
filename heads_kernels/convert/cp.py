"""Shared features: the canonical polyadic decomposition of all heads' products at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from heads_kernels.checks import check_size, refuse
from heads_kernels.convert.factors import Factors, balanced
from heads_kernels.convert.heads import Heads
from heads_kernels.convert.moments import Moments, whiten
from heads_kernels.convert.ragged import chunked, own_features, ragged
from heads_kernels.convert.spectrum import HeadSpectrum

#: Relative noise of the start, which separates equal features (two rotated copies of one head would otherwise stay
#: equal). On the layers of MiniLM the error ended as low as without it or up to 2 % lower.
_NOISE = 0.5
#: Ridge relative to the diagonal of a Gram matrix: above its rounding, below every error of interest.
_RIDGE = 1e-12


def cp(
    heads: Heads,
    dim: int,
    moments: Moments | None = None,
    *,
    iterations: int = 100,
    tolerance: float = 1e-4,
    callback: Callable[[int, float], None] | None = None,
    spectrum: HeadSpectrum | None = None,
) -> Factors:
    r"""`dim` features that all heads share, each head with its own mixing vector.

    .. math:: W_Q^{hT} W_K^h \approx \sum_r mixing_{hr} \, query_r \, key_r^T

    (Cordonnier et al. 2020, section 4.) Alternating least squares for query, key and mixing, starting from the
    features of `ragged`. Every feature is a linear combination of the heads' weights, so all work is on Gram matrices
    `[H D, H D]`, and the tensor of all products is never formed. Steps have momentum and are undone if the error would
    grow. The error is that of the weights, or with moments that of the scores.

    Args:
        heads: the layer's projections.
        dim: Ds, at least 1. From the rank of all heads on, at most `H * D`, the factors are exact and equal those of
            `ragged`.
        moments: of the inputs of queries and keys; None weights all weights equally.
        iterations: maximum number of iterations.
        tolerance: stop when a step without momentum reduces the error by less than this share.
        callback: called after each iteration with its number, from 1, and the relative error without content; the
            error never grows.
        spectrum: `HeadSpectrum.of(heads, moments)`, if already computed.

    Returns:
        Factors whose error is at most that of `ragged` at this `dim`. The same call gives the same numbers.

    Raises:
        TypeError, ValueError: `dim` or `iterations` is not an int >= 1, `tolerance` is negative, or moments do not fit
            the heads.
    """
    check_size("dim", dim)
    check_size("iterations", iterations)
    if not tolerance >= 0:
        refuse("tolerance", f"is {tolerance}", "pass 0 or a small share")
    spectrum = HeadSpectrum.of(heads, moments) if spectrum is None else spectrum
    if dim >= spectrum.rank:
        return ragged(heads, dim, moments, spectrum=spectrum)
    products = _Products.of(heads, moments)
    fit = improved(products, _start(products, spectrum, dim), iterations, tolerance, callback)
    if fit.cut > spectrum.cut(dim):
        return ragged(heads, dim, moments, spectrum=spectrum)
    query, key = (
        coefficients.T @ own.flatten(0, 1)
        for coefficients, own in ((fit.query, heads.query), (fit.key, heads.key))
    )
    return balanced(heads, moments, query, key, fit.mixing)


@dataclass(frozen=True, eq=False)
class Fit:
    """Features as coefficients over the rows of all heads, `[H D, Ds]`, of norm 1 over the (whitened) inputs.

    `scored` is `key_gram key`; `cut` the squared error.
    """

    query: Tensor
    key: Tensor
    scored: Tensor
    mixing: Tensor  # [H, Ds]
    cut: float

    @property
    def open(self) -> tuple[Tensor, Tensor, Tensor]:
        """The start of the next sweep."""
        return self.key, self.scored, self.mixing


class Products(Protocol):
    """The scores of all heads, for alternating least squares; `whole` is the sum of their squares."""

    @property
    def whole(self) -> float: ...

    def sweep(self, key: Tensor, scored: Tensor, mixing: Tensor) -> Fit:
        """The best query features for these key features and mixing, then the best key features, then mixing."""
        ...


def improved(
    products: Products,
    fit: Fit,
    iterations: int,
    tolerance: float,
    callback: Callable[[int, float], None] | None = None,
) -> Fit:
    """`fit` after sweeps with Nesterov's momentum, which starts anew after one that gained little or is undone."""
    before, momentum = fit, 0
    for iteration in range(1, iterations + 1):
        ahead = momentum / (momentum + 3)
        found = products.sweep(
            *(now + ahead * (now - then) for now, then in zip(fit.open, before.open, strict=True))
        )
        little = found.cut >= (1 - tolerance) ** 2 * fit.cut
        done = little and momentum == 0
        before, fit = fit, found if found.cut < fit.cut else fit
        momentum = 0 if little else momentum + 1
        if callback is not None:
            callback(iteration, (fit.cut / products.whole) ** 0.5)
        if done:
            break
    return fit


@dataclass(frozen=True, eq=False)
class _Products:
    """The products `W_Q^hT W_K^h` of all heads, as Gram matrices `[H D, H D]` of their rows over the inputs."""

    query_gram: Tensor
    key_gram: Tensor
    num_heads: int
    whole: float  # the sum of their squared norms

    @classmethod
    def of(cls, heads: Heads, moments: Moments | None) -> _Products:
        rows = whiten(heads, moments, heads.query.flatten(0, 1), heads.key.flatten(0, 1))
        query, key = (x @ x.T for x in rows)
        H = heads.H
        own = (query * key).reshape(H, heads.D_k // H, H, -1)  # [H, D, H, D]
        return cls(query, key, H, float(own.diagonal(dim1=0, dim2=2).sum()))

    def sweep(self, key: Tensor, scored: Tensor, mixing: Tensor) -> Fit:
        alike = mixing.T @ mixing  # [Ds, Ds]
        weights = mixing.repeat_interleave(len(key) // self.num_heads, 0)  # [H D, Ds]
        query = _solve(alike * (key.T @ scored), weights * scored)
        query, asked = _unit(query, self.query_gram)
        query_alike = query.T @ asked
        key, scored = _unit(_solve(alike * query_alike, weights * asked), self.key_gram)
        return self.mixed(query, asked, query_alike, key, scored)

    def mixed(
        self, query: Tensor, asked: Tensor, query_alike: Tensor, key: Tensor, scored: Tensor
    ) -> Fit:
        """The best mixing of given features."""
        products = (asked * scored).view(self.num_heads, -1, asked.shape[1]).sum(1)  # [H, Ds]
        mixing = _solve(query_alike * (key.T @ scored), products)
        cut = self.whole - float((products * mixing).sum())
        return Fit(query, key, scored, mixing, max(cut, 0.0))


def _start(products: _Products, spectrum: HeadSpectrum, dim: int) -> Fit:
    """The features of `ragged` with noise."""
    owner = torch.tensor(chunked(spectrum.largest(dim)), device=products.key_gram.device)
    *own, mixing = own_features(spectrum, owner)
    generator = torch.Generator().manual_seed(0)

    def noisy(features: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
        features = (mixing[:, None] * features.T).flatten(0, 1)  # [H D, Ds]
        noise = torch.randn(features.shape, dtype=features.dtype, generator=generator)
        size = _NOISE * features.norm() / features.numel() ** 0.5
        return _unit(features + size * noise.to(features.device), gram)

    query, asked = noisy(own[0], products.query_gram)
    key, scored = noisy(own[1], products.key_gram)
    return products.mixed(query, asked, query.T @ asked, key, scored)


def _unit(coefficients: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients of features of norm 1, and the Gram matrix times them."""
    image = gram @ coefficients
    norms = (coefficients * image).sum(0).clamp(min=torch.finfo(image.dtype).tiny).sqrt()
    return coefficients / norms, image / norms


def _solve(gram: Tensor, rows: Tensor) -> Tensor:
    """`rows gram^-1` for a Gram matrix `[Ds, Ds]`, with a ridge where it is singular."""
    diagonal = gram.diagonal().clamp(min=torch.finfo(gram.dtype).tiny)
    factor = torch.linalg.cholesky(gram + torch.diag(_RIDGE * diagonal))
    return torch.cholesky_solve(rows.T, factor).T
