"""Forward passes on the `cpu` backend that go straight to its extension, without a `Problem` and a torch op.

That halves the time of a small call and more. A call takes this way only if nothing would notice the difference: no
gradient is recorded, and no mode, transform, tracer, autocast or profiler of PyTorch is active, which act on ops. The
extension checks what a `Problem` checks of these calls. What it refuses goes the ordinary way, which has the messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from heads_kernels.checks import (
    MAX_LENGTH,
    check_activation,
    check_scale,
    check_softcap,
    check_whole_sequence,
)
from heads_kernels.dispatch import in_order
from heads_kernels.mask import Mask
from heads_kernels.offset_bias import OffsetBias
from heads_kernels.ops import support
from heads_kernels.ops.arguments import terms_of
from heads_kernels.ops.library import load
from heads_kernels.ops.operator import Operator
from heads_kernels.problem import biases_of, intervals_of

if TYPE_CHECKING:
    from heads_kernels.checks import GateActivation

#: Other classes may have an implementation of ops of their own.
_CLASSES: Final = (Tensor, Parameter)


def forward(
    operator: Operator,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor | None,
    content_bias: Tensor | None,
    attn_mask: Mask | Tensor | None,
    is_causal: bool,
    gate: Tensor | None,
    gate_activation: GateActivation,
    bias: Tensor | OffsetBias | None,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float | None,
    backend: str | None,
) -> Tensor | None:
    """`out`, or None where the call has to go the ordinary way. All other arguments have their defaults."""
    if not _is_unobserved() or backend not in (None, "cpu") or not support.CPU_EXTENSION:
        return None
    if type(query) not in _CLASSES or not query.is_cpu:
        return None
    if query.requires_grad and torch.is_grad_enabled():  # as in training: known before any work
        return None
    if (backend is None and in_order(operator.backends, operator.name, query)[0].name != "cpu") or (
        gate is None and gate_activation != "identity"
    ):
        return None
    for tensor in (attn_mask, bias):  # what is made of them need not be of their class
        if isinstance(tensor, Tensor) and type(tensor) not in _CLASSES:
            return None
    try:
        check_whole_sequence()
        check_activation(gate_activation)  # the extension has one more, for ops
        if mixing is None:
            B, H, T, width = query.shape
        else:
            (B, T, width), (H, _) = query.shape, mixing.shape
        *_, S, _ = key.shape
        if T > MAX_LENGTH or S > MAX_LENGTH:  # refused before memory is taken for the mask
            return None
        shape = B, H, T, S
        attn_mask, dense, table = biases_of(attn_mask, bias, query, shape, None)
        terms = terms_of(dense, table, sinks, check_softcap(softcap))
        scale = check_scale(scale, width if mixing is None else width / max(H, 1), query.dtype)
        out: Tensor | None = load(operator.backends, "cpu").attend(
            (query, key, mixing, content_bias, scale, terms),
            value,
            intervals_of(attn_mask, is_causal, query, shape, None),
            (gate, gate_activation, None, 0.0),
        )
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
    return out


def _is_unobserved() -> bool:
    """Whether nothing in PyTorch acts on ops or replaces them."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
        or torch.is_autocast_enabled("cpu")
        or forward_ad._current_level >= 0
    )
