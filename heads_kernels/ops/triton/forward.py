"""The forward pass of both operators in Triton: `out = act(gate) * softmax(scores under the mask) V`.

    scores = scale * Q K^T                                       gated attention
    scores = scale * ((Q * mixing_h) K^T + content_bias_h)       collaborative attention

Two kernels send a tile of query rows over every tile of keys that it sees (`attend`): the forward pass, and in the
backward pass that of closed heads, whose forward pass was skipped and whose gate asks for a gradient.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from heads_kernels.ops.gate import can_close
from heads_kernels.ops.operator import Call, Results
from heads_kernels.ops.triton.attend import attend
from heads_kernels.ops.triton.descriptors import FEWEST_KEYS, describable, tiles_in
from heads_kernels.ops.triton.gate import open_rows, times_gate
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import load_tile, store_tile
from heads_kernels.ops.triton.operands import (
    gate_kind,
    gate_of,
    has_terms,
    operands_of,
    rows_of,
    with_positive_scale,
)
from heads_kernels.ops.triton.tile_lists import visible_to_tiles
from heads_kernels.ops.triton.tiles import Tiles, chunks_of, padded, tiles_for


@triton.jit
def _own_rows(of, H, T, BLOCK_M: tl.constexpr):
    """Batch, head and first row of a program; of a head the last rows (the longest of a causal mask) come first.

    Heads are in order; those of collaborative attention follow each other on one tile of rows, for they read the same
    query and key.
    """
    tiles = tl.cdiv(T, BLOCK_M)
    if of.mixing is None:
        pair = tl.program_id(0) // tiles
        b, h, tile = pair // H, pair % H, tl.program_id(0) % tiles
    else:
        h = tl.program_id(0) % H
        b, tile = tl.program_id(0) // (H * tiles), tl.program_id(0) // H % tiles
    return b, h, (tiles - 1 - tile) * BLOCK_M


@triton.jit
def _forward_kernel(
    of, key_tiles, value_tiles, gate, out, attended_out, lse_out, H, T, S, GROUP, scale,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNKS: tl.constexpr, RESIDENT: tl.constexpr, PARTIAL_STAGES: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_M rows of `out` of one head. A closed head writes its zeros and is done."""
    b, h, first_row = _own_rows(of, H, T, BLOCK_M)
    taking_part = open_rows(gate, b, h, T, KIND, ACTIVATION)
    attended, lse, sees = attend(
        of, key_tiles, value_tiles, b, h, first_row, taking_part, S, GROUP, scale,
        D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, CHUNKS, RESIDENT, PARTIAL_STAGES,
    )  # fmt: skip
    if attended_out is not None:
        store_tile(attended_out, b, h, first_row, T, attended, DV, BLOCK_M, BLOCK_DV)
    rows = first_row + tl.arange(0, BLOCK_M)
    if lse_out is not None:
        tl.store(lse_out + (b * H + h).to(tl.int64) * T + rows, lse, mask=rows < T)
    gated = times_gate(attended, gate, b, h, rows, T, KIND, ACTIVATION, DV, BLOCK_DV)
    # Rows that see nothing are 0, whatever their gate.
    gated = tl.where(sees[:, None], gated, 0.0)
    store_tile(out, b, h, first_row, T, gated, DV, BLOCK_M, BLOCK_DV)


def forward_pass(call: Call, outputs: Results) -> None:
    """Fill `outputs` (out, attended, lse); empty ones are not kept."""
    out, attended, lse = outputs
    _launch(
        _forward_kernel, call, rows_of(out), rows_of(attended) if attended.numel() else None,
        lse if lse.numel() else None, KIND=gate_kind(call.gate), ACTIVATION=call.gate_activation,
    )  # fmt: skip


@triton.jit
def _closed_kernel(
    of, key_tiles, value_tiles, gate, dout, dgate_rows, H, T, S, GROUP, scale,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNKS: tl.constexpr, RESIDENT: tl.constexpr, PARTIAL_STAGES: tl.constexpr,
):  # fmt: skip
    """A program computes `rowsum(dout * attended)` of BLOCK_M rows, as the forward kernel would; of an open head it
    computes nothing."""
    b, h, first_row = _own_rows(of, H, T, BLOCK_M)
    closed = T - open_rows(gate, b, h, T, "heads", "identity")
    attended, _, sees = attend(
        of, key_tiles, value_tiles, b, h, first_row, closed, S, GROUP, scale,
        D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, CHUNKS, RESIDENT, PARTIAL_STAGES,
    )  # fmt: skip
    rows = first_row + tl.arange(0, BLOCK_M)
    do = load_tile(dout, b, h, first_row, rows < closed, DV, BLOCK_M, BLOCK_DV).to(
        tl.float32
    )  # [BLOCK_M, BLOCK_DV]
    products = tl.where(sees[:, None], do * attended, 0.0)
    at = dgate_rows + (b * H + h).to(tl.int64) * T + rows
    tl.store(at, tl.sum(products, 1), mask=rows < closed)


def closed_pass(call: Call, dout: Tensor, dgate_rows: Tensor) -> None:
    """Write the rows of closed heads into `dgate_rows` `[B, H, T]`, unless no gate of `call` can close a head."""
    if call.gate is not None and can_close(call.gate, call.gate_activation):
        _launch(_closed_kernel, call, rows_of(dout), dgate_rows)


def _has_descriptors(call: Call) -> bool:
    """Whether full tiles may come through descriptors.

    Not where loops read terms: their lists of tiles do not say which full tiles are neighbours, and terms of larger
    tiles need the registers that descriptors save. Not in collaborative attention: heads gather features of the key,
    and the loop is no shorter with the value alone.
    """
    suits = call.mixing is None and not has_terms(call) and call.key.shape[2] >= FEWEST_KEYS
    return suits and describable(call.key) and describable(call.value)


def _descriptors(
    call: Call, tiles: Tiles
) -> tuple[TensorDescriptor, TensorDescriptor] | tuple[None, None]:
    if not tiles.full_tiles:
        return None, None
    block = tiles.block_n * tiles.full_tiles
    key, value = (tiles_in(x, block, padded(x.shape[3])) for x in (call.key, call.value))
    return key, value


def _launch(kernel: Any, call: Call, *results: Any, **constants: Any) -> None:
    B, H, T, S, width, Dv = call.sizes
    operator = "gated_attention" if call.mixing is None else "collaborative_attention"
    descriptors = _has_descriptors(call)
    tiles = tiles_for(f"{operator}.forward", call.query, width, Dv, has_terms(call), descriptors)
    scale, query, content_bias = with_positive_scale(call.scale, call.query, call.content_bias)
    if query is not call.query:
        call = call._replace(query=query, content_bias=content_bias)
    launch(
        kernel, B * H * -(-T // tiles.block_m), query, tiles,
        operands_of(call, visible_to_tiles(call, tiles)), *_descriptors(call, tiles), gate_of(call.gate), *results,
        H, T, S, H // max(call.value.shape[1], 1), scale, **constants,
        D=width, DV=Dv, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        BLOCK_D=padded(width) if call.mixing is None else tiles.block_d, BLOCK_DV=padded(Dv),
        CHUNKS=0 if call.mixing is None else chunks_of(width, tiles.block_d), RESIDENT=tiles.block_slice,
        PARTIAL_STAGES=tiles.partial_stages,
    )  # fmt: skip
