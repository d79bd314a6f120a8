"""Gates on every backend: activation, broadcasting to `[B, H, T, Dv]`, and gradient.

A gate multiplies the output of a head: `out = act(gate) * attended`. Its rank determines its kind: `[H]` per head,
`[B, H]` per batch and head, `[B, H, T]` per token, `[B, H, T, Dv]` elementwise; dimensions of size 1 broadcast.

GPU kernels treat a closed head as one whose rows see no key: each program reads its own gate, its loops run zero
times, and it stores zeros. The host never waits for the values of a gate, and a captured CUDA graph can be replayed
with other heads closed. There is no list of open heads: in a forward pass, a program without work costs no more than
writing its zeros, and building a list would cost a launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from heads_kernels.call import Call, can_close, compute_dtype
from heads_kernels.checks import GATE_ACTIVATIONS, check_choice


def activate(gate: Tensor, activation: str) -> Tensor:
    """The values that multiply the output, from the `gate` argument (logits unless the activation is "identity")."""
    check_choice("gate_activation", activation, GATE_ACTIVATIONS)
    if activation == "sigmoid":
        return torch.sigmoid(gate)
    if activation == "softplus":
        return F.softplus(gate)
    return gate


def multiply(attended: Tensor, call: Call, hidden: Tensor | None) -> Tensor:
    """`act(gate) * attended`, in the dtype of the call; `attended` if it has no gate.

    Rows that see no key, `hidden` `[B, H, T]` (None: all see one), and closed heads are exactly 0, whatever their gates
    and values; what is not finite in a closed head gives its gate no gradient.
    """
    gate = call.gate
    if gate is not None:
        if can_close(gate, call.gate_activation):
            infinite = ~torch.isfinite(attended.detach()) & (as_4d(gate) == 0)
            attended = attended.masked_fill(infinite, 0.0)
        attended = attended * factors(call, hidden)
    return attended.to(call.query.dtype)


def factors(call: Call, hidden: Tensor | None = None) -> Any:
    """`act(gate)` of a call in the compute dtype, with the sizes of `as_4d` or those of `hidden`.

    None without a gate. `hidden` `[B, H, T]` are rows that see no key; None: all see one.
    """
    gate, activation = call.gate, call.gate_activation
    if gate is None:
        return None
    if activation == "identity" and not call.closed_grad:
        gate = without_gradient_at_0(gate)
    read = as_4d(gate.to(compute_dtype(call.query.dtype)))
    if hidden is not None:
        # A gate of a hidden row may be NaN and is replaced first: the slope of its activation would be NaN too.
        read = read.masked_fill(hidden[..., None], 0.0)
    return activate(read, activation)


def without_gradient_at_0(tensor: Tensor) -> Tensor:
    """The same values; entries that are exactly 0 get gradient 0 (`closed_grad=False`)."""
    return torch.where(tensor == 0, tensor.detach(), tensor)


def as_4d(gate: Tensor) -> Tensor:
    """A view of the gate with the four dimensions `[B, H, T, Dv]`, each of size 1 where it broadcasts."""
    sizes = (1, *gate.shape) if gate.dim() == 1 else tuple(gate.shape)
    return gate.reshape(sizes + (1,) * (4 - len(sizes)))


def is_elementwise(gate: Tensor) -> bool:
    """Whether the gate differs along the width of a head."""
    return gate.dim() == 4 and gate.shape[3] != 1


def gate_gradient(rows: Tensor, gate: Tensor, activation: str, closed_grad: bool) -> Tensor:
    """Gradient of the `gate` argument, from the kernel's `rows` of `dout * attended` (see `attention.Gradients`).

    Sums over the broadcast dimensions and multiplies by the slope of the activation. With `closed_grad=False`, entries
    of an identity gate that are exactly 0 get gradient 0.
    """
    grad = rows.sum_to_size(as_4d(gate).shape[: rows.dim()]).reshape(gate.shape)
    if activation == "identity":
        if not closed_grad:
            grad = grad.masked_fill(gate == 0, 0.0)
    else:
        opened = torch.sigmoid(gate.to(grad.dtype))
        slope = opened * (1 - opened) if activation == "sigmoid" else opened
        # Fully masked rows have gradient 0, even where their logits are NaN.
        grad = torch.where(grad == 0, grad, grad * slope)
    return grad.to(gate.dtype)
