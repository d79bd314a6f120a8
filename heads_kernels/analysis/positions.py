"""Keys by their offset from the query row: attention within a band of keys, without a map."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from heads_kernels.backends import BACKENDS
from heads_kernels.call import compute_dtype
from heads_kernels.mask import Intervals
from heads_kernels.nn.attention_call import AttentionCall, blocks
from heads_kernels.ops import formula
from heads_kernels.ops.attention import attend_with_lse
from heads_kernels.ops.scores import NEG_INF


def own_keys(call: AttentionCall) -> Tensor:
    """The key at the position of each row, int64 `[B or 1, T]`; it may be outside of [0, S).

    In self-attention it is the row itself, where the last row is the last key. In encoder-decoder attention positions
    are counted from the first real row and key, so that the side of the padding does not matter.
    """
    T, S = call.call.T, call.call.S
    rows = torch.arange(T, device=call.query.device)[None]
    if call.self_attention:
        return rows + (S - T)
    return rows + (first_real(call.real_keys) - first_real(call.real_queries))[:, None]


def first_real(real: Tensor) -> Tensor:
    """The first True of each row of `real` `[B, n]`, int64 `[B]`; 0 where there is none."""
    return real.byte().argmax(1)  # the first of equals


def offset_counts(call: AttentionCall, keys: Tensor, rows: Tensor) -> Tensor:
    """How often the chosen key of a head is at each offset from the row, int64 `[H, 2 N + 1]` for offsets -N to N.

    Args:
        call: with N = max(T, S).
        keys: `[B, H, T]`, the chosen key of each row, -1 for none.
        rows: bool `[B, T]`, the rows to count.
    """
    N = max(call.T, call.S)
    offsets = (keys - own_keys(call)[:, None]).clamp(-N, N) + N
    counted = (rows[:, None] & (keys >= 0)).long()
    counts = counted.new_zeros(call.H, 2 * N + 1)
    return counts.scatter_add_(1, *(x.transpose(0, 1).flatten(1) for x in (offsets, counted)))


def add_counts(some: Tensor, more: Tensor) -> Tensor:
    """The sum of two tensors `[H, 2 N + 1]` of possibly different N."""
    if some.shape[1] > more.shape[1]:
        some, more = more, some
    missing = (more.shape[1] - some.shape[1]) // 2
    return more + torch.nn.functional.pad(some, (missing, missing))


# ---------------------------------------------------------------------- bands
class Band(NamedTuple):
    """Keys `lo <= j < hi` of each row, int64 `[B or 1, T]` each, and `features` of the keys, `[B or 1, S, F]`."""

    lo: Tensor
    hi: Tensor
    features: Tensor


def attended(call: AttentionCall, lse: Tensor, bands: list[Band]) -> list[Tensor]:
    r"""Mean features of the keys that each row attends to within bands, `[B, H, T, F]` for each band.

    .. math:: \sum_{lo_i \le j < hi_i} p_{ij} f_j

    The operator of the call computes it with the features of keys as values: within a band its output is the mean of
    features weighted by the probabilities of the band, which add up to exp(lse of the band - lse). Calls that no fused
    backend can serve are computed by `blocks` of rows.

    Args:
        call: of sizes B, H, T, S.
        lse: `[B, H, T]`, of all visible keys.
        bands: with features that are exact in float32.
    """
    found = [_by_operator(call, lse, band) for band in bands]
    served = [part for part in found if part is not None]
    return served if len(served) == len(bands) else _by_blocks(call, bands)


@formula.without_autocast
def _by_operator(call: AttentionCall, lse: Tensor, band: Band) -> Tensor | None:
    """None where eager would serve the call, which holds all its probabilities."""
    dtype = compute_dtype(call.query.dtype)
    query, key, features = (x.to(dtype) for x in (call.query, call.key, band.features))
    heads = call.H if call.mixing is not None else key.shape[1]
    value = features[:, None].expand(call.B, heads, -1, -1)
    mask = call.intervals
    if mask.first_keys is not None:  # which the band limits
        mask = Intervals(dense=mask.to_dense(call.T, call.S, query.device))
    lo, hi = (x.clamp(0, call.S)[:, None] for x in (band.lo, band.hi))
    mask = (mask & Intervals(k_lo=lo, k_hi=hi)).laid_out(call.T)
    # A sink is in `lse`, and no part of a band.
    of_band = call.call._replace(query=query, key=key, value=value, sinks=None).under(mask)
    backend = next(row.name for row in BACKENDS if not row.unsupported(of_band))
    if backend == "eager":
        return None
    with torch.no_grad():
        out, band_lse = attend_with_lse(of_band, backend)
    share = torch.exp(band_lse - lse).masked_fill(band_lse == NEG_INF, 0.0)
    weighted: Tensor = share[..., None] * out
    return weighted


def _by_blocks(call: AttentionCall, bands: list[Band]) -> list[Tensor]:
    j = torch.arange(call.S, device=call.query.device)
    sizes, dtype = (call.B, call.H, call.T), compute_dtype(call.query.dtype)
    found = [j.new_empty((*sizes, band.features.shape[2]), dtype=dtype) for band in bands]
    for rows in blocks(call.T, call.B * call.H * call.S):
        p = call.probabilities(rows)
        for band, part in zip(bands, found, strict=True):
            within = (j >= band.lo[:, rows, None]) & (j < band.hi[:, rows, None])
            part[:, :, rows] = (p * within[:, None]) @ band.features.to(p.dtype)[:, None]
    return found
