"""What a gate is, for every backend: its activation, its broadcast to `[B, H, T, Dv]`, and its gradient.

A gate multiplies the output of a head: `out = act(gate) * attended`. Its rank determines its kind: `[H]` per head,
`[B, H]` per batch and head, `[B, H, T]` per token, `[B, H, T, Dv]` elementwise; dimensions of size 1 broadcast.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from heads_kernels.checks import check_activation
from heads_kernels.ops.buffers import compute_dtype

#: The activation of ops that is the identity, but of which 0 closes no head: `lse` is asked for of every head.
LINEAR: Final = "linear"


def activate(gate: Tensor, activation: str) -> Tensor:
    """The values that multiply the output, from the gate as it was passed (logits where an activation is named)."""
    if activation == LINEAR:
        return gate
    check_activation(activation)
    if activation == "sigmoid":
        return torch.sigmoid(gate)
    if activation == "softplus":
        return F.softplus(gate)
    return gate


def without_closed_heads(out: Tensor, gate: Tensor | None, activation: str) -> Tensor:
    """`out` with exact zeros where a linear gate closes a head, which may have visible values that are not finite."""
    if gate is None or activation != LINEAR or not can_close(gate, "identity"):
        return out
    return out.masked_fill(as_4d(gate) == 0, 0.0)


def sizes_4d(gate: Tensor) -> tuple[int, ...]:
    """Sizes of the gate with the four dimensions `[B, H, T, Dv]`, each 1 where it broadcasts."""
    sizes = (1, *gate.shape) if gate.dim() == 1 else tuple(gate.shape)
    return sizes + (1,) * (4 - len(sizes))


def as_4d(gate: Tensor) -> Tensor:
    """A view of the gate with those sizes."""
    return gate.reshape(sizes_4d(gate))


def is_elementwise(gate: Tensor) -> bool:
    """Whether the gate differs along the width of a head."""
    return gate.dim() == 4 and gate.shape[3] != 1


def can_close(gate: Tensor, activation: str) -> bool:
    """Whether a head can be closed: by an identity gate with one value for all its rows."""
    return (
        activation == "identity"
        and not is_elementwise(gate)
        and (gate.dim() < 3 or gate.shape[2] == 1)
    )


def empty_rows(
    gate: Tensor | None, needed: bool, query: Tensor, B: int, H: int, T: int, Dv: int
) -> Tensor:
    """A buffer for what a backward kernel computes for the gate: `dout * attended` in the compute dtype.

    `[B, H, T]`, summed over the width of the head, or `[B, H, T, Dv]` for an elementwise gate.
    """
    dtype = compute_dtype(query.dtype)
    if gate is None or not needed:
        return query.new_empty(0, dtype=dtype)
    return query.new_empty((B, H, T, Dv) if is_elementwise(gate) else (B, H, T), dtype=dtype)


def gate_gradient(rows: Tensor, gate: Tensor, activation: str, closed_grad: bool) -> Tensor:
    """Gradient of the gate as it was passed, from the kernel's `rows` (see `empty_rows`).

    Sums over what the gate was broadcast along, applies the slope of the activation, and with `closed_grad=False`
    reports 0 for every entry of an identity gate that is exactly 0.
    """
    grad = rows.sum_to_size(sizes_4d(gate)[: rows.dim()]).reshape(gate.shape)
    if activation in ("identity", LINEAR):
        if not closed_grad:
            grad = grad.masked_fill(gate == 0, 0.0)
    else:
        check_activation(activation)
        opened = torch.sigmoid(gate.to(grad.dtype))
        slope = opened * (1 - opened) if activation == "sigmoid" else opened
        # Fully masked rows have gradient 0, even where their logits are NaN.
        grad = torch.where(grad == 0, grad, grad * slope)
    return grad.to(gate.dtype)
