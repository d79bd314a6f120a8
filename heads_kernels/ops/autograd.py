"""Decides whether a call is recorded for its gradient, and refuses derivatives that do not exist."""

from __future__ import annotations

from collections.abc import Sequence
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
            f'{ctx.operator} has no second derivative: its backward pass is a fused kernel. Pass backend="eager" '
            "where gradients of gradients are needed, or leave out create_graph=True."
        )


def first_order_only(
    call: Call, grads: Sequence[Tensor | None], dout: Tensor, dlse: Tensor | None
) -> Sequence[Tensor | None]:
    """Mark gradients as not differentiable a second time, by `call`, `dout` or `dlse`, with an error that says so."""
    if not torch.is_grad_enabled():
        return grads
    inputs = dout, dlse, *call.operands
    marked = _FirstOrderOnly.apply(call.operator, len(grads), *grads, *inputs)  # type: ignore[no-untyped-call]
    return tuple(marked)


def is_recorded(call: Call) -> bool:
    """Whether an operand of the call requires a gradient."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in call.operands)


def needs_formula(call: Call, backend: str) -> bool:
    """Whether the call needs derivatives that its op does not have, and `derivatives` has.

    Raises:
        RuntimeError: `backend` is not "eager", and would silently have no derivative.
    """
    if torch.compiler.is_compiling():
        return False
    forward_mode = forward_ad._current_level >= 0 and any(map(_has_tangent, call.operands))
    transformed = torch._C._are_functorch_transforms_active()
    if backend == "eager":
        return bool(forward_mode or transformed)
    if forward_mode or (transformed and is_recorded(call)):
        raise RuntimeError(
            f"{call.operator} has a reverse-mode derivative only, outside of torch.func, on backend {backend!r}; use "
            'torch.autograd.grad or backward(), or pass backend="eager" where jvp, grad or jacrev of torch.func are '
            "needed."
        )
    return False


def _has_tangent(tensor: Tensor | None) -> bool:
    if tensor is None:
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
