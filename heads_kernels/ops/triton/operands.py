"""How kernels take tensors: named tuples of a pointer and strides, packed here and read in kernels.

Strides count elements. A dimension that broadcasts has stride 0. Absent tensors are None, which a kernel sees at
compile time. Two rules work around Triton 3.6. A tuple that may be None has no fields that may be None, since it could
not be compared with None. And the last field of a tuple of tuples is a constant (`end` if there is no other): without
it, Triton forgets the values of constants in the inner tuples, which numbers that are 1 become.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from heads_kernels.batch import bias_batches
from heads_kernels.call import Call
from heads_kernels.mask import Intervals
from heads_kernels.ops.philox import threshold


class Rows(NamedTuple):
    """Contiguous rows: `[B, H, L, W]`, or `[B, L, W]` shared by the heads (`stride_h` 0)."""

    ptr: Tensor
    stride_b: int
    stride_h: int
    stride_l: int


class Cells(NamedTuple):
    """A tensor `[B, H, T, S or Dv]` with any strides: a gate, or a dense mask of bytes."""

    ptr: Tensor
    stride_b: int
    stride_h: int
    stride_t: int
    stride_s: int


class Mixing(NamedTuple):
    """Mixing vectors `[H, Ds]`."""

    ptr: Tensor
    stride_h: int
    stride_d: int


class Bias(NamedTuple):
    """A bias of the scores, `[B1, B2, H, T, S]`: batch b reads entry `(b // inner, b % inner)`.

    A table of offsets is a bias in which each row begins one element further left than the row before.
    """

    ptr: Tensor
    inner: int
    stride_outer: int
    stride_inner: int
    stride_h: int
    stride_t: int
    stride_s: int


class Terms(NamedTuple):
    """The terms of scores other than the product of query and key; see `scores`."""

    bias: Bias | None
    far_bias: int | None  # not None: offsets between elements of a head need more than 32 bits
    softcap: float | None
    sinks: Tensor | None
    alpha: Tensor | None  # not None: entmax in place of softmax; see `entmax`


class RowLse(NamedTuple):
    """`lse` `[B, H, T]`, None if it is not requested; with entmax the largest score, and the distance of the threshold
    `above` it."""

    ptr: Tensor | None
    above: Tensor | None


def row_lse_of(lse: Tensor) -> RowLse:
    """The `RowLse` of an op's `lse`, which is empty if it is not requested, and `[2, B, H, T]` with entmax."""
    if not lse.numel():
        return RowLse(None, None)
    return RowLse(lse, None) if lse.dim() == 3 else RowLse(*lse)


class TileLists(NamedTuple):
    """For every tile of rows (or of keys), the tiles of keys (or of rows) to visit; see `visible`.

    A list has `length` places for full tiles and `length` for partial ones; `counts` has the two numbers of tiles.
    Strides count lists.
    """

    tiles: Tensor  # int32
    counts: Tensor  # int32
    length: int
    stride_b: int
    stride_h: int


class Support(NamedTuple):
    """Bytes `[B, H, tiles of rows, tiles of keys]`, 0 where entmax has no probability above 0; see `entmax`.

    Tiles have `block_m` rows and `block_n` keys.
    """

    ptr: Tensor
    block_m: int
    block_n: int


class Visible(NamedTuple):
    """The parts of `Intervals` that kernels read; batches and heads share a row by stride 0."""

    band_lo: int
    band_hi: int
    k_lo: Tensor | None
    k_hi: Tensor | None
    first_keys: Tensor | None
    key_visible: Tensor | None  # uint8
    stride_rows: int
    stride_rows_h: int
    stride_first: int
    stride_keys: int
    by_head: int | None  # not None: `k_lo`, `k_hi` or `first_keys` differ between heads
    dense: Cells | None
    lists: TileLists | None  # where a kernel of its own has written which tiles are full
    far_dense: int | None  # as `far_bias`


class Dropout(NamedTuple):
    """An element is kept if its word is at least `threshold`; kept probabilities are multiplied by `scale`."""

    seed: Tensor
    threshold: int
    scale: float


class Sizes(NamedTuple):
    """Numbers of a call: heads, query rows, keys, query heads per value head, scale."""

    H: int
    T: int
    S: int
    group: int
    scale: float


class Splits(NamedTuple):
    """The number of batches, and the number of shares into which a sum is split."""

    batches: int
    shares: int


class Place(NamedTuple):
    """The place of a program, in a kernel: batch, head and key head, and query rows (or keys) `at` [N] from `first` on.

    `h` is the head of all rows, or [N], a head for each row.
    """

    b: Any
    h: Any
    hk: Any
    first: Any
    at: Any


class Pairs(NamedTuple):
    """Pairs of query rows and keys of a head, in a kernel: `rows` and `keys` broadcast to the tile."""

    b: Any
    h: Any
    rows: Any
    keys: Any


class Operands(NamedTuple):
    """The operands of a pass: those of scores, mask and dropout, and the values."""

    query: Rows
    key: Rows
    value: Rows | None  # statistics have none
    mixing: Mixing | None
    content_bias: Rows | None  # [B, H, S]
    terms: Terms
    visible: Visible
    dropout: Dropout | None
    grouped: int | None  # not None: T is 1, and the rows of a tile are heads that share a key head
    in_reach: Tensor | None  # int32 [programs, tiles of keys] for `entmax.attend_sparse` to write
    excluded: Rows | None  # of statistics: bytes `[B, S]` of keys that `max_prob` and `argmax` leave out
    end: None = None


#: Tuples of a tensor and numbers.
POINTERS: Final = (Rows, Cells, Mixing, Bias, Support, Dropout)


def operands_of(call: Call, grouped: bool = False) -> Operands:
    """The operands of a call, packed once for all of its kernels."""
    content_bias, dropout, excluded = call.content_bias, None, None
    if call.seed is not None and call.dropout_p:
        scale = 1.0 / (1.0 - call.dropout_p)
        dropout = Dropout(call.seed, threshold(call.dropout_p), scale)
    if call.exclude_keys is not None:
        excluded = Rows(call.exclude_keys.view(torch.uint8), _batch_stride(call.exclude_keys), 0, 1)
    return Operands(
        query=grouped_heads_of(call.query, call.key.shape[1]) if grouped else rows_of(call.query),
        key=rows_of(call.key),
        value=None if call.value is None else rows_of(call.value),
        mixing=None if call.mixing is None else Mixing(call.mixing, *call.mixing.stride()),
        content_bias=None if content_bias is None else Rows(content_bias, *content_bias.stride()),
        terms=_terms_of(call),
        visible=_visible_of(call.intervals),
        dropout=dropout,
        grouped=1 if grouped else None,
        in_reach=None,
        excluded=excluded,
    )


def sizes_of(call: Call) -> Sizes:
    """The numbers of a call that its kernels read."""
    _, H, T, S = call.sizes
    heads = call.Hk if call.value is None else call.Hv
    return Sizes(H, T, S, max(H // max(heads, 1), 1), call.scale)


def rows_of(tensor: Tensor) -> Rows:
    strides = tensor.stride()
    return Rows(tensor, strides[0], strides[1] if tensor.dim() == 4 else 0, strides[-2])


def grouped_heads_of(tensor: Tensor, key_heads: int) -> Rows:
    """`[B, H, 1, W]` as `[B, Hk, H / Hk, W]`: the heads that share a key head are its rows."""
    batch, head = tensor.stride()[:2]
    return Rows(tensor, batch, head * (tensor.shape[1] // key_heads), head)


def _terms_of(call: Call) -> Terms:
    bias, table = None, call.offset_bias
    if table is not None:  # row i reads columns T - 1 - i and on
        of_head, of_key = strides_of(table)
        bias = Bias(table[:, call.T - 1 :], 1, 0, 0, of_head, -of_key, of_key)
    elif call.bias is not None:
        bias = Bias(call.bias, max(bias_batches(call.bias, call.B)[1], 1), *strides_of(call.bias))
    sinks = None if call.sinks is None else call.sinks.contiguous()
    alpha = None if call.alpha is None else call.alpha.contiguous()
    return Terms(bias, _far(call.bias if table is None else table), call.softcap or None, sinks, alpha)


def with_positive_scale(call: Call) -> Call:
    """The call with a scale that is not negative, as the online softmax requires; the query changes sign with it."""
    if call.scale >= 0.0:
        return call
    content_bias = None if call.content_bias is None else call.content_bias.neg()
    return call._replace(scale=-call.scale, query=call.query.neg(), content_bias=content_bias)


def cells_of(tensor: Tensor | None) -> Cells | None:
    """A gate of any kind."""
    if tensor is None:
        return None
    strides = [0, *strides_of(tensor)] if tensor.dim() == 1 else strides_of(tensor)
    return Cells(tensor, *strides, *[0] * (4 - len(strides)))


def _visible_of(intervals: Intervals) -> Visible:
    i, dense, seen = intervals, intervals.dense_mask, intervals.key_visible
    return Visible(
        band_lo=i.band_lo,
        band_hi=i.band_hi,
        k_lo=i.k_lo,
        k_hi=i.k_hi,
        first_keys=i.first_keys,
        key_visible=None if seen is None else seen.view(torch.uint8),
        stride_rows=_batch_stride(i.k_lo),
        stride_rows_h=0 if i.k_lo is None or i.k_lo.shape[1] == 1 else i.k_lo.stride(1),
        stride_first=_batch_stride(i.first_keys),
        stride_keys=_batch_stride(seen),
        by_head=1 if i.by_head else None,
        dense=None if dense is None else Cells(dense.view(torch.uint8), *strides_of(dense)),
        lists=None,
        far_dense=_far(dense),
    )


def _far(pairs: Tensor | None) -> int | None:
    """1 if offsets in a head, also those of a last partial tile, need more than 32 bits; else None."""
    if pairs is None:
        return None
    sizes, strides = pairs.shape[-2:], pairs.stride()[-2:]
    reach = sum((size + 1024) * stride for size, stride in zip(sizes, strides, strict=True))
    return 1 if reach >= 1 << 31 else None


def strides_of(tensor: Tensor) -> list[int]:
    """The strides of a tensor, 0 where it broadcasts."""
    if 1 not in tensor.shape:
        return list(tensor.stride())
    return [s if size != 1 else 0 for s, size in zip(tensor.stride(), tensor.shape, strict=True)]


def _batch_stride(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)
