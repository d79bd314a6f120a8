"""`attention_statistics` on the GPU backends against `eager` in float64 on the same inputs.

The bound is derived. Let e be the error of a score of the row that rounding alone explains: u_c times
the sum of its absolute terms, and where a mixed query is rounded to the working dtype, u_w times the
root of the sum of their squares. Then lse is off by up to e, a probability p by 2 e p, and the entropy
by 2 e (1 + entropy). Errors of single scores scatter: four times that is allowed.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

import heads_kernels as hk
from benchmarks.gpu.settings import FAILED, PASSED, TABLES, Items, Refused, Row, Settings, word
from heads_kernels.dispatch import BackendName, choose
from heads_kernels.problem import Problem
from heads_kernels.testing import CASES, Case, Inputs, plain
from heads_kernels.testing.rounding import unit

OPERATOR: Final = "attention_statistics"
_NAMES: Final = ("query", "key", "mixing", "content_bias", "attn_mask", "is_causal", "scale")
_FACTOR: Final = 4.0


def items(settings: Settings) -> Items:
    found = [case for case in CASES if "model" not in case.tags and not case.dropout_p and case.S]
    if settings.tiny:
        found = [case for case in found if case.name in ("small_causal", "small_bias")]
    return {
        f"{OPERATOR}/{case.operator}-{case}/{word(dtype)}/{backend}": partial(
            _check, settings, case, dtype, backend
        )
        for dtype in settings.dtypes()
        for case in found
        for backend in settings.backends(OPERATOR)
    }


def _check(settings: Settings, case: Case, dtype: torch.dtype, backend: BackendName) -> Row:
    wrong, worst = check_statistics(case.make(dtype, settings.device), backend)
    return {
        "verdict": FAILED if wrong else PASSED,
        "detail": "; ".join(wrong),
        "ratio": round(worst, 4),
    }


def statistics_call(inputs: Inputs, backend: str) -> dict[str, Any]:
    """What `attention_statistics` takes of a call; raises `Refused` where `backend` can not serve it."""
    given = {n: v for n, v in {**inputs.tensors, **inputs.options}.items() if n in _NAMES}
    table = TABLES[OPERATOR]
    if backend not in [row.name for row in table]:
        raise Refused(f"{OPERATOR} has no backend {backend!r}")
    choice = choose(table, Problem.statistics(**given), backend)
    if choice.backend is None:
        raise Refused("; ".join(choice.refusals[backend]))
    return given


def check_statistics(inputs: Inputs, backend: BackendName) -> tuple[list[str], float]:
    """What is wrong, and the largest error as a part of its bound."""
    given = statistics_call(inputs, backend)
    got = hk.attention_statistics(**given, backend=backend)
    wide = {n: v.double() if _is_float(v) else v for n, v in given.items()}
    want = hk.attention_statistics(**wide, backend="eager")
    probabilities = plain(Problem.statistics(**wide)).probabilities
    error = _score_error(Problem.statistics(**given), inputs.dout.dtype)
    return _judge(got, want, probabilities, error)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _score_error(p: Problem, dtype: torch.dtype) -> Tensor:
    """`[B, H, T]`: the largest error of a visible score of every row that rounding explains."""
    query, key = p.query.double(), p.key.double()
    if p.mixing is None:
        key = key.repeat_interleave(p.H // max(p.Hk, 1), 1)
    else:
        query, key = query[:, None] * p.mixing.double()[:, None], key[:, None]
    size = query.abs() @ key.abs().mT
    error = unit(torch.float32) * size
    if p.mixing is not None:
        error = error + unit(dtype) * (query.square() @ key.square().mT).sqrt()
    if p.content_bias is not None:
        error = error + unit(torch.float32) * p.content_bias.double().abs()[:, :, None]
    error = abs(p.scale) * (error + unit(torch.float32) * size)
    visible = p.intervals.to_dense(p.T, p.S, error.device)
    return error.masked_fill(~visible, 0.0).amax(-1)


def _judge(
    got: hk.AttentionStatistics, want: hk.AttentionStatistics, probabilities: Tensor, e: Tensor
) -> tuple[list[str], float]:
    u = 4 * unit(torch.float32)  # exponential, logarithm, division, and the sum of the row
    bounds = {
        "lse": e + u * (1 + want.lse.nan_to_num(neginf=0.0).abs()),
        "max_prob": (2 * e + u) * want.max_prob,
        "entropy": (2 * e + u) * (1 + want.entropy),
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
    # Of keys within rounding of each other either may be the maximum.
    none = want.argmax < 0
    if not torch.equal(got.argmax < 0, none):
        wrong.append("argmax: another row sees no key")
    else:
        at = probabilities.gather(-1, got.argmax.clamp(min=0)[..., None])[..., 0]
        short = want.max_prob - at > _FACTOR * (2 * e + u) * want.max_prob
        if bool((short & ~none).any()):
            wrong.append(f"argmax: {int((short & ~none).sum())} rows name a smaller probability")
    return wrong, worst
