"""The launcher that both operators share: calls of the compiled extension `heads_kernels._cuda`.

Kernels run on the device and the current stream of their tensors; emulated, on CPU tensors. Gradients of heads or of
tiles that several blocks of threads would sum are parts, to be added up in order afterwards (`parts.py`).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from heads_kernels.ops.arguments import MaskParts, Options, Scores, asked_for
from heads_kernels.ops.gate import can_close, is_elementwise
from heads_kernels.ops.support import CUDA_EMULATED

if TYPE_CHECKING or not CUDA_EMULATED:
    from heads_kernels import _cuda
else:
    from heads_kernels import _cuda_emulated as _cuda

#: What every pass over scores takes: scores, value, mask, options.
Call = tuple[Scores, Tensor, MaskParts, Options]


class Tiles(NamedTuple):
    """What one block of threads owns: query rows, keys, features of the shared width."""

    block_m: int
    block_n: int
    slice: int


@functools.cache
def tiles_of(kernel: str, dtype: torch.dtype, D: int, Dv: int) -> Tiles:
    """Tiles of "gated_attention.keys" and the like; `D` is the width of scores, `Ds` where it is shared."""
    return Tiles(*_cuda.tiles_of(kernel, dtype, D, Dv))


def single(tensor: Tensor | None) -> Tensor | None:
    """A gate, mixing or bias without float64, which the kernels do not know.

    Kernels skip what is exactly 0, so a number that float32 can't hold becomes its smallest normal one.
    """
    if tensor is None or tensor.dtype != torch.float64:
        return tensor
    narrow = tensor.float()
    least = torch.full_like(narrow, torch.finfo(torch.float32).smallest_normal).copysign(narrow)
    return torch.where((narrow == 0) & (tensor != 0), least, narrow)


def attention_forward(call: Call, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """Fill `outputs` (out, attended, lse); of the last two empty ones are not kept."""
    out, attended, lse = outputs
    _cuda.attention_forward(*call, (out, asked_for(attended), asked_for(lse)), _where(out))


def attention_rows(
    call: Call, dout: Tensor, attended: Tensor, lse: Tensor, dgate_rows: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The first pass of the backward: fills `dgate_rows` unless it is empty, of open heads.

    Returns `delta`, `dattended` and the gate still to be applied to it: `dattended` is `dout` itself, with the gate
    left, unless the gate is elementwise: then the gate is in it.
    """
    gate, activation, *_ = call[3]
    delta = torch.empty_like(lse)
    elementwise = gate is not None and is_elementwise(gate)
    product = torch.empty_like(attended) if elementwise else None
    read, written = (dout, attended, lse), (delta, asked_for(dgate_rows), product)
    _cuda.attention_rows((gate, activation), read, written, _where(dout))
    return (delta, dout, gate) if product is None else (delta, product, None)


def attention_closed(call: Call, dout: Tensor, dgate_rows: Tensor) -> None:
    """Write the rows of closed heads into `dgate_rows`, where that is asked for and a gate can close a head."""
    gate, activation, *_ = call[3]
    if dgate_rows.numel() and gate is not None and can_close(gate, activation):
        _cuda.attention_closed(*call, dout, dgate_rows, _where(dout))


def attention_keys(
    call: Call,
    read: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor | None],
    splits: int,
) -> None:
    """Fill `gradients` (dkey, dvalue, dcontent_bias); empty ones are not computed.

    `read` is dattended, lse, delta.
    """
    dkey, dvalue, dcontent_bias = (asked_for(gradient) for gradient in gradients)
    _cuda.attention_keys(*call, read, (dkey, dvalue, dcontent_bias), splits, _where(read[0]))


def attention_queries(
    call: Call,
    read: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor | None],
    splits: int,
    closed_grad: bool,
) -> None:
    """Fill `gradients` (dquery, dmixing); empty ones are not computed. `read` is dattended, lse, delta."""
    dquery, dmixing = (asked_for(gradient) for gradient in gradients)
    _cuda.attention_queries(*call, read, (dquery, dmixing), splits, closed_grad, _where(read[0]))


def _where(tensor: Tensor) -> tuple[int, int]:
    """The device of a tensor and its current stream."""
    if CUDA_EMULATED:
        return 0, 0
    if not tensor.is_cuda:
        raise ValueError(f"tensors are on {tensor.device}; the CUDA kernels serve CUDA tensors")
    index = tensor.device.index
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return index, stream
