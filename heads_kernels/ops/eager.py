"""Every operator in plain PyTorch: the specification as code; in float64 the oracle of the tests.

    out = act(gate) * attended
    attended = dropout(p) value
    p = softmax(scores  under the mask), or entmax_alpha of them
    scores = softcap(scale * raw) + bias
    raw = query key^T, or (query * mixing_h) key^T + content_bias_h

Computation is in float32 (float64 for float64 inputs); the mixed query `[B, H, T, Ds]` and the scores `[B, H, T, S]`
are materialised. Entmax saves the threshold of each row, as two numbers, in place of `lse`. A key whose entmax weight
is 0, because it is outside of the support of a row or dropped, adds nothing to the row, even if its value is NaN.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from heads_kernels.call import Call, compute_dtype
from heads_kernels.checks import refuse
from heads_kernels.ops import entmax, formula
from heads_kernels.ops import gate as gates
from heads_kernels.ops.attention import Gradients, Results, Saved
from heads_kernels.ops.formula import NEG_INF
from heads_kernels.ops.statistics import AttentionStatistics

#: Query rows of statistics at a time. Heuristic: the scores of 64 rows of BERT-base on 512 tokens are 1.5 MiB.
_BLOCK_M: Final = 64


def forward(call: Call, results: Results) -> None:
    """Fill `out`, and `lse` and `attended` if requested, also for closed heads."""
    for result, computed in zip(results, attend(call), strict=True):
        if result.numel():
            result.copy_(computed)


@formula.without_autocast
def attend(call: Call) -> Results:
    """All results of a call, in the compute dtype."""
    visible = formula.visible_pairs(call)
    p, lse = _probabilities(call, visible)
    weights = formula.times(p, formula.kept_share(call, p))
    touched = visible if call.alpha is None else weights != 0
    attended = formula.product(weights, formula.per_head(call.value, p), touched)  # [B, H, T, Dv]
    gated = formula.times(attended, gates.factors(call))
    return Results(formula.only_rows(gated, formula.contributing(call, visible)), attended, lse)


@formula.without_autocast
def row_probabilities(call: Call) -> Tensor:
    """Probabilities `[B, H, T, S]` of a call, before dropout."""
    return _probabilities(call, formula.visible_pairs(call))[0]


def _probabilities(call: Call, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities `[B, H, T, S]`, and `lse` `[B, H, T]` or thresholds `[2, B, H, T]`."""
    raw = formula.raw_scores(call, *formula.operands_of_scores(call))  # [B, H, T, S]
    finished = formula.finish(call, raw)[0]
    if call.alpha is None:
        return formula.softmax(finished, visible, call.sinks)
    order = entmax.order_of(call.alpha)
    threshold = entmax.threshold(finished, visible, order)
    return entmax.row_logs(finished, threshold, order, visible).exp(), threshold


@formula.without_autocast
def backward(call: Call, saved: Saved, gradients: Gradients) -> None:
    """Fill the requested gradients, from what `forward` saved.

    The gradient of finished scores is `slopes * (dp - center)` with `dp = kept * (dattended value^T)`. In softmax the
    slopes are the probabilities, and the center of a row is the mean of `dp` with these weights, less `dlse`; in entmax
    the slopes are `p ^ (2 - alpha)`, and the center is their weighted mean (Correia, Niculae, Martins 2019).
    """
    dtype = compute_dtype(call.query.dtype)
    query, key = formula.operands_of_scores(call)
    dout, attended = saved.dout.to(dtype), saved.attended.to(dtype)
    visible = formula.visible_pairs(call)
    pairs = formula.contributing(call, visible)
    finished, slope_of_cap = formula.finish(call, formula.raw_scores(call, query, key))
    dattended = formula.times(dout, gates.factors(call))  # [B, H, T, Dv]
    value = formula.per_head(call.value, finished)
    logs = None
    if call.alpha is None:
        p = formula.probabilities(finished, saved.lse, pairs)
    else:
        if saved.dlse is not None:
            refuse("dlse", "is given", "pass None: thresholds have no gradient")
        order = entmax.order_of(call.alpha)
        logs = entmax.row_logs(finished, saved.lse, order, pairs)
        p = logs.exp()
    kept = formula.kept_share(call, p)

    of_scores = [g for n, g in gradients._asdict().items() if n not in ("dvalue", "dgate")]
    if any(gradient.numel() for gradient in of_scores):
        dp = formula.times(dattended @ value.mT, kept)
        if logs is None:
            slopes, inside = p, pairs
            center = (dattended * attended).sum(-1, keepdim=True)  # delta, [B, H, T, 1]
            if saved.dlse is not None:
                center = center - saved.dlse[..., None]
            if gradients.dsinks.numel():
                _fill_sinks(call, saved, center[..., 0], pairs, gradients.dsinks)
        else:
            slopes = entmax.slopes(logs, order)
            inside = slopes != 0
            dp = formula.only(inside, dp)
            total = slopes.sum(-1, keepdim=True)
            center = (dp * slopes).sum(-1, keepdim=True) / total.masked_fill(total == 0, 1.0)
            if gradients.dalpha.numel():
                # The derivatives of a row add up to 0, so any center may be subtracted.
                change = (dp - center) * entmax.alpha_derivative(logs, order)
                gradients.dalpha.copy_(formula.only(inside, change).sum(-1))
        dscores = formula.score_gradient(slopes, dp, center, inside)  # [B, H, T, S]
        if gradients.dbias.numel():
            formula.bias_gradient(dscores, gradients.dbias)
        if gradients.doffset_bias.numel():
            formula.offset_gradient(dscores, gradients.doffset_bias)
        draw = call.scale * formula.only(inside, formula.times(dscores, slope_of_cap))
        _fill_operands(call, query, key, draw, pairs if logs is None else draw != 0, gradients)
    if gradients.dvalue.numel():
        weights = formula.times(p, kept)
        touched = pairs if logs is None else weights != 0
        dvalue = formula.product(weights.mT, dattended, None if touched is None else touched.mT)
        gradients.dvalue.copy_(formula.per_group(dvalue, call.value))
    if gradients.dgate.numel() and call.gate is not None:
        seen = visible if call.closed_grad else pairs
        gradients.dgate.copy_(formula.gate_rows(dout, attended, call.gate, seen))


def _fill_sinks(call: Call, saved: Saved, delta: Tensor, pairs: Tensor | None, dsinks: Tensor) -> None:
    """Fill the gradient of sinks, from their share of the probability of each row."""
    assert call.sinks is not None
    lse, dlse = saved.lse, saved.dlse
    share = (call.sinks.to(lse.dtype)[:, None] - lse).exp()  # [B, H, T]
    share = share.masked_fill(lse == NEG_INF, 0.0)
    rows = formula.only_rows((share * -delta)[..., None], pairs)[..., 0]
    if dlse is not None and pairs is not None:  # the lse of a row that sees nothing is the sink
        alone = ~pairs.any(-1) & (lse > NEG_INF)
        rows = torch.where(alone, share * dlse, rows)
    dsinks.copy_(rows)


def _fill_operands(
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


# ---------------------------------------------------------------------- statistics
def statistics(call: Call, results: AttentionStatistics) -> None:
    """Fill `results` in blocks of rows: without a `[T, S]` matrix."""
    received: Any = results.received
    received.zero_()
    for start in range(0, call.T, _BLOCK_M):
        *parts, added = row_statistics(call.of_rows(start, start + _BLOCK_M))
        received += added
        for whole, part in zip(results[:-1], parts, strict=True):
            whole[:, :, start : start + _BLOCK_M] = part


@formula.without_autocast
def row_statistics(call: Call) -> AttentionStatistics:
    """Statistics of all rows of a call at once. The maximum is taken over scores: probabilities may all round to 0.

    `received` is empty if the call does not request it.
    """
    raw = formula.raw_scores(call, *formula.operands_of_scores(call))
    finished, visible = formula.finish(call, raw)[0], formula.visible_pairs(call)
    p, lse = formula.softmax(finished, visible, call.sinks)
    entropy = torch.special.entr(p).sum(-1)  # entr(p) = -p ln p, and 0 for p = 0
    received = lse.new_empty(0)
    if call.row_weights is not None:
        weights = call.row_weights[..., None]  # [B or 1, H or 1, T or 1, 1]
        received = formula.only(visible, p * weights).masked_fill(weights == 0, 0.0).sum(2)
    if finished.shape[-1] == 0:
        nothing, none = torch.full_like(lse, NEG_INF), torch.full_like(lse, -1, dtype=torch.int64)
        return AttentionStatistics(lse, nothing, torch.zeros_like(lse), none, entropy, received)
    if visible is not None:
        finished = finished.masked_fill(~visible, NEG_INF)
    if call.exclude_keys is not None:
        finished = finished.masked_fill(call.exclude_keys[:, None, None, :], NEG_INF)
    best, argmax = finished.max(-1)  # the first of equal scores
    nothing = best == NEG_INF
    max_prob = p.gather(-1, argmax[..., None])[..., 0].masked_fill(nothing, 0.0)
    chosen = argmax.masked_fill(nothing, -1)
    return AttentionStatistics(lse, best, max_prob, chosen, entropy, received)
