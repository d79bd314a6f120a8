"""Gated attention on the `triton` backend: the order of its kernels."""

from __future__ import annotations

from heads_kernels.ops.gated_attention.triton_closed import closed_pass
from heads_kernels.ops.gated_attention.triton_forward import forward_pass
from heads_kernels.ops.gated_attention.triton_keys import keys_pass
from heads_kernels.ops.gated_attention.triton_queries import queries_pass
from heads_kernels.ops.layout import contiguous_rows
from heads_kernels.ops.operator import Call, Gradients, Results, Saved
from heads_kernels.ops.triton.rows import first_pass


def forward(call: Call, results: Results) -> None:
    """Fill `results`; empty ones are not kept."""
    forward_pass(call, results)


def backward(call: Call, saved: Saved, closed_grad: bool, gradients: Gradients) -> None:
    """Fill `gradients`; empty ones are not computed."""
    dquery, dkey, dvalue, _, _, dgate = gradients[:6]
    dout, attended, lse = contiguous_rows(saved.dout), saved.attended, saved.lse
    delta, dattended, gate = first_pass(dout, attended, lse, call.gate, call.gate_activation, dgate)
    if dgate.numel() and closed_grad:
        closed_pass(call, dout, dgate)
    keys_pass(call, dattended, gate, lse, delta, dkey, dvalue)
    queries_pass(call, dattended, gate, lse, delta, dquery)
