"""Collaborative attention in plain PyTorch: the specification executed; in float64 the oracle.

    out_h = act(gate_h) * attended_h
    attended_h = dropout(softmax(scores_h  under the mask)) value_h
    scores_h = scale * ((query * mixing_h) key^T + content_bias_h)

Inside everything is float32 (float64 for float64 inputs); the mixed query `[B, H, T, Ds]` and
`[B, H, T, S]` lie in memory.
"""

from __future__ import annotations

from heads_kernels.ops import formula
from heads_kernels.ops.layout import compute_dtype
from heads_kernels.ops.operator import Call, Gradients, Results, Saved


@formula.without_autocast
def forward(call: Call, results: Results) -> None:
    """Fill `out`, and `lse` and `attended` as far as they are asked for, also of closed heads."""
    query, key, value, mixing, content_bias, gate, intervals = call[:7]
    seed, scale, gate_activation, dropout_p = call[7:]
    dtype = compute_dtype(query.dtype)
    mixed = formula.mixed_query(query, mixing)
    scores = formula.collaborative_scores(mixed, key, content_bias, scale)  # [B, H, T, S]
    visible = formula.visible_matrix(intervals, scores)
    p, lse = formula.softmax(scores, visible)
    kept = formula.kept_share(seed, dropout_p, scores.shape, scores)
    attended = formula.product(formula.times(p, kept), value.to(dtype), visible)  # [B, H, T, Dv]
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
    query, key, value, mixing, content_bias, gate, intervals = call[:7]
    seed, scale, gate_activation, dropout_p = call[7:]
    dtype = compute_dtype(query.dtype)
    q, k, v, m = query.to(dtype), key.to(dtype), value.to(dtype), mixing.to(dtype)
    dout, attended = saved.dout.to(dtype), saved.attended.to(dtype)
    mixed = formula.mixed_query(query, mixing)
    scores = formula.collaborative_scores(mixed, key, content_bias, scale)  # [B, H, T, S]
    visible = formula.visible_matrix(intervals, scores)
    pairs = formula.contributing(visible, gate, gate_activation)
    transposed = None if pairs is None else pairs.mT
    p = formula.probabilities(scores, saved.lse, pairs)
    kept = formula.kept_share(seed, dropout_p, scores.shape, scores)
    dattended = formula.times(dout, formula.opened(gate, gate_activation, dtype))  # [B, H, T, Dv]

    dquery, dkey, dvalue, dmixing, dcontent_bias, dgate = gradients
    if dquery.numel() or dkey.numel() or dmixing.numel() or dcontent_bias.numel():
        dscores = scale * formula.score_gradient(dattended, attended, v, p, kept, pairs)
        if dquery.numel() or dmixing.numel():
            dmixed = formula.product(dscores, k[:, None], pairs)  # [B, H, T, Ds]
            if dquery.numel():
                dquery.copy_(formula.only_rows(dmixed * m[:, None], pairs).sum(1))
            if dmixing.numel():
                dmixing.copy_(formula.only_rows(dmixed * q[:, None], pairs).sum(2))
        if dkey.numel():
            dkey.copy_(formula.product(dscores.mT, mixed, transposed).sum(1))
        if dcontent_bias.numel():
            dcontent_bias.copy_(dscores.sum(2))
    if dvalue.numel():
        dvalue.copy_(formula.product(formula.times(p, kept).mT, dattended, transposed))
    if dgate.numel() and gate is not None:
        dgate.copy_(formula.gate_rows(dout, attended, visible, gate, gate_activation, closed_grad))
