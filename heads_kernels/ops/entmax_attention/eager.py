"""Adaptively sparse attention in plain PyTorch: an executable specification; in float64 the oracle of the tests.

    out = act(gate) * attended
    attended = dropout(entmax_alpha(scores  under the mask)) value

Scores are those of gated attention. Computation is in float32 (float64 for float64 inputs). What is saved in the place
of `lse` is the threshold of each row, in two numbers: see `entmax_attention.formula`. A key whose weight is 0, because
it is outside of the support of a row or dropped, adds nothing to the row, NaN included.
"""

from __future__ import annotations

from torch import Tensor

from heads_kernels.checks import refuse
from heads_kernels.ops import formula, scores
from heads_kernels.ops.buffers import compute_dtype
from heads_kernels.ops.eager import fill_operands
from heads_kernels.ops.entmax_attention import formula as entmax
from heads_kernels.ops.operator import Call, Gradients, Results, Saved
from heads_kernels.ops.scores import NEG_INF


def forward(call: Call, results: Results) -> None:
    """Fill `out`, and the thresholds and `attended` if requested, also for closed heads."""
    for result, computed in zip(results, _attend(call), strict=True):
        if result.numel():
            result.copy_(computed)


@formula.without_autocast
def row_probabilities(call: Call) -> Tensor:
    """Probabilities `[B, H, T, S]` of a call, before dropout."""
    return _probabilities(call, scores.visible_pairs(call))[0]


def _probabilities(call: Call, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities `[B, H, T, S]` and thresholds `[2, B, H, T]`."""
    order = _order(call)
    raw = formula.raw_scores(call, *formula.operands_of_scores(call))  # [B, H, T, S]
    finished = scores.finish(call, raw)[0]
    threshold = entmax.threshold(finished, visible, order)
    return _logs(finished, threshold, order, visible).exp(), threshold


@formula.without_autocast
def _attend(call: Call) -> Results:
    gate, activation, dtype = call.gate, call.gate_activation, compute_dtype(call.query.dtype)
    visible = scores.visible_pairs(call)
    p, threshold = _probabilities(call, visible)
    kept = formula.kept_share(call.seed, call.dropout_p, p.shape, p)
    value = formula.per_head(call.value, p)
    weights = formula.times(p, kept)
    attended = formula.product(weights, value, weights != 0)  # [B, H, T, Dv]
    gated = formula.times(attended, formula.opened(gate, activation, dtype))
    pairs = formula.contributing(visible, gate, activation)
    return Results(formula.only_rows(gated, pairs), attended, threshold)


@formula.without_autocast
def backward(call: Call, saved: Saved, closed_grad: bool, gradients: Gradients) -> None:
    """Fill the requested gradients, from what `forward` saved."""
    if saved.dlse is not None:
        refuse("dlse", "is given", "pass None: thresholds have no gradient")
    order = _order(call)
    gate, activation, dtype = call.gate, call.gate_activation, compute_dtype(call.query.dtype)
    query, key = formula.operands_of_scores(call)
    dout, attended = saved.dout.to(dtype), saved.attended.to(dtype)
    raw = formula.raw_scores(call, query, key)  # [B, H, T, S]
    visible = scores.visible_pairs(call)
    pairs = formula.contributing(visible, gate, activation)
    finished, slope = scores.finish(call, raw)
    logs = _logs(finished, saved.lse, order, pairs)
    p = logs.exp()
    kept = formula.kept_share(call.seed, call.dropout_p, p.shape, p)
    value = formula.per_head(call.value, p)
    dattended = formula.times(dout, formula.opened(gate, activation, dtype))  # [B, H, T, Dv]

    of_scores = [g for n, g in gradients._asdict().items() if n not in ("dvalue", "dgate")]
    if any(gradient is not None and gradient.numel() for gradient in of_scores):
        weights = entmax.slopes(logs, order)
        inside = weights != 0
        dp = formula.only(inside, formula.times(dattended @ value.mT, kept))
        total = weights.sum(-1, keepdim=True)
        center = (dp * weights).sum(-1, keepdim=True) / total.masked_fill(total == 0, 1.0)
        dscores = formula.only(inside, weights * (dp - center))
        if gradients.dbias.numel():
            scores.bias_gradient(dscores, gradients.dbias)
        if gradients.doffset_bias.numel():
            scores.offset_gradient(dscores, gradients.doffset_bias)
        if gradients.dalpha.numel():  # the derivatives of a row add up to 0, whatever is subtracted
            change = (dp - center) * entmax.alpha_derivative(logs, order)
            gradients.dalpha.copy_(formula.only(inside, change).sum(-1))
        draw = call.scale * formula.only(inside, formula.times(dscores, slope))
        fill_operands(call, query, key, draw, draw != 0, gradients)
    if gradients.dvalue.numel():
        weights = formula.times(p, kept).mT
        dvalue = formula.product(weights, dattended, weights != 0)
        gradients.dvalue.copy_(formula.per_group(dvalue, call.value))
    if gradients.dgate.numel() and gate is not None:
        gradients.dgate.copy_(
            formula.gate_rows(dout, attended, visible, gate, activation, closed_grad)
        )


def _order(call: Call) -> Tensor:
    """`alpha - 1`, `[H, 1, 1]`; refuses values for which entmax is not defined."""
    alpha: Tensor = call.alpha
    entmax.check_alpha_values(alpha)
    return (alpha - 1.0)[:, None, None]


def _logs(finished: Tensor, threshold: Tensor, order: Tensor, pairs: Tensor | None) -> Tensor:
    """`ln p` `[B, H, T, S]`, -inf outside of `pairs` and in rows that see no key."""
    top, above = threshold[..., None]
    logs = entmax.log_probabilities(finished - top, above, order)
    logs = logs.masked_fill(top == NEG_INF, NEG_INF)
    return logs if pairs is None else logs.masked_fill(~pairs, NEG_INF)
