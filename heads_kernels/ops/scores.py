"""The terms of a score between the product of query and key and the softmax.

    score = softcap * tanh(scale * raw / softcap) + bias

`raw` is `q_i . k_j`, mixed and with a content bias in collaborative attention. A sink is one extra score per row that
belongs to no key. These functions serve the eager backend; the kernels of each language have their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heads_kernels.batch import bias_batches, expand_bias
from heads_kernels.call import Call
from heads_kernels.offset_bias import diagonals

NEG_INF = float("-inf")


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


def of_rows(call: Call, start: int, stop: int) -> Call:
    """The call of only the query rows `start` to `stop - 1`."""
    count = len(range(start, min(stop, call.T)))
    band = call.intervals.from_row(start)
    own: dict[str, Any] = {"band_lo": band.band_lo, "band_hi": band.band_hi}
    for name, dim in call.along("T").items():
        own[name] = getattr(call, name).narrow(dim, start, count)
    if call.offset_bias is not None:  # its first offset is 1 - count - start
        first = call.T - (start + count)
        own["offset_bias"] = call.offset_bias[:, first : first + max(count + call.S - 1, 1)]
    return call._replace(**own)


def of_heads(call: Call, heads: Sequence[int]) -> Call:
    """The call of only these query heads, without a value."""
    call = call._replace(value=None, gate=None)
    index = torch.tensor(list(heads), dtype=torch.int64, device=call.query.device)
    own: dict[str, Any] = {name: getattr(call, name).index_select(dim, index) for name, dim in call.along("H").items()}
    if call.mixing is None:
        own["key"] = call.key[:, index // max(call.H // max(call.Hk, 1), 1)]
    return call._replace(**own)


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
