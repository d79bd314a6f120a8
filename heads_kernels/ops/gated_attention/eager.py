"""Gated attention in plain PyTorch: the specification executed; in float64 the oracle.

    out = act(gate) * attended
    attended = dropout(softmax(scale * query key^T  under the mask)) value

Inside everything is float32 (float64 for float64 inputs) and `[B, H, T, S]` lies in memory.
"""

from __future__ import annotations

from heads_kernels.ops import formula
from heads_kernels.ops.layout import compute_dtype
from heads_kernels.ops.operator import Call, Gradients, Results, Saved


@formula.without_autocast
def forward(call: Call, results: Results) -> None:
    """Fill `out`, and `lse` and `attended` as far as they are asked for, also of closed heads."""
    query, key, value, _, _, gate, intervals, seed, scale, gate_activation, dropout_p = call
    dtype = compute_dtype(query.dtype)
    q, k, v = query.to(dtype), formula.per_head(key, query), formula.per_head(value, query)
    scores = scale * (q @ k.mT)  # [B, H, T, S]
    visible = formula.visible_matrix(intervals, scores)
    p, lse = formula.softmax(scores, visible)
    kept = formula.kept_share(seed, dropout_p, scores.shape, scores)
    attended = formula.product(formula.times(p, kept), v, visible)  # [B, H, T, Dv]
    gated = formula.times(attended, formula.opened(gate, gate_activation, dtype))
    pairs = formula.contributing(visible, gate, gate_activation)

    results.out.copy_(formula.only_rows(gated, pairs))
    if results.lse.numel():
        results.lse.copy_(lse)
    if results.attended.numel():
        results.attended.copy_(attended)


@formula.without_autocast
def backward(call: Call, saved: Saved, closed_grad: bool, gradients: Gradients) -> None:
    """Fill the gradients that are asked for, from what `forward` saved."""
    query, key, value, _, _, gate, intervals, seed, scale, gate_activation, dropout_p = call
    dquery, dkey, dvalue, _, _, dgate = gradients
    dtype = compute_dtype(query.dtype)
    q, k, v = query.to(dtype), formula.per_head(key, query), formula.per_head(value, query)
    dout, attended = saved.dout.to(dtype), saved.attended.to(dtype)
    scores = scale * (q @ k.mT)  # [B, H, T, S]
    visible = formula.visible_matrix(intervals, scores)
    pairs = formula.contributing(visible, gate, gate_activation)
    transposed = None if pairs is None else pairs.mT
    p = formula.probabilities(scores, saved.lse, pairs)
    kept = formula.kept_share(seed, dropout_p, scores.shape, scores)
    dattended = formula.times(dout, formula.opened(gate, gate_activation, dtype))  # [B, H, T, Dv]

    if dquery.numel() or dkey.numel():
        dscores = formula.score_gradient(dattended, attended, v, p, kept, pairs)
        if dquery.numel():
            dquery.copy_(scale * formula.product(dscores, k, pairs))
        if dkey.numel():
            dkey.copy_(formula.per_group(scale * formula.product(dscores.mT, q, transposed), key))
    if dvalue.numel():
        weights = formula.times(p, kept).mT
        dvalue.copy_(formula.per_group(formula.product(weights, dattended, transposed), value))
    if dgate.numel() and gate is not None:
        dgate.copy_(formula.gate_rows(dout, attended, visible, gate, gate_activation, closed_grad))
