"""Gated and collaborative attention in plain PyTorch: the specification as code; in float64 the oracle of the tests.

    out = act(gate) * attended
    attended = dropout(softmax(scores  under the mask)) value
    scores = softcap(scale * raw) + bias
    raw = query key^T, or (query * mixing_h) key^T + content_bias_h

Computation is in float32 (float64 for float64 inputs); the mixed query `[B, H, T, Ds]` and the scores `[B, H, T, S]`
are materialised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads_kernels.ops import formula, scores
from heads_kernels.ops.buffers import compute_dtype
from heads_kernels.ops.operator import Call, Gradients, Results, Saved
from heads_kernels.ops.scores import NEG_INF


def forward(call: Call, results: Results) -> None:
    """Fill `out`, and `lse` and `attended` if requested, also for closed heads."""
    for result, computed in zip(results, attend(call), strict=True):
        if result.numel():
            result.copy_(computed)


@formula.without_autocast
def attend(call: Call) -> Results:
    """The results of a call in the compute dtype, all of them."""
    gate, activation, dtype = call.gate, call.gate_activation, compute_dtype(call.query.dtype)
    raw = formula.raw_scores(call, *formula.operands_of_scores(call))  # [B, H, T, S]
    visible = scores.visible_pairs(call)
    p, lse = formula.softmax(scores.finish(call, raw)[0], visible, call.sinks)
    kept = formula.kept_share(call.seed, call.dropout_p, p.shape, p)
    value = formula.per_head(call.value, p)
    attended = formula.product(formula.times(p, kept), value, visible)  # [B, H, T, Dv]
    gated = formula.times(attended, formula.opened(gate, activation, dtype))
    pairs = formula.contributing(visible, gate, activation)
    return Results(formula.only_rows(gated, pairs), attended, lse)


@formula.without_autocast
def backward(call: Call, saved: Saved, closed_grad: bool, gradients: Gradients) -> None:
    """Fill the requested gradients, from what `forward` saved."""
    gate, activation, dtype = call.gate, call.gate_activation, compute_dtype(call.query.dtype)
    query, key = formula.operands_of_scores(call)
    dout, attended = saved.dout.to(dtype), saved.attended.to(dtype)
    raw = formula.raw_scores(call, query, key)  # [B, H, T, S]
    visible = scores.visible_pairs(call)
    pairs = formula.contributing(visible, gate, activation)
    finished, slope = scores.finish(call, raw)
    p = formula.probabilities(finished, saved.lse, pairs)
    kept = formula.kept_share(call.seed, call.dropout_p, p.shape, p)
    value = formula.per_head(call.value, p)
    dattended = formula.times(dout, formula.opened(gate, activation, dtype))  # [B, H, T, Dv]

    of_scores = [g for n, g in gradients._asdict().items() if n not in ("dvalue", "dgate")]
    if any(gradient is not None and gradient.numel() for gradient in of_scores):
        delta = (dattended * attended).sum(-1)  # [B, H, T]
        if saved.dlse is not None:
            delta = delta - saved.dlse
        dscores = formula.score_gradient(dattended, delta, value, p, kept, pairs)
        _fill_terms(call, saved, dscores, delta, pairs, gradients)
        draw = call.scale * formula.only(pairs, formula.times(dscores, slope))
        fill_operands(call, query, key, draw, pairs, gradients)
    if gradients.dvalue.numel():
        touched = None if pairs is None else pairs.mT
        dvalue = formula.product(formula.times(p, kept).mT, dattended, touched)
        gradients.dvalue.copy_(formula.per_group(dvalue, call.value))
    if gradients.dgate.numel() and gate is not None:
        gradients.dgate.copy_(
            formula.gate_rows(dout, attended, visible, gate, activation, closed_grad)
        )


def _fill_terms(
    call: Call,
    saved: Saved,
    dscores: Tensor,
    delta: Tensor,
    pairs: Tensor | None,
    gradients: Gradients,
) -> None:
    """Fill the gradients of biases and sinks; `dscores` is of finished scores."""
    if gradients.dbias.numel():
        scores.bias_gradient(dscores, gradients.dbias)
    if gradients.doffset_bias.numel():
        scores.offset_gradient(dscores, gradients.doffset_bias)
    if gradients.dsinks.numel() and call.sinks is not None:
        lse, dlse = saved.lse, saved.dlse
        share = (call.sinks.to(lse.dtype)[:, None] - lse).exp()  # [B, H, T], of the sink
        share = share.masked_fill(lse == NEG_INF, 0.0)
        rows = formula.only_rows((share * -delta)[..., None], pairs)[..., 0]
        if dlse is not None and pairs is not None:  # the lse of a row that sees nothing is the sink
            alone = ~pairs.any(-1) & (lse > NEG_INF)
            rows = torch.where(alone, share * dlse, rows)
        gradients.dsinks.copy_(rows)


def fill_operands(
    call: Call, query: Tensor, key: Tensor, draw: Tensor, pairs: Tensor | None, gradients: Gradients
) -> None:
    """Fill the gradients of the operands of raw scores, from their gradient `draw` `[B, H, T, S]`."""
    mixing, touched = call.mixing, None if pairs is None else pairs.mT
    if mixing is None:
        if gradients.dquery.numel():
            gradients.dquery.copy_(formula.product(draw, key, pairs))
        if gradients.dkey.numel():
            dkey = formula.product(draw.mT, query, touched)
            gradients.dkey.copy_(formula.per_group(dkey, call.key))
        return
    if gradients.dquery.numel() or gradients.dmixing.numel():
        dmixed = formula.product(draw, key, pairs)  # [B, H, T, Ds]
        of_query = dmixed * mixing[:, None].to(draw.dtype)
        of_mixing = dmixed * call.query[:, None].to(draw.dtype)
        if gradients.dquery.numel():
            gradients.dquery.copy_(formula.only_rows(of_query, pairs).sum(1))
        if gradients.dmixing.numel():
            gradients.dmixing.copy_(formula.only_rows(of_mixing, pairs).sum(2))
    if gradients.dkey.numel():
        gradients.dkey.copy_(formula.product(draw.mT, query, touched).sum(1))
    if gradients.dcontent_bias.numel():
        gradients.dcontent_bias.copy_(draw.sum(2))
