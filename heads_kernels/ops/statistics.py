"""Statistics of query rows, and of what keys receive, as a torch op, without a `[T, S]` matrix.

`heads_kernels::attention_statistics` takes the fields of a `Call` without a value and has no gradient. A backend's
module fills the buffers that are allocated here, `statistics(call: Call, results: AttentionStatistics) -> None`;
`received` is an empty one if the call has no `row_weights`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from heads_kernels.call import Call, compute_dtype, forward_flops
from heads_kernels.ops.library import FIELDS, check_arguments, define_op, dense_sizes, load


class AttentionStatistics(NamedTuple):
    """The result of `attention_statistics`: each field has one number per query row, `[..., H, T]`.

    `argmax` is int64; the others are float32 (float64 for float64 inputs). `received` has one number per key,
    `[..., H, S]`, and is None if it was not requested.
    """

    lse: Tensor
    max_score: Tensor
    max_prob: Tensor
    argmax: Tensor
    entropy: Tensor
    received: Tensor | None = None


def measure(call: Call, backend: str) -> AttentionStatistics:
    """Run a valid call on `backend`."""
    with torch.no_grad():
        found = AttentionStatistics(*statistics_op(*call, backend))
    return found._replace(received=None) if call.row_weights is None else found


def _statistics(runs: bool, *arguments: Any) -> AttentionStatistics:
    *fields, backend = arguments
    call = Call(*fields)
    check_arguments(backend if runs else None, call, False)
    B, H, T, S = call.sizes
    dtype = compute_dtype(call.query.dtype)
    rows = {
        name: call.query.new_empty((B, H, T), dtype=torch.int64 if name == "argmax" else dtype)
        for name in AttentionStatistics._fields[:-1]
    }
    keys = (0,) if call.row_weights is None else (B, H, S)
    results = AttentionStatistics(**rows, received=call.query.new_empty(keys, dtype=dtype))
    if runs:
        load(backend).statistics(call, results)
    return results


def _flops(*shapes: Any, **_: Any) -> int:
    weighted = shapes[Call._fields.index("row_weights")] is not None
    return forward_flops(*dense_sizes(shapes)) * (2 if weighted else 1)


statistics_op = define_op(
    "attention_statistics",
    f"({FIELDS}, str backend) -> "
    "(Tensor lse, Tensor max_score, Tensor max_prob, Tensor argmax, Tensor entropy, Tensor received)",
    _statistics,
    _flops,
)
