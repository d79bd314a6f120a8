"""What the first dimensions of a layer's projections hold, by head and of all heads together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heads_kernels.convert.heads import Heads


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
