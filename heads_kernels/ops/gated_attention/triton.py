"""Gated attention on the `triton` backend: the order of its kernels."""

from __future__ import annotations

from torch import Tensor

from heads_kernels.ops.gated_attention.op import Call, allocate, allocate_gradients
from heads_kernels.ops.gated_attention.triton_closed import closed_pass
from heads_kernels.ops.gated_attention.triton_forward import forward_pass
from heads_kernels.ops.gated_attention.triton_keys import keys_pass
from heads_kernels.ops.gated_attention.triton_queries import queries_pass
from heads_kernels.ops.layout import contiguous_rows
from heads_kernels.ops.triton.rows import first_pass


def forward(call: Call, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`out`, and `attended` and `lse` where `save` asks for them (see `allocate`)."""
    outputs = allocate(call.query, call.value, call.gate, save)
    forward_pass(call, outputs)
    return outputs


def backward(
    call: Call, dout: Tensor, attended: Tensor, lse: Tensor, closed_grad: bool, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`dquery`, `dkey`, `dvalue` and the rows of the gate's gradient, those that `needs` asks for."""
    gradients = allocate_gradients(call.query, call.key, call.value, call.gate, needs)
    dquery, dkey, dvalue, dgate_rows = gradients
    dout = contiguous_rows(dout)
    delta, dattended, gate = first_pass(
        dout, attended, lse, call.gate, call.gate_activation, dgate_rows
    )
    if dgate_rows.numel() and closed_grad:
        closed_pass(call, dout, dgate_rows)
    keys_pass(call, dattended, gate, lse, delta, dkey, dvalue)
    queries_pass(call, dattended, gate, lse, delta, dquery)
    return gradients
