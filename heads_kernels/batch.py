"""Leading batch dimensions: broadcast as in `scaled_dot_product_attention` and flattened to one, B.

Every tensor of a `Call` has at most one batch dimension (a `bias` has two); `unflatten` restores those of the user.
"""

from __future__ import annotations

import math
from typing import Final, TypeVar

import torch
from torch import Tensor

from heads_kernels.checks import broadcasts, check_broadcast, refuse

#: The batch dimensions of a call; None if there is exactly one, equal in all operands.
Batch = tuple[int, ...] | None
Companion = TypeVar("Companion", Tensor, Tensor | None)

#: What follows the batch dimensions.
GROUPED: Final = {"query": "H, T, D", "key": "Hk, S, D", "value": "Hk, S, Dv"}
SHARED: Final = {"query": "T, Ds", "key": "S, Ds", "value": "Hv, S, Dv"}


def flatten_operands(layouts: dict[str, str], *operands: Tensor) -> tuple[Batch, tuple[Tensor, ...]]:
    """The batch of a call, and its operands (`query`, `key`, perhaps `value`) with one batch dimension of size B.

    Broadcasting gives views. With several batch dimensions, an operand is copied if they cannot be merged into one
    stride. Raises ValueError if an operand has too few dimensions or does not broadcast.
    """
    leads = []
    for (name, layout), operand in zip(layouts.items(), operands, strict=False):
        lead = operand.dim() - layout.count(",") - 1
        if lead < 0:
            refuse(name, f"has {operand.dim()} dimensions (shape {list(operand.shape)})", f"pass [..., {layout}]")
        leads.append(tuple(operand.shape[:lead]))
    if all(len(lead) == 1 and lead == leads[0] for lead in leads):
        return None, operands
    try:
        batch = tuple(torch.broadcast_shapes(*leads))  # type: ignore[no-untyped-call]
    except RuntimeError:
        found = ", ".join(str(list(lead)) for lead in leads)
        names = ", ".join(list(layouts)[: len(leads)])
        refuse(names, f"have batch dimensions {found}", "make every size equal, or 1")
    return batch, tuple(
        _flatten(operand.expand(*batch, *operand.shape[len(lead) :]), len(batch))
        for operand, lead in zip(operands, leads, strict=True)
    )


def flatten_companion(argument: str, tensor: Companion, batch: tuple[int, ...], layout: str) -> Companion:
    """A gate, bias or mask `[*batch, layout]`, whose sizes of 1 broadcast, as `[B or 1, layout]`.

    A tensor of fewer than two dimensions has no batch dimensions. Whether it is a tensor is checked later.
    """
    if not isinstance(tensor, Tensor) or tensor.dim() <= 1:
        return tensor
    count = layout.count(",") + 1
    lead = tuple(tensor.shape[: tensor.dim() - count])
    if not broadcasts(lead, batch):
        was = f"has shape {list(tensor.shape)}, but the batch dimensions of the call are {list(batch)}"
        sizes = "".join(f"{size}, " for size in batch)
        refuse(argument, was, f"pass [{sizes}{layout}], or 1 where it broadcasts")
    rest = tensor.shape[len(lead) :]
    if all(size == 1 for size in lead):
        return tensor.reshape(1, *rest)
    return _flatten(tensor.expand(*batch, *rest), len(batch))


def flatten_bias(bias: Tensor, batch: tuple[int, ...], full: tuple[int, int, int], argument: str = "bias") -> Tensor:
    """A bias broadcastable to `[*batch, H, T, S]` as `[B1, B2, H, T, S]`, each size 1 where it broadcasts.

    Batch b of the call reads entry `(b // I, b % I)`; I is B2, or B / B1 if B2 is 1. So a bias that all rows of a
    sequence alignment share, `[batch, 1, H, T, T]`, is not expanded. One that broadcasts in between,
    `[x, 1, y, H, T, S]`, is copied. `full` is (H, T, S). Raises ValueError for `argument` if the shape does not
    broadcast.
    """
    bias = bias.reshape(check_broadcast(argument, bias, (*batch, *full)))
    if not bias.requires_grad:  # else every element gets its own gradient
        for dim, stride in enumerate(bias.stride()):
            if stride == 0 and bias.shape[dim] > 1:
                bias = bias.narrow(dim, 0, 1)
    count = len(batch)
    varies = [d for d in range(count) if bias.shape[d] != 1]
    first, last = (varies[0], varies[-1] + 1) if varies else (0, 0)
    outside = all(batch[d] == 1 for d in range(first))
    inside = all(batch[d] == 1 for d in range(last, count))
    copied = any(bias.shape[d] != batch[d] for d in range(first, last)) or not (outside or inside)
    if copied or (varies and 0 in batch):  # an empty batch reads no entry
        bias, outside, inside = bias.expand(*batch, *bias.shape[count:]), True, True
    elements = math.prod(bias.shape[:count])
    lead = (elements, 1) if outside else (1, elements)
    return bias.reshape(*lead, *bias.shape[count:])


def bias_batches(bias: Tensor, B: int) -> tuple[int, int]:
    """B as (outer, inner) batches; a bias from `flatten_bias` has one entry or all along each."""
    outer, inner = bias.shape[:2]
    if inner == 1 and outer > 1:
        inner = B // outer
    return B // max(inner, 1), inner


def expand_bias(bias: Tensor, B: int) -> Tensor:
    """A bias from `flatten_bias` as `[B or 1, H or 1, T or 1, S or 1]`; copied if it broadcasts along a part of B."""
    if bias.shape[:2] == (1, 1):
        return bias[0]
    return bias.expand(*bias_batches(bias, B), *bias.shape[2:]).flatten(0, 1)


def unflatten(result: Tensor, batch: Batch) -> Tensor:
    """`result` `[B, ...]` with the batch dimensions of the call, as a view."""
    return result if batch is None else result.view(*batch, *result.shape[1:])


def _flatten(tensor: Tensor, count: int) -> Tensor:
    """Merge the first `count` dimensions."""
    return tensor.reshape(math.prod(tensor.shape[:count]), *tensor.shape[count:])
