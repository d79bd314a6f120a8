"""Keys by their offset from the query row: attention within a band of keys, without a map."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from heads_kernels.backends import select
from heads_kernels.call import compute_dtype
from heads_kernels.heads.layers import AttentionLayer
from heads_kernels.mask import Intervals
from heads_kernels.nn.attention_call import AttentionCall
from heads_kernels.ops import formula
from heads_kernels.ops.attention import attend_with_lse
from heads_kernels.ops.formula import NEG_INF


def own_keys(call: AttentionCall) -> Tensor:
    """The key at the position of each row, int64 `[B or 1, T]`; it may be outside of [0, S).

    In self-attention it is the row itself. In encoder-decoder attention positions are counted from the first real row
    and key, so that the side of the padding does not matter.
    """
    if call.self_attention:
        return call.own_keys[None]
    rows = torch.arange(call.call.T, device=call.query.device)[None]
    return rows + (first_real(call.real_keys) - first_real(call.real_queries))[:, None]


def first_real(real: Tensor) -> Tensor:
    """The first True of each row of `real` `[B, n]`, int64 `[B]`; 0 where there is none."""
    return real.byte().argmax(1)  # the first of equals


class OffsetCounts:
    """How often the chosen key of each head of `layers` is at each offset from its row."""

    def __init__(self, layers: Iterable[AttentionLayer]) -> None:
        #: By the index of the layer, int64 [H, 2 N + 1] for offsets -N to N.
        self.counts = {x.index: torch.zeros(x.num_heads, 1, dtype=torch.int64) for x in layers}

    def add(self, layer: AttentionLayer, call: AttentionCall, keys: Tensor, rows: Tensor) -> None:
        """Count `keys` `[B, H, T]`, the chosen key of each row or -1 for none, of the `rows`, bool `[B, T]`."""
        before = self.counts[layer.index].to(keys.device)
        N = max(call.T, call.S, before.shape[1] // 2)
        offsets = (keys - own_keys(call)[:, None]).clamp(-N, N) + N
        counted = (rows[:, None] & (keys >= 0)).long()
        missing = N - before.shape[1] // 2
        self.counts[layer.index] = torch.nn.functional.pad(before, (missing, missing)).scatter_add(
            1, *(x.transpose(0, 1).flatten(1) for x in (offsets, counted))
        )


# ---------------------------------------------------------------------- bands
@formula.without_autocast
@torch.no_grad()
def attended(call: AttentionCall, lse: Tensor, lo: Tensor, hi: Tensor, features: Tensor) -> Tensor:
    """Mean features of the keys that each row attends to within a band, `[B, H, T, F]`.

        sum over lo_i <= j < hi_i of p_ij * f_j

    with int64 `lo` and `hi` `[B or 1, T]`, and `features` of the keys `[B or 1, S, F]`.

    The operator of the call computes it with the features of keys as values: within a band its output is the mean of
    features weighted by the probabilities of the band (and of a sink, which has no features), which add up to
    exp(lse of the band - lse). `lse` `[B, H, T]` is that of all visible keys; features are exact in float32.
    """
    dtype = compute_dtype(call.query.dtype)
    query, key, features = (x.to(dtype) for x in (call.query, call.key, features))
    heads = call.H if call.mixing is not None else key.shape[1]
    value = features[:, None].expand(call.B, heads, -1, -1)
    mask = call.intervals
    if mask.first_keys is not None:  # which the band limits
        mask = Intervals(dense_mask=mask.to_dense(call.T, call.S, query.device))
    lo, hi = (x.clamp(0, call.S)[:, None] for x in (lo, hi))
    mask = (mask & Intervals(k_lo=lo, k_hi=hi)).laid_out(call.T)
    of_band = call.call._replace(query=query, key=key, value=value).under(mask)
    out, band_lse = attend_with_lse(of_band, select(of_band))
    share = torch.exp(band_lse - lse).masked_fill(band_lse == NEG_INF, 0.0)
    weighted: Tensor = share[..., None] * out
    return weighted
