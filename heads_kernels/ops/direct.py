"""The direct path: passes that run without a torch op.

It is used only if the result is the same: no mode, transform, tracer or profiler of PyTorch, which act on ops, is
active, and every tensor is plain. On `cpu`, where it takes less than half of the time of an op in small calls, the
extension checks what `parse.check` checks; forward calls that it refuses run as ops, which raise the errors. On GPUs
it saves the host a quarter of the time of a forward call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, get_num_threads, is_grad_enabled
from torch._C import (
    _are_functorch_transforms_active,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from heads_kernels import backends
from heads_kernels.call import Call
from heads_kernels.ops.library import load

_profiler_enabled = torch._C._autograd._profiler_enabled
_ON_GPUS: Final = ("triton", "cuda")
_PLAIN: Final = (Tensor, torch.nn.Parameter)
_keys = torch._C._dispatch_keys


def attend(call: Call, backend: str | None) -> Tensor | tuple[Tensor, Tensor | None, Tensor] | None:
    """`out` of a call whose tensors are not checked, or None if the call has to run as an op.

    If gradients are enabled and an operand requires one, it returns (out, attended, lse); the caller records the call.
    """
    if backends.CPU_MISSING or call.dropout_p or not (call.query.is_cpu and is_unobserved()):
        return None
    if backend != "cpu" and (backend is not None or backends.first_on_cpu() != "cpu"):
        return None
    try:
        extension = load("cpu")._cpu
        return extension.attend(call, is_grad_enabled(), get_num_threads())  # type: ignore[no-any-return]
    except (TypeError, ValueError, RuntimeError):
        return None


def backward(call: Call, saved: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> list[Tensor] | None:
    """What `attention_backward` returns on `cpu`, or None if the pass has to run as an op."""
    if not is_unobserved():
        return None
    return load("cpu")._cpu.backward(call, saved, needs, get_num_threads())  # type: ignore[no-any-return]


def runs_without_op(backend: str, tensors: Sequence[Tensor | None]) -> bool:
    """Whether a pass of a valid call may run on this GPU backend without an op."""
    return backend in _ON_GPUS and is_unobserved() and all(each is None or _is_plain(each) for each in tensors)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is fully described by its memory: no subclass, and no view with a pending negation."""
    return type(tensor) in _PLAIN and _keys(tensor).raw_repr() in _plain_keys(tensor.device.type)


@functools.cache
def _plain_keys(device: str) -> tuple[int, int]:
    with torch.inference_mode(False):
        ordinary = torch.empty(0, device=device)
    with torch.inference_mode():
        return _keys(ordinary).raw_repr(), _keys(torch.empty(0, device=device)).raw_repr()


def is_unobserved() -> bool:
    """Whether nothing in PyTorch acts on ops or replaces them; autocast has been applied by `parse`."""
    return not (
        is_dynamo_compiling()
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _are_functorch_transforms_active()
        or _get_tracing_state() is not None
        or _profiler_enabled()
        or forward_ad._current_level >= 0
    )
