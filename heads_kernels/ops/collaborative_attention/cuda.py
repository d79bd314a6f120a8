"""Collaborative attention on the `cuda` backend: the order of the kernels in `csrc/cuda/`."""

from __future__ import annotations

import torch
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
    dquery, dkey, dvalue, dmixing, dcontent_bias, dgate = gradients[:6]
    arguments, dout = _arguments(call, call.gate), contiguous_rows(saved.dout)
    delta, dattended, gate = cuda.attention_rows(arguments, dout, saved.attended, saved.lse, dgate)
    if closed_grad:
        cuda.attention_closed(arguments, dout, dgate)
    arguments, read = _arguments(call, gate), (dattended, saved.lse, delta)
    _keys_pass(arguments, read, dkey, dvalue, dcontent_bias)
    _queries_pass(arguments, read, dquery, dmixing, closed_grad)


def _keys_pass(
    arguments: cuda.Call,
    read: tuple[Tensor, Tensor, Tensor],
    dkey: Tensor,
    dvalue: Tensor,
    dcontent_bias: Tensor,
) -> None:
    """Fill `dkey`, `dvalue` and `dcontent_bias`; an empty one is not computed."""
    if not (dkey.numel() or dvalue.numel() or dcontent_bias.numel()):
        return
    (_, key, *_), value, *_ = arguments
    (B, S, Ds), H, Dv = key.shape, value.shape[1], value.shape[3]
    tiles = cuda.tiles_of("collaborative_attention.keys", key.dtype, Ds, Dv)
    slices = -(-Ds // tiles.slice) if dkey.numel() else 1
    splits = splits_of(H, B * -(-S // tiles.block_n) * slices, key)
    parts = split_parts(dkey, splits)
    cuda.attention_keys(arguments, read, (parts, dvalue, dcontent_bias), splits)
    sum_parts(parts, dkey, splits)


def _queries_pass(
    arguments: cuda.Call,
    read: tuple[Tensor, Tensor, Tensor],
    dquery: Tensor,
    dmixing_rows: Tensor,
    closed_grad: bool,
) -> None:
    """Fill `dquery` and `dmixing_rows`; an empty one is not computed."""
    if not (dquery.numel() or dmixing_rows.numel()):
        return
    (query, *_), value, *_ = arguments
    (B, T, Ds), H, Dv = query.shape, value.shape[1], value.shape[3]
    if H == 0:
        dquery.zero_()  # the kernel stores what heads give
        return
    tiles = cuda.tiles_of("collaborative_attention.queries", query.dtype, Ds, Dv)
    row_tiles = -(-T // tiles.block_m)
    splits = splits_of(H, B * row_tiles * -(-Ds // tiles.slice), query)
    parts = split_parts(dquery, splits, torch.float32)
    of_mixing = dmixing_rows.new_empty((B, row_tiles, H, Ds)) if dmixing_rows.numel() else None
    cuda.attention_queries(arguments, read, (parts, of_mixing), splits, closed_grad)
    sum_parts(parts, dquery, splits)
    if of_mixing is not None:
        torch.sum(of_mixing, 1, out=dmixing_rows)


def _arguments(call: Call, gate: Tensor | None) -> cuda.Call:
    """The arguments of every pass; `gate` as far as it is still to be applied."""
    mixing, bias = cuda.single(call.mixing), cuda.single(call.content_bias)
    scores = call.query, call.key, mixing, bias, call.scale
    options = cuda.single(gate), call.gate_activation, call.seed, call.dropout_p
    return scores, call.value, mask_of(call.intervals), options
