"""Statistics of attention rows (lse, largest probability, its key, entropy) that never build the `[T, S]` matrix.

The op has no gradient.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from heads_kernels.dispatch import Backend
from heads_kernels.flops import forward_flops
from heads_kernels.ops import support
from heads_kernels.ops.buffers import compute_dtype
from heads_kernels.ops.library import define_op, load
from heads_kernels.ops.operator import Call, Signature
from heads_kernels.problem import Problem

#: In order of preference.
BACKENDS = (
    Backend("cpu", "heads_kernels.ops.attention_statistics.native", support.cpu),
    Backend("triton", "heads_kernels.ops.attention_statistics.triton", support.triton),
    # After Triton, but for float32 (`dispatch`), until a measurement on a GPU decides: neither has run on one.
    Backend("cuda", "heads_kernels.ops.attention_statistics.cuda", support.cuda),
    Backend("eager", "heads_kernels.ops.attention_statistics.eager", support.eager),
)
SIGNATURE: Final = Signature(
    "attention_statistics",
    ("query", "key", "mixing?", "content_bias?", "bias?", "offset_bias?", "sinks?"),
    BACKENDS,
    options=("scale", "softcap"),
)


class AttentionStatistics(NamedTuple):
    """One number per query row, each `[B, H, T]`: `argmax` in int64, the others in the compute dtype.

    See `functional.attention_statistics`.
    """

    lse: Tensor
    max_prob: Tensor
    argmax: Tensor
    entropy: Tensor


def _prepare(
    backend: str | None, *arguments: Any
) -> tuple[Call, Tensor | None, AttentionStatistics]:
    """The call, the keys excluded from the maximum, and the buffers that a backend fills."""
    *packed, excluded = arguments
    call = SIGNATURE.unpack(packed)
    SIGNATURE.check(backend, call, excluded=excluded)
    dtype, shape = compute_dtype(call.query.dtype), call.scores[:3]
    dtypes = {"argmax": torch.int64}
    results = [
        call.query.new_empty(shape, dtype=dtypes.get(name, dtype))
        for name in AttentionStatistics._fields
    ]
    return call, excluded, AttentionStatistics(*results)


def _statistics(*arguments: Any) -> tuple[Tensor, ...]:
    *rest, backend = arguments
    call, excluded, results = _prepare(backend, *rest)
    load(BACKENDS, backend).forward(call, excluded, results)
    return results


def _statistics_fake(*arguments: Any) -> tuple[Tensor, ...]:
    return _prepare(None, *arguments[:-1])[2]


def _statistics_flops(query: Any, key: Any, mixing: Any, *call: Any, **kwargs: Any) -> int:
    H = query[1] if mixing is None else mixing[0]
    return forward_flops(query[0] * H * query[-2] * key[-2], query[-1], 0)


statistics_op = define_op(
    SIGNATURE.name,
    f"({SIGNATURE.schema}, Tensor? excluded, str backend)"
    " -> (Tensor lse, Tensor max_prob, Tensor argmax, Tensor entropy)",
    _statistics,
    _statistics_fake,
    _statistics_flops,
)


def attention_statistics(problem: Problem, backend: str) -> AttentionStatistics:
    """Run a valid problem on `backend`."""
    arguments = SIGNATURE.pack(problem)
    with torch.no_grad():
        return AttentionStatistics(*statistics_op(*arguments, problem.exclude_keys, backend))
