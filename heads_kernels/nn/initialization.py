"""Initialisation: mixing vectors of collaborative attention, and depth-scaled matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from heads_kernels.checks import check_choice, check_size, check_tensor, is_real, refuse, refuse_type

MIXING_INITS: Final = ("concatenate", "ones", "normal", "xavier")
Module = TypeVar("Module", bound=nn.Module)


@torch.no_grad()
def mixing_init_(tensor: Tensor, kind: str = "concatenate") -> Tensor:
    """Fill the mixing vectors of collaborative attention (Cordonnier et al. 2020), in place; returns them.

    Args:
        tensor: floating `[H, Ds]`.
        kind: "concatenate": head h has ones in its own features `h * Ds // H` to `(h + 1) * Ds // H - 1` and zeros
            elsewhere, as in ordinary multi-head attention, split evenly so that no head is empty. "ones": every
            head uses all features; heads then differ only in their values. "normal": mean 0, standard deviation
            0.2. "xavier": Xavier uniform.
    """
    check_tensor("tensor", tensor, "pass a floating tensor [H, Ds]", (2,))
    check_choice("kind", kind, MIXING_INITS)
    if kind == "ones":
        return tensor.fill_(1.0)
    if kind == "normal":
        return tensor.normal_(0.0, 0.2)
    if kind == "xavier":
        return nn.init.xavier_uniform_(tensor)
    H, Ds = tensor.shape
    if Ds < H:
        was = f"is 'concatenate', but {H} heads share {Ds} features"
        refuse("kind", was, f"use Ds of {H} or more, or one of 'ones', 'normal', 'xavier'")
    tensor.zero_()
    for head in range(H):
        tensor[head, head * Ds // H : (head + 1) * Ds // H] = 1.0
    return tensor


@torch.no_grad()
def ds_init_(module: Module, layer: int, alpha: float = 1.0) -> Module:
    """Depth-scaled initialisation (Zhang, Titov, Sennrich 2019), in place; returns the module.

    Deeper layers start with smaller weights:

        W from U(-bound, bound), bound = alpha * sqrt(6 / (d_in + d_out)) / sqrt(layer)

    The variance is that of Xavier times `alpha**2 / layer`. Biases become 0.

    Args:
        module: a layer of a Transformer. Initialises every `nn.Linear`, and each projection of every
            `nn.MultiheadAttention`; norms, embeddings and mixing vectors do not change.
        layer: the depth of the layer, counted from 1.
        alpha: in (0, 1] in the paper.
    """
    check_size("layer", layer)
    if not is_real(alpha) or alpha <= 0:
        refuse("alpha", f"is {alpha!r}", "pass a positive float")
    if not isinstance(module, nn.Module):
        refuse_type("module", module, "pass a nn.Module")
    matrices = [matrix for part in module.modules() for matrix in _matrices(part)]
    if not matrices:
        refuse("module", f"is a {type(module).__name__} without nn.Linear", "pass a layer")
    for matrix, bias in matrices:
        bound = alpha * math.sqrt(6.0 / (sum(matrix.shape) * layer))
        matrix.uniform_(-bound, bound)
        if bias is not None:
            bias.zero_()
    return module


def _matrices(part: nn.Module) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The matrices of `part` itself, each with its bias."""
    if isinstance(part, nn.Linear):
        yield part.weight, part.bias
    elif isinstance(part, nn.MultiheadAttention):
        weights = (
            (part.q_proj_weight, part.k_proj_weight, part.v_proj_weight)
            if part.in_proj_weight is None
            else part.in_proj_weight.chunk(3)
        )
        biases = (None,) * 3 if part.in_proj_bias is None else part.in_proj_bias.chunk(3)
        yield from zip(weights, biases, strict=True)
