"""What conversion makes: one query and one key for all heads, and what a head mixes of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heads_kernels.convert.heads import Heads
from heads_kernels.convert.moments import Moments, content_weights
from heads_kernels.problem import active_widths


@dataclass(frozen=True, eq=False)
class Factors:
    r"""The projections of a collaborative layer, float64 (Cordonnier et al. 2020, eq. 7 and 12).

    .. math:: score_h(x, y) = scale \cdot ((query \, x \circ mixing_h) \cdot (key \, y) + content_h \cdot y)

    Attributes:
        query: `[Ds, D_in]`, shared by all heads, without bias.
        key: `[Ds, D_in_k]`, without bias.
        mixing: `[H, Ds]`; the largest entry of a feature is 1, and its rows of `query` and `key` have equal norms.
        content: `[H, D_in_k]`: `content_bias` of the operator is `content` times the keys' inputs.
        scale: that of the layer that was converted.
    """

    query: Tensor
    key: Tensor
    mixing: Tensor
    content: Tensor
    scale: float

    @property
    def dim(self) -> int:
        """Ds."""
        return self.mixing.shape[1]

    @property
    def features(self) -> list[int]:
        """How many of the shared features each head uses."""
        used: list[int] = self.mixing.count_nonzero(1).tolist()
        return used

    @property
    def executed_features(self) -> int:
        """Features that the scores of all heads run over: those of every chunk that a head does not skip."""
        return int(active_widths(self.mixing).sum())


def balanced(
    heads: Heads, moments: Moments | None, query: Tensor, key: Tensor, mixing: Tensor
) -> Factors:
    """Factors of the same products, their features scaled as `Factors` says, and the content weights that they need.

    What the features miss of the mean of the queries' inputs is in `content`, so the mean query scores what it scored.
    """
    peak = mixing.gather(0, mixing.abs().argmax(0, keepdim=True))  # [1, Ds]
    peak = torch.where(peak == 0, 1.0, peak)
    norms = query.norm(dim=1), key.norm(dim=1)
    strength = (peak[0].abs() * norms[0] * norms[1]).sqrt()
    query, key = (
        rows * (strength / norm.where(norm != 0, 1.0))[:, None]
        for rows, norm in zip((query, key), norms, strict=True)
    )
    mixing, query = mixing / peak, query * peak[0].sign()[:, None]
    content = content_weights(heads, moments)
    if moments is not None:
        content = content - (mixing * (query @ moments.query_mean)) @ key
    return Factors(query, key, mixing, content, heads.scale)
