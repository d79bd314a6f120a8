"""Gated and collaborative attention, and statistics, on the `cuda` backend: launches the kernels of `csrc/cuda/`.

The compiled extension `heads_kernels._cuda` launches them on the device and the current stream of their tensors
(emulated: on CPU tensors). A call without mixing runs the kernels of gated attention. Gradients to which several thread
blocks contribute are written as parts, which are then added in order (`buffers.py`).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from heads_kernels.backends import CUDA_EMULATED
from heads_kernels.call import OPERANDS, Call, can_close
from heads_kernels.ops.attention import Gradients, Results, Saved
from heads_kernels.ops.buffers import (
    SHORT_QUERY,
    contiguous_rows,
    key_splits,
    split_attended,
    split_parts,
    splits_of,
    sum_parts,
)
from heads_kernels.ops.gate import is_elementwise
from heads_kernels.ops.library import check_fields
from heads_kernels.ops.statistics import AttentionStatistics

if TYPE_CHECKING or not CUDA_EMULATED:
    from heads_kernels import _cuda
else:
    from heads_kernels import _cuda_emulated as _cuda

check_fields(_cuda)

#: Query rows and keys in a cell of a dense mask (kCell of csrc/cuda/kernels.h).
_CELL = 32

#: dattended, lse, delta
_Read = tuple[Tensor, Tensor, Tensor]


class _Tiles(NamedTuple):
    """The tile of a thread block: query rows, keys, features of the shared width."""

    block_m: int
    block_n: int
    slice: int


def forward(call: Call, results: Results) -> None:
    """Fill `results`, except empty ones."""
    call, splits = _single(call), _splits(call)
    parts = split_attended(results.out, splits) if splits else None
    _cuda.attention_forward(call, results, parts, _dense_cells(call), _launch_target(results.out))


def _splits(call: Call) -> int:
    """The number of splits of the keys, whose partial outputs a second pass combines; 0: a single pass."""
    B, H, T, S = call.sizes
    if is_decoding(call):
        tiles, Hk = _tiles(call, "decode"), call.key.shape[1]
        blocks = B * Hk * -(-H * T // max(Hk * tiles.block_m, 1))
        return key_splits(T, blocks, -(-S // tiles.block_n), call.query)
    if call.mixing is None:
        return 0
    tiles = _tiles(call, "forward")
    splits = key_splits(T, B * H * -(-T // tiles.block_m), -(-S // tiles.block_n), call.query)
    return splits if splits > 1 else 0


def is_decoding(call: Call) -> bool:
    """Whether the call runs on the kernel for few query rows, which reads a key once for all heads that share it."""
    _, _, T, S = call.sizes
    return call.mixing is None and T <= SHORT_QUERY and _tiles(call, "decode").block_n < S


def backward(call: Call, saved: Saved, gradients: Gradients) -> None:
    """Fill `gradients`, except empty ones."""
    call, dout, cells = _single(call), contiguous_rows(saved.dout), _dense_cells(call)
    delta, dattended = _rows_pass(call, dout, saved, gradients)
    gate = call.gate if call.closed_grad and gradients.dgate.numel() else None
    if gate is not None and can_close(gate, call.gate_activation):
        _cuda.attention_closed(call, dout, gradients.dgate, cells, _launch_target(dout))
    if dattended is not dout:  # it includes the gate
        call = call._replace(gate=None)
    read = dattended, saved.lse, delta
    _keys_pass(call, read, cells, gradients)
    _queries_pass(call, read, cells, gradients)
    _bias_pass(call, read, cells, gradients)


def _rows_pass(call: Call, dout: Tensor, saved: Saved, gradients: Gradients) -> tuple[Tensor, Tensor]:
    """Fill `dgate` of open heads and `dsinks`; returns `delta`, and `dout` times the gate if it is elementwise."""
    delta = torch.empty_like(saved.lse)
    product = None
    if call.gate is not None and is_elementwise(call.gate):
        product = torch.empty_like(saved.attended)
    read = saved._replace(dout=dout)
    written = delta, gradients.dgate, product, gradients.dsinks
    _cuda.attention_rows(call, read, written, _launch_target(dout))
    return delta, dout if product is None else product


def _keys_pass(call: Call, read: _Read, cells: Tensor | None, gradients: Gradients) -> None:
    """Fill `dkey`, `dvalue` and `dcontent_bias`."""
    dkey, dvalue, dcontent_bias = gradients.dkey, gradients.dvalue, gradients.dcontent_bias
    if not (dkey.numel() or dvalue.numel() or dcontent_bias.numel()):
        return
    B, H, S, width = call.B, call.H, call.S, call.D
    tiles = _tiles(call, "keys")
    if call.mixing is None:
        Hk = call.key.shape[1]
        group = H // max(Hk, 1)
        splits = splits_of(group, B * Hk * -(-S // tiles.block_n), call.key)
        if call.intervals.by_head:  # a block has one list of tiles, of one head
            splits = max(group, 1)
        dvalue_parts = split_parts(dvalue, splits)
    else:
        slices = -(-width // tiles.slice) if dkey.numel() else 1
        groups = call.value.shape[1]  # of heads that share a value head, which one block sums
        splits = splits_of(groups, B * -(-S // tiles.block_n) * slices, call.key)
        dvalue_parts = dvalue
    dkey_parts = split_parts(dkey, splits)
    written = dkey_parts, dvalue_parts, dcontent_bias
    _cuda.attention_keys(call, read, written, splits, cells, _launch_target(read[0]))
    sum_parts(dkey_parts, dkey, splits)
    sum_parts(dvalue_parts, dvalue, splits)


def _queries_pass(call: Call, read: _Read, cells: Tensor | None, gradients: Gradients) -> None:
    """Fill `dquery` and `dmixing`."""
    dquery, dmixing = gradients.dquery, gradients.dmixing
    if not (dquery.numel() or dmixing.numel()):
        return
    target = _launch_target(read[0])
    if call.mixing is None:
        _cuda.attention_queries(call, read, (dquery, dmixing), 1, cells, target)
        return
    B, H, T, width = call.B, call.H, call.T, call.D
    if H == 0:
        dquery.zero_()  # the kernel writes nothing without heads
        return
    tiles = _tiles(call, "queries")
    row_tiles = -(-T // tiles.block_m)
    splits = splits_of(H, B * row_tiles * -(-width // tiles.slice), dquery)
    parts = split_parts(dquery, splits, torch.float32)
    rows = dmixing.new_empty((B, row_tiles, H, width) if dmixing.numel() else 0)
    _cuda.attention_queries(call, read, (parts, rows), splits, cells, target)
    sum_parts(parts, dquery, splits)
    if dmixing.numel():
        torch.sum(rows, 1, out=dmixing)


def _bias_pass(call: Call, read: _Read, cells: Tensor | None, gradients: Gradients) -> None:
    """Fill `dbias` or `doffset_bias`."""
    dbias, doffset_bias = gradients.dbias, gradients.doffset_bias
    B, H, T, S = call.sizes
    block = _tiles(call, "bias").block_m
    target = _launch_target(read[0])
    if dbias.numel():
        B1, B2, *sizes = dbias.shape
        full = H, -(-T // block), -(-S // block)
        owners = [n if size > 1 else 1 for size, n in zip(sizes, full, strict=True)]
        blocks = B1 * B2 * owners[0] * owners[1] * owners[2]
        shares = B * H // max(B1 * B2 * owners[0], 1)
        splits = splits_of(shares, blocks, call.query)
        parts = split_parts(dbias, splits)
        _cuda.attention_bias(call, read, (parts, None), splits, cells, target)
        sum_parts(parts, dbias, splits)
    if doffset_bias.numel():
        # Offset j - i is in column j - i + row_tiles * block of both parts.
        row_tiles, key_tiles = -(-T // block), -(-S // block)
        parts = doffset_bias.new_zeros((2, B, H, (row_tiles + key_tiles) * block))
        _cuda.attention_bias(call, read, (None, parts), 1, cells, target)
        if T and S:
            first = row_tiles * block - (T - 1)
            columns = slice(first, first + doffset_bias.shape[2])
            torch.add(parts[0, ..., columns], parts[1, ..., columns], out=doffset_bias)
        else:
            doffset_bias.zero_()


def statistics(call: Call, results: AttentionStatistics) -> None:
    """Fill `results` of `attention_statistics`."""
    call, rows = _single(call), None
    if call.row_weights is not None:  # results of the pass by rows for the pass by keys
        rows = results.lse.new_empty((2, *results.lse.shape))
    cells, target = _dense_cells(call), _launch_target(results.lse)
    _cuda.attention_statistics(call, results, rows, cells, target)


def _single(call: Call) -> Call:
    """The call with float32 in place of float64 (of gates, mixing, ...), which the kernels do not support.

    Kernels skip exact zeros, so a number that underflows becomes the smallest normal one.
    """
    wide: dict[str, Any] = {
        name: _narrowed(operand)
        for name, operand in zip(OPERANDS, call.operands, strict=True)
        if operand is not None and operand.dtype == torch.float64
    }
    return call._replace(**wide) if wide else call


def _narrowed(tensor: Tensor) -> Tensor:
    narrow = tensor.float()
    least = torch.full_like(narrow, torch.finfo(torch.float32).smallest_normal).copysign(narrow)
    return torch.where((narrow == 0) & (tensor != 0), least, narrow)


def _dense_cells(call: Call) -> Tensor | None:
    """For each cell of a dense mask whether it hides all, none or some pairs: uint8, broadcast like the mask."""
    dense = call.dense_mask
    if dense is None:
        return None
    B, H, T, S = dense.shape
    cells = dense.new_empty((B, H, -(-T // _CELL), -(-S // _CELL)), dtype=torch.uint8)
    _cuda.dense_cells(dense, cells, _launch_target(dense))
    return cells


def _tiles(call: Call, name: str) -> _Tiles:
    sinks = call.sinks if name in ("forward", "decode") else None  # their kernels with terms have the sinks too
    terms = call.bias, call.offset_bias, call.dense_mask, sinks
    has_terms = call.softcap != 0.0 or any(term is not None for term in terms)
    device, _ = _launch_target(call.query)
    return _tiles_of(f"{call.operator}.{name}", call.query.dtype, call.D, call.Dv, has_terms, device)


@functools.cache
def _tiles_of(kernel: str, dtype: torch.dtype, D: int, Dv: int, has_terms: bool, device: int) -> _Tiles:
    return _Tiles(*_cuda.tiles_of(kernel, dtype, D, Dv, has_terms, device))


def _launch_target(tensor: Tensor) -> tuple[int, int]:
    """The device of a tensor and its current stream."""
    if CUDA_EMULATED:
        return 0, 0
    if not tensor.is_cuda:
        raise ValueError(f"tensors are on {tensor.device}; the CUDA kernels serve CUDA tensors")
    index = tensor.device.index
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return index, stream
