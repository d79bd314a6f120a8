"""`torch.compile(fullgraph=True)` of every operator on every GPU backend, with gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import heads_kernels as hk
from benchmarks.gpu.settings import DIFFERENTIABLE, TABLES, Items, Refused, Row, Settings
from heads_kernels.testing import Inputs, find

_CASES = {
    "gated_attention": "small_causal",
    "collaborative_attention": "small_bias",
    "entmax_attention": "small_causal",
}


def items(settings: Settings) -> Items:
    return {
        f"{operator}/{backend}": partial(_compiled, settings, operator, backend)
        for operator in TABLES
        for backend in settings.backends(operator)
    }


def _compiled(settings: Settings, operator: str, backend: str) -> Row:
    differentiable = operator in DIFFERENTIABLE
    case = find(
        *((operator, _CASES[operator]) if differentiable else ("gated_attention", "small_causal"))
    )
    drawn = case.make(torch.float32, settings.device)
    names = list(drawn.tensors) if differentiable else ["query", "key"]
    leaves = [drawn.tensors[name].detach().requires_grad_(differentiable) for name in names]

    def call(*values: Tensor) -> Any:
        arguments: dict[str, Any] = dict(zip(names, values, strict=True))
        return getattr(hk, operator)(**arguments, is_causal=True, backend=backend)

    given: dict[str, Any] = dict(zip(names, leaves, strict=True))
    choice = hk.explain(operator, **given, is_causal=True, backend=backend)
    if choice.backend is None:
        raise Refused("; ".join(choice.refusals[backend]))
    torch._dynamo.reset()
    # Inductor needs a C++ compiler on the CPU and takes long; there the tracing alone is shown.
    engine = "inductor" if settings.on_gpu else "aot_eager"
    compiled = torch.compile(call, fullgraph=True, backend=engine)
    got, want = compiled(*leaves), call(*leaves)
    # The same kernels; what stands around them may be fused and sum in another order.
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    if differentiable:
        _same_gradients(drawn, got, want, leaves)
    return {}


def _same_gradients(drawn: Inputs, got: Tensor, want: Tensor, leaves: list[Tensor]) -> None:
    pairs = zip(
        torch.autograd.grad(got, leaves, drawn.dout),
        torch.autograd.grad(want, leaves, drawn.dout),
        drawn.tensors,
        strict=True,
    )
    for grad, expected, name in pairs:
        torch.testing.assert_close(
            grad, expected, rtol=1e-4, atol=1e-5, msg=partial("d{}: {}".format, name)
        )
