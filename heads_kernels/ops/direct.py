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
    check_scale,
    check_sinks,
    check_sizes,
    check_softcap,
    check_whole_sequence,
)
from heads_kernels.dispatch import in_order
from heads_kernels.mask import Mask
from heads_kernels.offset_bias import OffsetBias
from heads_kernels.ops import support
from heads_kernels.ops.buffers import empty_heads
from heads_kernels.ops.library import load
from heads_kernels.ops.operator import Call, Operator, Results
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
    recording = torch.is_grad_enabled()
    mask = attn_mask if isinstance(attn_mask, Tensor) else None
    added = bias.values if isinstance(bias, OffsetBias) else bias
    for tensor in (query, key, value, mixing, content_bias, gate, mask, added, sinks):
        if tensor is not None and (
            type(tensor) not in _CLASSES
            or (recording and tensor.requires_grad)
            or tensor.is_neg()  # the extension reads memory, where the sign is not
        ):
            return None
    if (
        not query.is_cpu
        or (
            backend is None
            and in_order(operator.backends, operator.name, query.device)[0].name != "cpu"
        )
        or (gate is None and gate_activation != "identity")
    ):
        return None
    try:
        check_whole_sequence()
        if mixing is None:
            B, H, T, width = query.shape
        else:
            (B, T, width), H = query.shape, mixing.shape[0]
        _, _, S, Dv = value.shape
        check_sizes(B, H, T, S)
        attn_mask, dense, table = biases_of(attn_mask, bias, query, (B, H, T, S), None)
        check_sinks(sinks, query, H)
        call = Call(
            query=query,
            key=key,
            value=value,
            mixing=mixing,
            content_bias=content_bias,
            gate=gate,
            bias=dense,
            offset_bias=table,
            sinks=sinks,
            alpha=None,
            intervals=intervals_of(attn_mask, is_causal, query, (B, H, T, S), None),
            scale=check_scale(scale, width if mixing is None else width / max(H, 1), query.dtype),
            softcap=check_softcap(softcap),
            gate_activation=gate_activation,
        )
        out = empty_heads(query if mixing is None else value, B, H, T, Dv)
        if not out.numel():
            return None
        results = Results(out, attended=None, lse=None)  # type: ignore[arg-type]
        load(operator.backends, "cpu").forward(call, results)
    except (TypeError, ValueError, RuntimeError):
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
