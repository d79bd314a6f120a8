"""Gated attention on the `cpu` backend: launchers of the C++ kernels in `csrc/cpu/gated_attention.h`."""

from __future__ import annotations

from torch import Tensor

from heads_kernels.mask import Intervals
from heads_kernels.ops import native
from heads_kernels.ops.gated_attention.op import allocate, allocate_gradients


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    intervals: Intervals,
    seed: Tensor | None,
    scale: float,
    gate_activation: str,
    dropout_p: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`out`, and `attended` and `lse` where `save` asks for them (see `allocate`)."""
    outputs = allocate(query, value, gate, save)
    native.attention_forward(
        (query, key, None, None, scale),
        value,
        intervals,
        (gate, gate_activation, seed, dropout_p),
        outputs,
    )
    return outputs


def backward(
    dout: Tensor,
    attended: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    intervals: Intervals,
    seed: Tensor | None,
    scale: float,
    gate_activation: str,
    dropout_p: float,
    closed_grad: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`dquery`, `dkey`, `dvalue` and the rows of the gate's gradient, those that `needs` asks for."""
    gradients = allocate_gradients(query, key, value, gate, needs)
    dquery, dkey, dvalue, dgate_rows = gradients
    native.attention_backward(
        (query, key, None, None, scale),
        value,
        intervals,
        (gate, gate_activation, seed, dropout_p),
        closed_grad,
        (dout, attended, lse),
        (dquery, dkey, dvalue, None, None, dgate_rows),
    )
    return gradients
