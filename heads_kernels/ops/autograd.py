"""Gradients of gradients: refused, in words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _FirstOrderOnly(torch.autograd.Function):
    """Hands gradients through and raises where somebody differentiates them again."""

    @staticmethod
    def forward(
        ctx: Any, operator: str, count: int, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.operator = operator
        return tuple(tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.operator} has no second derivative: its backward pass is a fused kernel. Use plain PyTorch "
            "operations where gradients of gradients are needed, or leave out create_graph=True."
        )


def first_order_only(
    operator: str, grads: tuple[Tensor | None, ...], inputs: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Mark the gradients of `inputs` as not differentiable a second time, with an error that says so."""
    if not torch.is_grad_enabled():
        return grads
    marked = _FirstOrderOnly.apply(operator, len(grads), *grads, *inputs)  # type: ignore[no-untyped-call]
    return tuple(marked)
