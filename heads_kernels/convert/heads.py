"""The query and key projections of a layer's heads, the input of a conversion."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from heads_kernels.checks import refuse


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
        for name, form in (("query", "[H, D, D_in]"), ("key", "[H, D, D_in_k]")):
            checked = weights_of(name, getattr(self, name), form, 3)
            object.__setattr__(self, name, checked)
        H, D = self.query.shape[:2]
        if self.key.shape[:2] != (H, D):
            was = f"has {self.key.shape[0]} heads of width {self.key.shape[1]}"
            refuse("key", was, f"query has {H} of width {D}; repeat keys that heads share")
        if self.query_bias is not None:
            bias = weights_of("query_bias", self.query_bias, "[H, D]", 2)
            if bias.shape != (H, D):
                refuse("query_bias", f"has shape {list(bias.shape)}", f"pass [H, D] = [{H}, {D}]")
            object.__setattr__(self, "query_bias", bias)
        check_factor(self.scale)

    @property
    def H(self) -> int:
        return self.query.shape[0]

    @property
    def D_k(self) -> int:
        """The concatenated width of all heads, `H D`."""
        return self.query.shape[0] * self.query.shape[1]

    @property
    def D_in(self) -> int:
        return self.query.shape[2]

    @property
    def D_in_k(self) -> int:
        return self.key.shape[2]

    @property
    def has_bias(self) -> bool:
        return self.query_bias is not None


def weights_of(name: str, tensor: Tensor, form: str, rank: int) -> Tensor:
    """`tensor` in float64 and without gradient."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        was = f"has dtype {tensor.dtype}" if isinstance(tensor, Tensor) else f"is {tensor!r}"
        refuse(name, was, f"pass a floating tensor {form}", TypeError)
    if tensor.dim() != rank or tensor.numel() == 0:
        refuse(name, f"has shape {list(tensor.shape)}", f"pass {form}")
    if not bool(torch.isfinite(tensor).all()):
        refuse(name, "holds NaN or infinity", "correct these weights, or leave the layer out")
    return tensor.detach().double()


def check_factor(scale: float) -> None:
    """Refuse what cannot be the factor of a layer's scores."""
    if not math.isfinite(scale) or scale == 0:
        refuse("scale", f"is {scale}", "pass the factor of the layer's scores")
