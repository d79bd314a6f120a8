"""Collaborative attention in plain PyTorch: the specification executed; in float64 the oracle.

    out_h = act(gate_h) * attended_h
    attended_h = dropout(softmax(scores_h  under the mask)) value_h
    scores_h = scale * ((query * mixing_h) key^T + content_bias_h)

Inside everything is float32 (float64 for float64 inputs); the mixed query `[B, H, T, Ds]` and
`[B, H, T, S]` lie in memory.
"""

from __future__ import annotations

from torch import Tensor

from heads_kernels.ops import formula
from heads_kernels.ops.collaborative_attention.op import Call, allocate, allocate_gradients
from heads_kernels.ops.layout import compute_dtype


@formula.without_autocast
def forward(call: Call, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`out`, and with `save` `lse` and (where there is a gate) `attended`, also of closed heads."""
    (
        query,
        key,
        value,
        mixing,
        content_bias,
        gate,
        intervals,
        seed,
        scale,
        gate_activation,
        dropout_p,
    ) = call
    dtype = compute_dtype(query.dtype)
    mixed = formula.mixed_query(query, mixing)
    scores = formula.collaborative_scores(mixed, key, content_bias, scale)  # [B, H, T, S]
    visible = formula.visible_matrix(intervals, scores)
    p, lse = formula.softmax(scores, visible)
    kept = formula.kept_share(seed, dropout_p, scores.shape, scores)
    attended = formula.product(formula.times(p, kept), value.to(dtype), visible)  # [B, H, T, Dv]
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dquery, dkey, dvalue, rows of dmixing, dcontent_bias, rows of dgate, from what was saved."""
    (
        query,
        key,
        value,
        mixing,
        content_bias,
        gate,
        intervals,
        seed,
        scale,
        gate_activation,
        dropout_p,
    ) = call
    dtype = compute_dtype(query.dtype)
    q, k, v, m = query.to(dtype), key.to(dtype), value.to(dtype), mixing.to(dtype)
    dout, attended = dout.to(dtype), attended.to(dtype)
    mixed = formula.mixed_query(query, mixing)
    scores = formula.collaborative_scores(mixed, key, content_bias, scale)  # [B, H, T, S]
    visible = formula.visible_matrix(intervals, scores)
    pairs = formula.contributing(visible, gate, gate_activation)
    transposed = None if pairs is None else pairs.mT
    p = formula.probabilities(scores, lse, pairs)
    kept = formula.kept_share(seed, dropout_p, scores.shape, scores)
    dattended = formula.times(dout, formula.opened(gate, gate_activation, dtype))  # [B, H, T, Dv]

    grads = allocate_gradients(query, key, value, content_bias, gate, needs)
    dquery, dkey, dvalue, dmixing_rows, dcontent_bias, dgate_rows = grads
    if needs[0] or needs[1] or needs[3] or needs[4]:
        dscores = scale * formula.score_gradient(dattended, attended, v, p, kept, pairs)
        if needs[0] or needs[3]:
            dmixed = formula.product(dscores, k[:, None], pairs)  # [B, H, T, Ds]
            if needs[0]:
                dquery.copy_(formula.only_rows(dmixed * m[:, None], pairs).sum(1))
            if needs[3]:
                dmixing_rows.copy_(formula.only_rows(dmixed * q[:, None], pairs).sum(2))
        if needs[1]:
            dkey.copy_(formula.product(dscores.mT, mixed, transposed).sum(1))
        if needs[4] and content_bias is not None:
            dcontent_bias.copy_(dscores.sum(2))
    if needs[2]:
        dvalue.copy_(formula.product(formula.times(p, kept).mT, dattended, transposed))
    if needs[5] and gate is not None:
        dgate_rows.copy_(
            formula.gate_rows(dout, attended, visible, gate, gate_activation, closed_grad)
        )
    return grads
