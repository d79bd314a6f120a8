"""The torch op of attention statistics: no gradient flows through it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from heads_kernels.flops import forward_flops
from heads_kernels.mask import Intervals
from heads_kernels.ops.attention_statistics import BACKENDS
from heads_kernels.ops.layout import compute_dtype
from heads_kernels.ops.library import define_op, load
from heads_kernels.ops.validation import check_operands
from heads_kernels.problem import Problem


class AttentionStatistics(NamedTuple):
    """One number per query row, each `[B, H, T]`; see `attention_statistics`."""

    lse: Tensor
    max_prob: Tensor
    argmax: Tensor
    entropy: Tensor


def allocate(query: Tensor, mixing: Tensor | None) -> AttentionStatistics:
    """float32 (float64 for float64 inputs), argmax int64."""
    dtype = compute_dtype(query.dtype)
    B, T = query.shape[0], query.shape[-2]
    shape = (B, query.shape[1] if mixing is None else mixing.shape[0], T)
    return AttentionStatistics(
        query.new_empty(shape, dtype=dtype),
        query.new_empty(shape, dtype=dtype),
        query.new_empty(shape, dtype=torch.int64),
        query.new_empty(shape, dtype=dtype),
    )


def _check(
    backend: str | None,
    query: Tensor,
    key: Tensor,
    mixing: Tensor | None,
    content_bias: Tensor | None,
    excluded: Tensor | None,
    intervals: Intervals,
) -> None:
    """Refuse tensors that do not fit each other."""
    shared = {} if mixing is None else {"mixing": mixing}
    check_operands(
        backend,
        {"query": query, "key": key, **shared},
        intervals,
        content_bias=content_bias,
        excluded=excluded,
    )


def _statistics(
    query: Tensor, key: Tensor, mixing: Tensor | None, content_bias: Tensor | None, excluded: Tensor | None,
    k_lo: Tensor | None, k_hi: Tensor | None, key_visible: Tensor | None, dense_mask: Tensor | None,
    band_lo: int, band_hi: int, scale: float, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    intervals = Intervals(band_lo, band_hi, k_lo, k_hi, key_visible, dense_mask)
    _check(backend, query, key, mixing, content_bias, excluded, intervals)
    result: tuple[Tensor, Tensor, Tensor, Tensor] = load(BACKENDS, backend).forward(
        query, key, mixing, content_bias, excluded, intervals, scale
    )
    return result


def _statistics_fake(
    query: Tensor, key: Tensor, mixing: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    content_bias, excluded, k_lo, k_hi, key_visible, dense_mask, band_lo, band_hi, *_ = rest
    intervals = Intervals(band_lo, band_hi, k_lo, k_hi, key_visible, dense_mask)
    _check(None, query, key, mixing, content_bias, excluded, intervals)
    lse, max_prob, argmax, entropy = allocate(query, mixing)
    return lse, max_prob, argmax, entropy


def _statistics_flops(query: Any, key: Any, mixing: Any, *call: Any, **kwargs: Any) -> int:
    H = query[1] if mixing is None else mixing[0]
    return forward_flops(query[0] * H * query[-2] * key[-2], query[-1], 0)


statistics_op = define_op(
    "attention_statistics",
    """(
        Tensor query, Tensor key, Tensor? mixing, Tensor? content_bias, Tensor? excluded,
        Tensor? k_lo, Tensor? k_hi, Tensor? key_visible, Tensor? dense_mask, SymInt band_lo, SymInt band_hi,
        float scale, str backend
    ) -> (Tensor lse, Tensor max_prob, Tensor argmax, Tensor entropy)""",
    _statistics,
    _statistics_fake,
    _statistics_flops,
)


def attention_statistics(problem: Problem, backend: str) -> AttentionStatistics:
    """Run a valid problem on `backend`."""
    p, mask = problem, problem.intervals
    call = (
        p.query, p.key, p.mixing, p.content_bias, p.exclude_keys,
        mask.k_lo, mask.k_hi, mask.key_visible, mask.dense, mask.band_lo, mask.band_hi, p.scale,
    )  # fmt: skip
    with torch.no_grad():
        return AttentionStatistics(*statistics_op(*call, backend))
