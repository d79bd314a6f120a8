"""Both operators on the `triton` backend: the order of their kernels."""

from __future__ import annotations

from heads_kernels.ops.collaborative_attention import triton_closed as collaborative_closed
from heads_kernels.ops.collaborative_attention import triton_forward as collaborative_forward
from heads_kernels.ops.collaborative_attention import triton_keys as collaborative_keys
from heads_kernels.ops.collaborative_attention import triton_queries as collaborative_queries
from heads_kernels.ops.gated_attention import triton_closed as gated_closed
from heads_kernels.ops.gated_attention import triton_forward as gated_forward
from heads_kernels.ops.gated_attention import triton_keys as gated_keys
from heads_kernels.ops.gated_attention import triton_queries as gated_queries
from heads_kernels.ops.layout import contiguous_rows
from heads_kernels.ops.operator import Call, Gradients, Results, Saved
from heads_kernels.ops.triton.rows import first_pass


def forward(call: Call, results: Results) -> None:
    """Fill `results`; empty ones are not kept."""
    (gated_forward if call.mixing is None else collaborative_forward).forward_pass(call, results)


def backward(call: Call, saved: Saved, closed_grad: bool, gradients: Gradients) -> None:
    """Fill `gradients`; empty ones are not computed."""
    dquery, dkey, dvalue, dmixing, dcontent_bias, dgate = gradients[:6]
    dout, attended, lse = contiguous_rows(saved.dout), saved.attended, saved.lse
    delta, dattended, gate = first_pass(dout, attended, lse, call.gate, call.gate_activation, dgate)
    if dgate.numel() and closed_grad:
        (gated_closed if call.mixing is None else collaborative_closed).closed_pass(
            call, dout, dgate
        )
    if call.mixing is None:
        gated_keys.keys_pass(call, dattended, gate, lse, delta, dkey, dvalue)
        gated_queries.queries_pass(call, dattended, gate, lse, delta, dquery)
    else:
        collaborative_keys.keys_pass(call, dattended, gate, lse, delta, dkey, dvalue, dcontent_bias)
        collaborative_queries.queries_pass(
            call, dattended, gate, lse, delta, closed_grad, dquery, dmixing
        )
