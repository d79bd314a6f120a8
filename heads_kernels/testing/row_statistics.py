"""`attention_statistics` on a backend against `eager` in float64 on the same inputs.

The bound is derived. Let e be the error of a score that rounding alone explains: u_c times the sum of its absolute
terms, plus the roundings of a cap and a bias, plus u_w times the root of the sum of squares of the terms if a mixed
query is rounded to the working dtype. Then lse and the largest score are off by up to e, a probability p by 2 e p, the
entropy by 2 e (1 + entropy), and what a key receives by the sum over rows of 2 e p w plus the roundings of that sum,
u_c sqrt(T) times the sum of p w. Single scores may have larger errors, so four times these bounds are allowed.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import Tensor

from heads_kernels.batch import expand_bias
from heads_kernels.call import Call
from heads_kernels.functional import attention_statistics
from heads_kernels.offset_bias import diagonals
from heads_kernels.ops import eager
from heads_kernels.ops.statistics import AttentionStatistics
from heads_kernels.parse import parse
from heads_kernels.testing.inputs import Inputs
from heads_kernels.testing.rounding import unit

_NAMES: Final = inspect.signature(attention_statistics).parameters
_FACTOR: Final = 4.0


def statistics_arguments(inputs: Inputs) -> dict[str, Any]:
    """The arguments of `attention_statistics` for a call."""
    return {name: value for name, value in inputs.arguments().items() if name in _NAMES}


def check_statistics(inputs: Inputs, backend: Any) -> tuple[list[str], float]:
    """What is wrong, and the largest ratio of an error to its bound."""
    given = statistics_arguments(inputs)
    weights = row_weights(inputs)
    got = attention_statistics(**given, received=weights, backend=backend)
    wide = statistics_arguments(inputs.to(torch.float64))
    want = attention_statistics(**wide, received=weights.double(), backend="eager")
    exact, _ = parse("attention_statistics", **wide, received=weights.double())
    return _judge(got, want, exact, _score_error(exact, inputs.dout.dtype))


def row_weights(inputs: Inputs) -> Tensor:
    """Weights `[*batch, H, T]` of the rows of a call, some of them 0 and negative, float32."""
    sizes = inputs.dout.shape[:-1]
    weights = torch.arange(sizes.numel(), device=inputs.dout.device) % 7 - 2
    return weights.reshape(sizes) / 4


def _score_error(p: Call, dtype: torch.dtype) -> Tensor:
    """`[B, H, T]`: the largest error of a visible score of every row that rounding explains; `p` is in float64."""
    u, query, key = unit(torch.float32), p.query, p.key
    if p.mixing is None:
        key = key.repeat_interleave(p.H // max(p.Hk, 1), 1)
    else:
        query, key = query[:, None] * p.mixing[:, None], key[:, None]
    size = query.abs() @ key.abs().mT  # [B, H, T, S]
    error = u * size
    if p.mixing is not None:
        error = error + unit(dtype) * (query.square() @ key.square().mT).sqrt()
    if p.content_bias is not None:
        added = p.content_bias.abs()[:, :, None]
        size, error = size + added, error + u * added
    size, error = abs(p.scale) * size, abs(p.scale) * (error + u * size)
    if p.softcap:
        size = size.clamp(max=p.softcap)
        error = error + 3 * u * size  # of division, tanh and product
    visible = p.intervals.to_dense(p.T, p.S, error.device)
    bias = None if p.bias is None else expand_bias(p.bias, p.B)
    if p.offset_bias is not None:
        bias = diagonals(p.offset_bias, p.T, p.S)
    if bias is not None:
        visible = visible & (bias > -torch.inf)
        error = error + u * (2 * bias.abs() + size)
    return error.masked_fill(~visible, 0.0).amax(-1)


def _judge(
    got: AttentionStatistics, want: AttentionStatistics, exact: Call, e: Tensor
) -> tuple[list[str], float]:
    probabilities = eager.row_probabilities(exact)
    assert exact.row_weights is not None
    received = exact.row_weights.abs()[..., None] * probabilities  # [B, H, T, S]
    of_sum = unit(torch.float32) * exact.T**0.5
    u = 4 * unit(torch.float32)  # exponential, logarithm, division, and the sum of the row
    bounds = {
        "lse": e + u * (1 + want.lse.nan_to_num(neginf=0.0).abs()),
        "max_prob": (2 * e + u) * want.max_prob,
        "entropy": (2 * e + u) * (1 + want.entropy),
        "max_score": e + u * want.max_score.nan_to_num(neginf=0.0).abs(),
        "received": ((2 * e[..., None] + u + of_sum) * received).sum(2),
    }
    wrong, worst = [], 0.0
    for name, bound in bounds.items():
        a, b = getattr(got, name).double(), getattr(want, name)
        if not torch.equal(a.isfinite(), b.isfinite()):
            wrong.append(f"{name}: not finite in other places")
            continue
        part = torch.where(b.isfinite(), (a - b).abs() / (_FACTOR * bound + 1e-30), 0.0)
        share = float(part.max()) if part.numel() else 0.0
        worst = max(worst, share)
        if not share <= 1.0:
            wrong.append(f"{name}: {share:.2f} of its bound")
    # If two keys are within rounding of each other, either may be the maximum.
    none = want.argmax < 0
    if not torch.equal(got.argmax < 0, none):
        wrong.append("argmax: another row sees no key")
    else:
        at = probabilities.gather(-1, got.argmax.clamp(min=0)[..., None])[..., 0]
        short = want.max_prob - at > _FACTOR * (2 * e + u) * want.max_prob
        if bool((short & ~none).any()):
            wrong.append(f"argmax: {int((short & ~none).sum())} rows name a smaller probability")
    return wrong, worst
