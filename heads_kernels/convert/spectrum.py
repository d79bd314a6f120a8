"""Singular values of heads, from which features are chosen, and the captured energy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heads_kernels.convert.heads import Heads
from heads_kernels.convert.moments import Moments, content_weights, whiten


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

    @classmethod
    def of(cls, heads: Heads, moments: Moments | None = None) -> HeadSpectrum:
        """Through a QR of either thin factor: no product of the inputs' widths is built.

        With `W_Q R = U_q R_q` and `W_K R = U_k R_k` (transposed), the product is `U_q (A S B^T) U_k^T`, and
        `R_q^T A S^-1` needs no inverse: it is `R_k^T B` of the other side.
        """
        query, key = whiten(heads, moments, heads.query, heads.key)
        query_r, key_r = (torch.linalg.qr(x.mT, mode="r").R for x in (query, key))
        left, values, right = torch.linalg.svd(query_r @ key_r.mT, full_matrices=False)
        content = 0.0
        if moments is not None:
            content = float((content_weights(heads, moments) @ moments.key_root).square().sum())
        floor = values.max() * heads.query.shape[1] * torch.finfo(values.dtype).eps
        ranks = (values > floor).sum(1)
        return cls(values, content, ranks, right @ key_r, left.mT @ query_r)

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


@dataclass(frozen=True, eq=False)
class CapturedEnergy:
    """Shares of the squared singular values that the first 1, 2, ... dimensions hold, float64, rising to 1.

    The product of a head, `W_Q^hT W_K^h`, is what its scores are made of: unlike its factors it is the same for heads
    whose queries and keys are rotated alike.

    Attributes:
        query: `[H, min(D, D_in)]`, of every head's query weights; `key` and `product` likewise.
        stacked_query: `[min(H D, D_in)]`, of the query weights of all heads; `stacked_key` likewise.
        stacked_product: of `W_Q^T W_K`, the sum of all heads' products.
    """

    query: Tensor
    key: Tensor
    product: Tensor
    stacked_query: Tensor
    stacked_key: Tensor
    stacked_product: Tensor


def captured_energy(heads: Heads) -> CapturedEnergy:
    """The curves of figure 1 of Cordonnier et al. 2020: single heads are near full rank, all together are not.

    Without calibration: how well a conversion does with so many features, `error_curve` says.
    """
    return CapturedEnergy(
        *_curves(heads.query, heads.key),
        *_curves(heads.query.flatten(0, 1), heads.key.flatten(0, 1)),
    )


def _curves(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows `[..., D, D_in]`, of `[..., D, D_in_k]` and of their product, whose QR factors are thin."""
    query_r, key_r = (torch.linalg.qr(rows.mT, mode="r").R for rows in (query, key))
    product = query_r @ key_r.mT
    return _share(query_r), _share(key_r), _share(product)


def _share(matrices: Tensor) -> Tensor:
    held = torch.linalg.svdvals(matrices).square().cumsum(-1)
    return torch.where(held[..., -1:] == 0, 1.0, held / held[..., -1:])
