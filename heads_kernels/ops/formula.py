"""The parts of the eager backend: scores, softmax, products into which no hidden NaN enters, dropout and gates.

    score = softcap * tanh(scale * raw / softcap) + bias

`raw` is `q_i . k_j`, mixed and with a content bias in collaborative attention. A sink is one extra score per row that
belongs to no key. Tensors are in the compute dtype (float32, or float64 for float64 inputs) unless they are arguments
of an op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from heads_kernels.batch import bias_batches, expand_bias
from heads_kernels.call import Call, closed_heads, compute_dtype
from heads_kernels.offset_bias import diagonals
from heads_kernels.ops import gate as gates
from heads_kernels.ops.philox import keep_mask

NEG_INF = float("-inf")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def without_autocast(backend: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Run `backend` without the caller's autocast, which would cast its products to half precision."""

    @functools.wraps(backend)
    def shielded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        call: Any = args[0]
        with torch.autocast(call.query.device.type, enabled=False):
            return backend(*args, **kwargs)

    return shielded


def per_head(grouped: Tensor, query: Tensor) -> Tensor:
    """`[B, Hk, S, W]` as `[B, H, S, W]`, compute dtype: query head h reads `h // (H // Hk)`."""
    grouped = grouped.to(compute_dtype(query.dtype))
    group = query.shape[1] // max(grouped.shape[1], 1)
    return grouped if group == 1 else grouped.repeat_interleave(group, dim=1)


def per_group(of_heads: Tensor, grouped: Tensor) -> Tensor:
    """The gradient of `per_head`: the sum over the query heads that share a key head."""
    B, Hk, S, W = grouped.shape
    return of_heads.reshape(B, Hk, of_heads.shape[1] // max(Hk, 1), S, W).sum(2)


def operands_of_scores(call: Call, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The query `[B, H, T, D]`, mixed, and key `[B, H or 1, S, D]` of every head, in the compute dtype.

    Rows of a shared query without any of the pairs `visible` are 0.
    """
    dtype = compute_dtype(call.query.dtype)
    query, key = call.query.to(dtype), call.key.to(dtype)
    if call.mixing is not None:
        return only_rows(query[:, None], visible) * call.mixing[:, None].to(dtype), key[:, None]
    return query, per_head(key, query)


def raw_scores(call: Call, query: Tensor, key: Tensor) -> Tensor:
    """`query key^T + content_bias`, `[B, H, T, S]`."""
    raw = query @ key.mT
    if call.content_bias is not None:
        raw = raw + call.content_bias[:, :, None].to(raw.dtype)
    return raw


def finish(call: Call, raw: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scores `[B, H, T, S]` from the raw products, in their dtype; and the slope of the cap, None without a cap."""
    scores, slope = call.scale * raw, None
    if call.softcap:
        share = torch.tanh(scores / call.softcap)
        scores, slope = call.softcap * share, 1 - share.square()
    bias = dense_bias(call)
    return (scores if bias is None else scores + bias.to(scores.dtype)), slope


def dense_bias(call: Call) -> Tensor | None:
    """The bias of all pairs, `[B or 1, H or 1, T or 1, S or 1]`; None if the call has none."""
    B, _, T, S = call.sizes
    if call.offset_bias is not None:
        return diagonals(call.offset_bias, T, S)[None]
    return None if call.bias is None else expand_bias(call.bias, B)


def visible_pairs(call: Call) -> Tensor | None:
    """bool `[B or 1, H or 1, T, S]`, True where the mask shows the pair and its bias is not -inf; None: all pairs."""
    _, _, T, S = call.sizes
    mask = call.intervals
    visible = mask.to_dense(T, S, call.query.device) if mask.hides else None
    bias = dense_bias(call)
    if bias is not None:
        shown = (bias != NEG_INF).expand(-1, -1, T, S)
        visible = shown if visible is None else visible & shown
    return visible


def softmax(scores: Tensor, visible: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities `[B, H, T, S]` and `lse` `[B, H, T]` of the visible scores and the sinks.

    Hidden pairs have probability 0, whatever their score. A row without visible scores above -inf
    has probabilities 0, and its sink or -inf as `lse`.
    """
    if visible is not None:
        scores = scores.masked_fill(~visible, NEG_INF)
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    blank = (scores == NEG_INF).all(-1, keepdim=True)
    scores = scores.masked_fill(blank, 0.0)  # the derivative of a row of -inf is NaN
    p = torch.softmax(scores, -1).masked_fill(blank, 0.0)
    lse = torch.logsumexp(scores, -1).masked_fill(blank[..., 0], NEG_INF)
    return only(visible, p if sinks is None else p[..., :-1]), lse


def probabilities(scores: Tensor, lse: Tensor, visible: Tensor | None) -> Tensor:
    """`exp(scores - lse)`: the probabilities of `softmax`, from the `lse` that it returned."""
    p = torch.exp(scores - lse[..., None])
    return only(visible, p.masked_fill((lse == NEG_INF)[..., None], 0.0))


def only(pairs: Tensor | None, tensor: Tensor) -> Tensor:
    """`tensor` `[B, H, T, S]`, exactly 0 outside of `pairs`."""
    return tensor if pairs is None else tensor.masked_fill(~pairs, 0.0)


def product(weights: Tensor, operand: Tensor, touched: Tensor | None) -> Tensor:
    """`weights @ operand`, where NaN in a row of `operand` reaches only the rows that touch it.

    In a plain product it reaches all rows: `0 * nan` is nan. `weights` `[..., M, N]` are 0
    outside of `touched` (bool, broadcastable to them; None: all is touched, a plain product).
    Values of `operand` `[..., N, W]` that are not finite give nan to the elements that touch them.
    """
    if touched is None:
        return weights @ operand
    finite = torch.isfinite(operand)
    result = weights @ operand.masked_fill(~finite, 0.0)
    poisoned = touched.expand(weights.shape).to(operand.dtype) @ (~finite).to(operand.dtype)
    return result.masked_fill(poisoned > 0, float("nan"))


def kept_share(call: Call, p: Tensor) -> Tensor | None:
    """The dropout factor of each probability `p`, 0 or `1 / (1 - dropout_p)`; None without dropout."""
    if call.seed is None or call.dropout_p == 0.0:
        return None
    kept = keep_mask(call.seed, call.dropout_p, *call.sizes, p.device)
    return kept.to(p.dtype) / (1.0 - call.dropout_p)


def times(tensor: Tensor, factor: Tensor | None) -> Tensor:
    """`tensor * factor`; a factor of None is 1."""
    return tensor if factor is None else tensor * factor


def contributing(call: Call, visible: Tensor | None) -> Tensor | None:
    """Visible pairs of open heads, `[B|1, H|1, T|1, S|1]`; None if these are all pairs.

    Only these take part in the output and in the gradients of queries, keys and values.
    """
    closed = closed_heads(call.gate, call.gate_activation)
    if closed is None:
        return visible
    is_open = ~closed[:, :, None, None]
    return is_open if visible is None else visible & is_open


def only_rows(tensor: Tensor, pairs: Tensor | None) -> Tensor:
    """`tensor` `[B, H, T, W]`, exactly 0 in rows without any of `pairs`."""
    return tensor if pairs is None else tensor.masked_fill(~pairs.any(-1, keepdim=True), 0.0)


def score_gradient(slopes: Tensor, dp: Tensor, center: Tensor, inside: Tensor | None) -> Tensor:
    """`slopes * (dp - center)` `[B, H, T, S]`: the gradient of the scores, exactly 0 outside of `inside`."""
    return only(inside, slopes * (dp - center))


def gate_rows(dout: Tensor, attended: Tensor, gate: Tensor, pairs: Tensor | None) -> Tensor:
    """`dout * attended` `[B, H, T, Dv]`, or summed over the width, `[B, H, T]`, unless the gate is elementwise."""
    rows = only_rows(dout * attended, pairs)
    return rows if gates.is_elementwise(gate) else rows.sum(-1)


def bias_gradient(dscores: Tensor, grad: Tensor) -> None:
    """Fill `grad` `[B1, B2, H, T, S]`: `dscores` `[B, H, T, S]` summed over the broadcast dimensions."""
    batches = bias_batches(grad, dscores.shape[0])
    grad.copy_(dscores.reshape(*batches, *dscores.shape[1:]).sum_to_size(grad.shape))


def offset_gradient(dscores: Tensor, grad: Tensor) -> None:
    """Fill `grad` `[B, H, T + S - 1]`: the sums of the diagonals of `dscores` `[B, H, T, S]`."""
    T, S = dscores.shape[2:]
    if T == 0 or S == 0:
        grad.zero_()
        return
    count = T + S - 1
    # Rows are padded on the left to `count` columns. Read as rows of count + 1, row i moves i columns to the left.
    rows = torch.nn.functional.pad(dscores, (T - 1, 0)).flatten(2)
    diagonals = torch.nn.functional.pad(rows, (0, T)).reshape(*dscores.shape[:2], T, count + 1)
    grad.copy_(diagonals[..., :count].sum(2))
