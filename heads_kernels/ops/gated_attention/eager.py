"""Gated attention in plain PyTorch: the specification executed; in float64 the oracle.

    out = act(gate) * attended
    attended = dropout(softmax(scale * query key^T  under the mask)) value

Inside everything is float32 (float64 for float64 inputs) and `[B, H, T, S]` lies in memory.
"""

from __future__ import annotations

from torch import Tensor

from heads_kernels.ops import formula
from heads_kernels.ops.gated_attention.op import Call, allocate, allocate_gradients
from heads_kernels.ops.layout import compute_dtype


@formula.without_autocast
def forward(call: Call, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`out`, and with `save` `lse` and (where there is a gate) `attended`, also of closed heads."""
    query, key, value, gate, intervals, seed, scale, gate_activation, dropout_p = call
    dtype = compute_dtype(query.dtype)
    q, k, v = query.to(dtype), formula.per_head(key, query), formula.per_head(value, query)
    scores = scale * (q @ k.mT)  # [B, H, T, S]
    visible = formula.visible_matrix(intervals, scores)
    p, lse = formula.softmax(scores, visible)
    kept = formula.kept_share(seed, dropout_p, scores.shape, scores)
    attended = formula.product(formula.times(p, kept), v, visible)  # [B, H, T, Dv]
    gated = formula.times(attended, formula.opened(gate, gate_activation, dtype))
    pairs = formula.contributing(visible, gate, gate_activation)

    results = allocate(query, value, gate, save)
    results[0].copy_(formula.only_rows(gated, pairs))
    if save:
        results[2].copy_(lse)
        if gate is not None:
            results[1].copy_(attended)
    return results


@formula.without_autocast
def backward(
    call: Call,
    dout: Tensor,
    attended: Tensor,
    lse: Tensor,
    closed_grad: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`dquery`, `dkey`, `dvalue` and the rows of the gate's gradient, from what `forward` saved."""
    query, key, value, gate, intervals, seed, scale, gate_activation, dropout_p = call
    dtype = compute_dtype(query.dtype)
    q, k, v = query.to(dtype), formula.per_head(key, query), formula.per_head(value, query)
    dout, attended = dout.to(dtype), attended.to(dtype)
    scores = scale * (q @ k.mT)  # [B, H, T, S]
    visible = formula.visible_matrix(intervals, scores)
    pairs = formula.contributing(visible, gate, gate_activation)
    transposed = None if pairs is None else pairs.mT
    p = formula.probabilities(scores, lse, pairs)
    kept = formula.kept_share(seed, dropout_p, scores.shape, scores)
    dattended = formula.times(dout, formula.opened(gate, gate_activation, dtype))  # [B, H, T, Dv]

    grads = dquery, dkey, dvalue, rows = allocate_gradients(query, key, value, gate, needs)
    if needs[0] or needs[1]:
        dscores = formula.score_gradient(dattended, attended, v, p, kept, pairs)
        if needs[0]:
            dquery.copy_(scale * formula.product(dscores, k, pairs))
        if needs[1]:
            dkey.copy_(formula.per_group(scale * formula.product(dscores.mT, q, transposed), key))
    if needs[2]:
        weights = formula.times(p, kept).mT
        dvalue.copy_(formula.per_group(formula.product(weights, dattended, transposed), value))
    if needs[3] and gate is not None:
        rows.copy_(formula.gate_rows(dout, attended, visible, gate, gate_activation, closed_grad))
    return grads
