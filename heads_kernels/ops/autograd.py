"""Decides whether a call is recorded for its gradient, and refuses derivatives that do not exist."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from heads_kernels.call import Call


class _FirstOrderOnly(torch.autograd.Function):
    """Passes gradients through and raises where they are differentiated again."""

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


def is_recorded(call: Call) -> bool:
    """Whether the call goes through its `autograd.Function`: an operand requires a gradient.

    Raises:
        RuntimeError: under forward-mode differentiation or a `torch.func` transform, where the call would otherwise
            silently have no derivative.
    """
    operands = call.operands
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    if not torch.compiler.is_compiling():
        forward_mode = forward_ad._current_level >= 0 and any(_has_tangent(t) for t in operands)
        transformed = recorded and torch._C._are_functorch_transforms_active()
        if forward_mode or transformed:
            raise RuntimeError(
                f"{call.operator} has a reverse-mode derivative only, outside of torch.func; use torch.autograd.grad "
                "or backward(), or write the call in plain PyTorch operations where jvp, grad or jacrev of torch.func "
                "are needed."
            )
    return recorded


def _has_tangent(tensor: Tensor | None) -> bool:
    if tensor is None:
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
