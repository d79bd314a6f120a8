"""Alternating least squares for features that heads share, on Gram matrices alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: A step without momentum that reduces the error by less than this share is the last.
_TOLERANCE = 1e-4
_ITERATIONS = 100


@dataclass(frozen=True, eq=False)
class Fit:
    """Features as coefficients over the rows of all heads, `[..., H D, R]`, of norm 1 over the (whitened) inputs.

    `scored` is `key_gram` times the conjugate of `key`; `mixing` is `[..., H, R]`; `cut` the squared error.
    """

    query: Tensor
    key: Tensor
    scored: Tensor
    mixing: Tensor
    cut: float


@dataclass(frozen=True, eq=False)
class Products:
    """The products of queries and keys of all heads, as Gram matrices of their rows over the inputs.

    Problems of a batch are independent; entries may be complex, those of mixing are real.

    Attributes:
        query_gram, key_gram: `[..., H D, H D]`.
        num_heads: H.
        whole: the sum of the squared norms of all products.
        ridge: relative to the diagonal of a Gram matrix: above its rounding, below every error of interest.
    """

    query_gram: Tensor
    key_gram: Tensor
    num_heads: int
    whole: float
    ridge: float

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
                for now, then in (
                    (fit.key, before.key),
                    (fit.scored, before.scored),
                    (fit.mixing, before.mixing),
                )
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

    def _mixed(
        self, query: Tensor, asked: Tensor, query_alike: Tensor, key: Tensor, scored: Tensor
    ) -> Fit:
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
