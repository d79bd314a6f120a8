"""The gradients of biases in Triton, for both operators: sums of dscores over what shares an element of the bias.

    dscores = p * (dp - delta)        before cap and scale; the formulas stand in `gated_attention.triton_keys`

Scores are computed again, tile by tile. Every element of the bias has one owner, which adds up in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from heads_kernels.batch import bias_batches
from heads_kernels.ops.buffers import splits_of
from heads_kernels.ops.operator import Call
from heads_kernels.ops.triton.chunks import active_chunks, chunk_at, load_content_bias, mixed
from heads_kernels.ops.triton.entmax import dscores_of, weigh
from heads_kernels.ops.triton.gate import head_gate, open_rows
from heads_kernels.ops.triton.launch import launch
from heads_kernels.ops.triton.load import load_columns, load_tile
from heads_kernels.ops.triton.operands import operator_of
from heads_kernels.ops.triton.rows import FirstPass, load_row_terms
from heads_kernels.ops.triton.scores import finish, load_bias
from heads_kernels.ops.triton.softmax import kept, product
from heads_kernels.ops.triton.tiles import Tiles, chunks_of, padded, tiles_for
from heads_kernels.ops.triton.visible import pairs_visible, ranges


@triton.jit
def _add_dscores(
    acc, query, key, value, mixing, content_bias, dout, gate, lse, delta, terms, visible, dropout, b, h,
    first_row, first_key, H, T, S, GROUP, scale,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """`acc` [BLOCK, BLOCK] and the dscores of a tile of head h of batch b; those of a closed head are 0."""
    rows = first_row + tl.arange(0, BLOCK)
    keys = first_key + tl.arange(0, BLOCK)
    lo, hi = ranges(visible, b, rows, open_rows(gate, b, h, T, KIND, ACTIVATION), S)
    bias = load_bias(terms, b, h, rows[:, None], keys[None, :], T, S)
    seen = pairs_visible(
        visible, terms, b, h, lo[:, None], hi[:, None], rows[:, None], keys[None, :], T, S, bias
    )  # [BLOCK, BLOCK]
    if tl.max(seen.to(tl.int32)) != 0:
        hk = h // GROUP
        raw = tl.zeros((BLOCK, BLOCK), tl.float32)
        if mixing is None:
            q = load_tile(query, b, h, first_row, rows < T, D, BLOCK, BLOCK_D)  # [BLOCK, BLOCK_D]
            k = load_tile(key, b, hk, first_key, keys < S, D, BLOCK, BLOCK_D)  # [BLOCK, BLOCK_D]
            raw = product(q, tl.trans(k), raw)
        else:
            count, numbers = active_chunks(mixing, h, D, BLOCK_D, CHUNKS)
            for place in range(count):
                column = chunk_at(numbers, place) * BLOCK_D
                q = load_columns(query, b, first_row, rows < T, column, D, BLOCK, BLOCK_D)
                k = load_columns(key, b, first_key, keys < S, column, D, BLOCK, BLOCK_D)
                raw = product(
                    mixed(
                        q,
                        mixing,
                        h,
                        column + tl.arange(0, BLOCK_D),
                        column + tl.arange(0, BLOCK_D) < D,
                    ),
                    tl.trans(k),
                    raw,
                )
        if content_bias is not None:
            raw += load_content_bias(content_bias, b, h, keys, S)[None, :]
        row_lse, above, row_delta, g, _ = load_row_terms(
            lse,
            delta,
            gate,
            head_gate(gate, b, h, KIND, ACTIVATION),
            b,
            h,
            b * H + h,
            rows,
            T,
            KIND,
            ACTIVATION,
        )
        scores, _ = finish(raw, bias, terms, scale)
        _, slope = weigh(scores, row_lse[:, None], above[:, None], seen, terms, h, scale)
        do = load_tile(dout, b, h, first_row, rows < T, DV, BLOCK, BLOCK_DV)  # [BLOCK, BLOCK_DV]
        v = load_tile(value, b, hk, first_key, keys < S, DV, BLOCK, BLOCK_DV)  # [BLOCK, BLOCK_DV]
        dp = product(do, tl.trans(v), tl.zeros((BLOCK, BLOCK), tl.float32))
        if dropout is not None:
            keep = kept(dropout, b, h, rows, first_key, BLOCK)
            dp = tl.where(keep, dp * dropout.scale, 0.0)
        acc += dscores_of(slope, dp * g[:, None], row_delta[:, None], 1.0, seen, terms)
    return acc


@triton.jit
def _bias_kernel(
    query, key, value, mixing, content_bias, dout, gate, lse, delta, terms, visible, dropout, parts,
    ENTRIES, FIRST, STEP, BIAS_HEADS, UNITS, SHARE, H, T, S, GROUP, scale,
    SUM_ROWS: tl.constexpr, SUM_KEYS: tl.constexpr,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A program owns a tile of the bias and goes over the units that share it, SHARE of UNITS, in order.

    A unit is a tile of scores: of batch `e * FIRST + n * STEP` for entry e of the bias, of its head or of each, and of
    each tile of rows (SUM_ROWS) or keys (SUM_KEYS) where the bias broadcasts along them. `parts` is `[splits, entries,
    heads, T or 1, S or 1]`.
    """
    row_tiles, key_tiles = tl.cdiv(T, BLOCK), tl.cdiv(S, BLOCK)
    row_owners, key_owners, row_units, key_units = row_tiles, key_tiles, 1, 1
    if SUM_ROWS:
        row_owners, row_units = 1, row_tiles
    if SUM_KEYS:
        key_owners, key_units = 1, key_tiles
    key_owner = tl.program_id(0) % key_owners
    row_owner = tl.program_id(0) // key_owners % row_owners
    owner = tl.program_id(0) // (key_owners * row_owners)  # split, entry, head
    entry = owner // BIAS_HEADS % ENTRIES
    heads = H // BIAS_HEADS  # that share the tile: all, or one
    start = (owner // (BIAS_HEADS * ENTRIES)).to(tl.int64) * SHARE
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for unit in range(start, tl.minimum(start + SHARE, UNITS)):
        tile = tl.cast(unit % (row_units * key_units), tl.int32)
        # The head counts on through the batches that share the entry.
        head = tl.cast(unit // (row_units * key_units), tl.int32)
        row_tile = row_owner + tile % row_units
        key_tile = key_owner + tile // row_units
        b = entry * FIRST + head // heads * STEP
        h = owner % BIAS_HEADS + head % heads
        acc = _add_dscores(
            acc, query, key, value, mixing, content_bias, dout, gate, lse, delta, terms, visible, dropout, b, h,
            row_tile * BLOCK, key_tile * BLOCK, H, T, S, GROUP, scale,
            KIND, ACTIVATION, D, DV, BLOCK, BLOCK_D, BLOCK_DV, CHUNKS,
        )  # fmt: skip
    rows = row_owner * BLOCK + tl.arange(0, BLOCK)
    keys = key_owner * BLOCK + tl.arange(0, BLOCK)
    height, width = T, S
    if SUM_ROWS:
        acc = tl.sum(acc, 0)[None, :]
        height, rows = 1, tl.arange(0, 1)
    if SUM_KEYS:
        acc = tl.sum(acc, 1)[:, None]
        width, keys = 1, tl.arange(0, 1)
    at = parts + (owner.to(tl.int64) * height + rows)[:, None] * width + keys[None, :]
    tl.store(at, acc, mask=(rows < height)[:, None] & (keys < width)[None, :])


def bias_pass(call: Call, first: FirstPass, dbias: Tensor) -> None:
    """Fill `dbias` `[B1, B2, H or 1, T or 1, S or 1]` unless it is empty."""
    if not dbias.numel():
        return
    B, H, T, S = call.scores
    outer, inner, heads = dbias.shape[:3]
    if 0 in (B, H, T, S):
        dbias.zero_()
        return
    tiles = _tiles(call)
    row_tiles, key_tiles = -(-T // tiles.block_m), -(-S // tiles.block_m)
    sum_rows, sum_keys = dbias.shape[3] != T, dbias.shape[4] != S
    entries = outer * inner
    units = (
        B
        // entries
        * (H // heads)
        * (row_tiles if sum_rows else 1)
        * (key_tiles if sum_keys else 1)
    )
    programs = entries * heads * (1 if sum_rows else row_tiles) * (1 if sum_keys else key_tiles)
    splits = splits_of(units, programs, call.query)
    parts = dbias.new_empty((splits, entries, *dbias.shape[2:]))
    launch(
        _bias_kernel, programs * splits, call.query, tiles,
        *_operands(first), parts, entries, bias_batches(dbias, B)[1] if inner == 1 else 1, inner,
        heads, units, -(-units // splits), H, T, S, _group(call), call.scale,
        SUM_ROWS=sum_rows, SUM_KEYS=sum_keys, **_constants(call, first, tiles),
    )  # fmt: skip
    dbias.copy_(parts.sum(0).view(dbias.shape))


@triton.jit
def _offsets_kernel(
    query, key, value, mixing, content_bias, dout, gate, lse, delta, terms, visible, dropout, parts,
    H, T, S, GROUP, scale,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A program adds up the tiles of a head on one diagonal of tiles, then the 2 BLOCK - 1 diagonals of their sum.

    `parts` is `[2, B, H, diagonals, BLOCK]`: at 0 the offsets left of the tiles' own diagonal, at 1 those from it on.
    """
    row_tiles, key_tiles = tl.cdiv(T, BLOCK), tl.cdiv(S, BLOCK)
    diagonals = row_tiles + key_tiles - 1
    pair = tl.program_id(0) // diagonals
    b, h = pair // H, pair % H
    ahead = tl.program_id(0) % diagonals - (row_tiles - 1)  # of the key tile from the row tile
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for row_tile in range(tl.maximum(-ahead, 0), tl.minimum(row_tiles, key_tiles - ahead)):
        first_row = row_tile * BLOCK
        acc = _add_dscores(
            acc, query, key, value, mixing, content_bias, dout, gate, lse, delta, terms, visible, dropout, b, h,
            first_row, first_row + ahead * BLOCK, H, T, S, GROUP, scale,
            KIND, ACTIVATION, D, DV, BLOCK, BLOCK_D, BLOCK_DV, CHUNKS,
        )  # fmt: skip
    # Row i turned left by i: column d holds what has offset d, and behind the wrap what has offset d - BLOCK.
    offsets = tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK)[:, None] + offsets[None, :]  # [BLOCK, BLOCK]
    turned = tl.gather(acc, column % BLOCK, 1)
    at = parts + tl.program_id(0).to(tl.int64) * BLOCK + offsets
    tl.store(at, tl.sum(tl.where(column >= BLOCK, turned, 0.0), 0))
    right = tl.sum(tl.where(column < BLOCK, turned, 0.0), 0)
    tl.store(at + tl.num_programs(0).to(tl.int64) * BLOCK, right)


def offsets_pass(call: Call, first: FirstPass, doffset_bias: Tensor) -> None:
    """Fill `doffset_bias` `[B, H, T + S - 1]` unless it is empty."""
    if not doffset_bias.numel():
        return
    B, H, T, S = call.scores
    if T == 0 or S == 0:
        doffset_bias.zero_()
        return
    tiles = _tiles(call)
    block = tiles.block_m
    row_tiles = -(-T // block)
    diagonals = row_tiles - (-S // block) - 1
    parts = doffset_bias.new_empty((2, B, H, diagonals, block))
    launch(
        _offsets_kernel, B * H * diagonals, call.query, tiles,
        *_operands(first), parts, H, T, S, _group(call), call.scale,
        **_constants(call, first, tiles),
    )  # fmt: skip
    left, right = parts.flatten(3)  # [B, H, diagonals * block]
    sums = functional.pad(left, (0, block)) + functional.pad(right, (block, 0))
    # Column 0 of both is offset -(row_tiles * block), the table begins with -(T - 1).
    start = row_tiles * block - (T - 1)
    doffset_bias.copy_(sums[..., start : start + doffset_bias.shape[2]])


def _tiles(call: Call) -> Tiles:
    return tiles_for(
        f"{operator_of(call)}.biases", call.query, call.query.shape[-1], call.value.shape[-1]
    )


def _group(call: Call) -> int:
    """Query heads that share a head of values."""
    return call.scores[1] // max(call.value.shape[1], 1)


def _operands(first: FirstPass) -> tuple[object, ...]:
    of = first.operands
    return (
        *(of.query, of.key, of.value, of.mixing, of.content_bias),
        *(first.dattended, first.gate, first.lse, first.delta),
        *(of.terms, of.visible, of.dropout),
    )


def _constants(call: Call, first: FirstPass, tiles: Tiles) -> dict[str, object]:
    width, Dv = call.query.shape[-1], call.value.shape[-1]
    shared = call.mixing is not None
    return {
        "KIND": first.kind,
        "ACTIVATION": call.gate_activation,
        "D": width,
        "DV": Dv,
        "BLOCK": tiles.block_m,
        "BLOCK_D": tiles.block_d if shared else padded(width),
        "BLOCK_DV": padded(Dv),
        "CHUNKS": chunks_of(width, tiles.block_d) if shared else 0,
    }
