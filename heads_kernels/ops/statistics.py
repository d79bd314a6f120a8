"""Statistics of attention rows (lse, largest probability, its key, entropy) as a torch op, without a `[T, S]` matrix.

`heads_kernels::attention_statistics` takes the fields of a `Call` without a value and has no gradient. A backend's
module fills the buffers that are allocated here: `statistics(call: Call, results: AttentionStatistics) -> None`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from heads_kernels.call import Call, compute_dtype
from heads_kernels.checks import refuse
from heads_kernels.flops import forward_flops
from heads_kernels.ops.library import FIELDS, check_arguments, define_op, dense_sizes, load


class AttentionStatistics(NamedTuple):
    """The result of `attention_statistics`: each field has one number per query row, `[..., H, T]`.

    `argmax` is int64; the others are float32 (float64 for float64 inputs).
    """

    lse: Tensor
    max_prob: Tensor
    argmax: Tensor
    entropy: Tensor


def measure(call: Call, backend: str) -> AttentionStatistics:
    """Run a valid call on `backend`."""
    with torch.no_grad():
        return AttentionStatistics(*statistics_op(*call, backend))


def _prepare(backend: str | None, *fields: Any) -> tuple[Call, AttentionStatistics]:
    """The call of the op, and its buffers; `backend` is None in a fake."""
    call = Call(*fields)
    if call.value is not None:
        refuse("value", "is given", "leave it out: statistics are of scores alone")
    check_arguments(backend, call)
    dtype, shape = compute_dtype(call.query.dtype), (call.B, call.H, call.T)
    dtypes = {"argmax": torch.int64}
    results = [
        call.query.new_empty(shape, dtype=dtypes.get(name, dtype))
        for name in AttentionStatistics._fields
    ]
    return call, AttentionStatistics(*results)


def _statistics(*arguments: Any) -> tuple[Tensor, ...]:
    *fields, backend = arguments
    call, results = _prepare(backend, *fields)
    load(backend).statistics(call, results)
    return results


statistics_op = define_op(
    "attention_statistics",
    f"({FIELDS}, str backend) -> (Tensor lse, Tensor max_prob, Tensor argmax, Tensor entropy)",
    _statistics,
    lambda *arguments: _prepare(None, *arguments[:-1])[1],
    lambda *shapes, **_: forward_flops(*dense_sizes(shapes)),
)
