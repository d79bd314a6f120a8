"""Gated attention on the `cuda` backend: the order of the kernels in `csrc/cuda/`."""

from __future__ import annotations

from torch import Tensor

from heads_kernels.ops import cuda
from heads_kernels.ops.arguments import mask_of
from heads_kernels.ops.layout import contiguous_rows
from heads_kernels.ops.operator import Call, Gradients, Results, Saved
from heads_kernels.ops.parts import split_parts, splits_of, sum_parts


def forward(call: Call, results: Results) -> None:
    """Fill `results`; empty ones are not kept."""
    cuda.attention_forward(_arguments(call, call.gate), results)


def backward(call: Call, saved: Saved, closed_grad: bool, gradients: Gradients) -> None:
    """Fill `gradients`; empty ones are not computed."""
    dquery, dkey, dvalue, _, _, dgate = gradients[:6]
    arguments, dout = _arguments(call, call.gate), contiguous_rows(saved.dout)
    delta, dattended, gate = cuda.attention_rows(arguments, dout, saved.attended, saved.lse, dgate)
    if closed_grad:
        cuda.attention_closed(arguments, dout, dgate)
    arguments, read = _arguments(call, gate), (dattended, saved.lse, delta)
    _keys_pass(arguments, read, dkey, dvalue)
    if dquery.numel():
        cuda.attention_queries(arguments, read, (dquery, None), 1, closed_grad)


def _keys_pass(
    arguments: cuda.Call, read: tuple[Tensor, Tensor, Tensor], dkey: Tensor, dvalue: Tensor
) -> None:
    """Fill `dkey` and `dvalue`; an empty one is not computed."""
    if not (dkey.numel() or dvalue.numel()):
        return
    (query, key, *_), value, *_ = arguments
    (B, Hk, S, D), Dv, group = key.shape, value.shape[3], query.shape[1] // key.shape[1]
    tiles = cuda.tiles_of("gated_attention.keys", query.dtype, D, Dv)
    splits = splits_of(group, B * Hk * -(-S // tiles.block_n), query)
    dkey_parts, dvalue_parts = split_parts(dkey, splits), split_parts(dvalue, splits)
    cuda.attention_keys(arguments, read, (dkey_parts, dvalue_parts, None), splits)
    sum_parts(dkey_parts, dkey, splits)
    sum_parts(dvalue_parts, dvalue, splits)


def _arguments(call: Call, gate: Tensor | None) -> cuda.Call:
    """The arguments of every pass; `gate` as far as it is still to be applied."""
    scores = call.query, call.key, None, None, call.scale
    options = cuda.single(gate), call.gate_activation, call.seed, call.dropout_p
    return scores, call.value, mask_of(call.intervals), options
