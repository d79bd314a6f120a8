"""The formula of `eager` as a function that PyTorch differentiates to any order, in either mode.

`eager.backward` computes first derivatives in closed form. A call on the eager backend runs this code where those are
not enough: under forward-mode differentiation, inside a `torch.func` transform, and to differentiate its gradients.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from heads_kernels.call import Call
from heads_kernels.ops import entmax, formula
from heads_kernels.ops import gate as gates
from heads_kernels.ops.formula import NEG_INF

#: Newton steps from the threshold of entmax that are differentiated: n steps give derivatives up to order 2^n - 1.
_STEPS: Final = 3


@formula.without_autocast
def attend(call: Call) -> tuple[Tensor, Tensor]:
    """`out` in the dtype of the query, and `lse` `[B, H, T]`; of entmax the thresholds."""
    if call.mixing is not None and not call.closed_grad:
        call = call._replace(mixing=gates.without_gradient_at_0(call.mixing))
    visible = formula.visible_pairs(call)
    # Hidden rows of the query are 0: the slope of mixing would be NaN where a query is.
    raw = _product(*formula.operands_of_scores(call, visible))
    if call.content_bias is not None:
        raw = raw + call.content_bias[:, :, None].to(raw.dtype)
    # Before the cap: the derivative of a hidden NaN is NaN times 0.
    finished = formula.finish(call, formula.only(visible, raw))[0]
    if call.alpha is None:
        p, lse = formula.softmax(finished, visible, call.sinks)
    else:
        finished = finished if visible is None else finished.masked_fill(~visible, NEG_INF)
        p, lse = _entmax(finished, entmax.order_of(call.alpha))
    weights = formula.times(p, formula.kept_share(call, p))
    touched = visible if call.alpha is None else weights != 0
    attended = formula.product(weights, formula.per_head(call.value, p), touched)
    return gates.multiply(attended, call, None if visible is None else ~visible.any(-1)), lse


def _product(query: Tensor, key: Tensor) -> Tensor:
    """`query @ key^T`; numbers that are not finite have gradient 0 and add nothing to the gradient of others."""
    finite = [x.masked_fill(~torch.isfinite(x), 0.0) for x in (query, key)]
    product = finite[0] @ finite[1].mT
    whole = query.detach() @ key.detach().mT
    return product + (whole - product.detach())


def _entmax(finished: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and thresholds of scores; hidden scores are -inf."""
    top, above = entmax.threshold(finished.detach(), None, order.detach())[..., None]
    blank = top == NEG_INF
    seen = finished > NEG_INF
    below = torch.where(seen, finished, 0.0) - top.masked_fill(blank, 0.0)
    inside = seen & (order.detach() * (below.detach() - above) > -1.0)

    def logs_of(threshold: Tensor) -> Tensor:
        return torch.log1p(torch.where(inside, order * (below - threshold), 0.0)) / order

    for _ in range(_STEPS):
        logs = logs_of(above)
        total = formula.only(inside, logs.exp()).sum(-1, keepdim=True).masked_fill(blank, 1.0)
        excess = -torch.expm1(-order * total.log()) / order * total
        slopes = formula.only(inside, torch.exp((1.0 - order) * logs)).sum(-1, keepdim=True)
        above = above + excess / slopes.masked_fill(blank, 1.0)
    return formula.only(inside, logs_of(above).exp()), (top + above)[..., 0]
