"""The rule of layer-wise relevance propagation as it is written, by Jacobians, for one example or row at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EPSILON = 1e-5


def by_jacobian(
    function: Callable[..., Tensor], inputs: list[Tensor], given: Tensor, kept: bool = True
) -> list[Tensor]:
    """The rule as it is written, for one example: its Jacobian, both signs with a factor of 1/2, then scaled."""
    slopes = torch.autograd.functional.jacobian(function, tuple(inputs))
    m, n = given.numel(), sum(x.numel() for x in inputs)
    owed = [slope.reshape(m, -1) * x.flatten() for slope, x in zip(slopes, inputs, strict=True)]
    at_zero = function(*map(torch.zeros_like, inputs)).flatten()
    z = torch.cat(owed, 1) + at_zero[:, None] / n
    up, down = z * (z > 0), z * (z < 0)
    shares = 0.5 * up / (up.sum(1, keepdim=True) + EPSILON)
    shares = shares + 0.5 * down / (down.sum(1, keepdim=True) - EPSILON)
    found = given.flatten() @ shares
    if kept and found.sum() > 0:
        found = found * given.sum() / found.sum()
    parts = found.split([x.numel() for x in inputs])
    return [part.view(x.shape) for part, x in zip(parts, inputs, strict=True)]


def by_rows(function: Callable[..., Tensor], inputs: list[Tensor], given: Tensor) -> list[Tensor]:
    """`by_jacobian` of each row of tensors of two dimensions or more."""
    flat = [x.reshape(-1, x.shape[-1]) for x in inputs]
    rows = [
        by_jacobian(function, list(parts), each)
        for *parts, each in zip(*flat, given.reshape(-1, given.shape[-1]), strict=True)
    ]
    return [
        torch.stack(found).view(x.shape)
        for found, x in zip(zip(*rows, strict=True), inputs, strict=True)
    ]
