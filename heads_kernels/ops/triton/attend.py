"""A tile of query rows of a head against every key that it sees: the online softmax of both operators.

They differ in the query alone. That of gated attention is a tile of the head's own. Collaborative attention mixes the
query that its heads share: of a head that uses few features (`chunks`) those are gathered, mixed once and stay on chip
like a query of the head's own, and so are the same features of every tile of keys. Where a head uses more than RESIDENT
features, the mixed query is formed chunk by chunk, beside the chunk of keys that it meets.
"""

from __future__ import annotations

import triton
import triton.language as tl

from heads_kernels.ops.entmax_attention.triton_forward import attend_sparse
from heads_kernels.ops.triton.chunks import (
    active_chunks,
    active_features,
    chunk_at,
    load_content_bias,
    mixed,
)
from heads_kernels.ops.triton.descriptors import load_keys
from heads_kernels.ops.triton.load import load_columns, load_features, load_tile
from heads_kernels.ops.triton.scores import add_sink, finish, load_bias, scale_log2_of
from heads_kernels.ops.triton.softmax import (
    SMALLEST,
    finite_part,
    kept,
    log_sum_exp,
    online_softmax,
    poison,
    product,
)
from heads_kernels.ops.triton.visible import (
    full_tile,
    pairs_visible,
    partial_tile,
    ranges,
    tiles_of_split,
    tiles_seen,
)


@triton.jit
def attend(
    of, key_tiles, value_tiles, b, h, first_row, T, S, GROUP, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, CHUNKS: tl.constexpr, RESIDENT: tl.constexpr, PARTIAL_STAGES: tl.constexpr,
):  # fmt: skip
    """`attended` [BLOCK_M, BLOCK_DV], `lse`, `above` and whether they see anything, of the rows of a head.

    Rows that see nothing have 0, and -inf or their sink. With T 0 (a closed head) no row and no key is read, and lse is
    -inf. With entmax lse is the largest score, and the threshold is `above` it. Full tiles of keys come through the
    descriptors `key_tiles` and `value_tiles`, unless those are None. `scale` is not negative. The query tile, scores,
    probabilities and the accumulator stay on chip.
    """
    if of.terms.alpha is None:
        rows = first_row + tl.arange(0, BLOCK_M)
        acc, row_max, row_sum = accumulate(
            of, key_tiles, value_tiles, b, h, h // GROUP, first_row, rows, None, None, T, S, scale,
            D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, CHUNKS, RESIDENT, PARTIAL_STAGES,
        )  # fmt: skip
        attended, lse, sees = normalized(
            acc, row_max, row_sum, of.terms, of.dropout, h, rows, T, scale
        )
        above = lse
    else:
        attended, lse, above, sees = attend_sparse(
            of, b, h, first_row, T, S, GROUP, scale, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV
        )
    return attended, lse, above, sees


@triton.jit
def normalized(acc, row_max, row_sum, terms, dropout, h, rows, T, scale):
    """What `attend` returns, of the sums over all keys that `rows` see: see `accumulate`."""
    share = tl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    if dropout is not None:
        share = share * dropout.scale
    lse, sees = log_sum_exp(row_max, row_sum, softmax_scale(scale, terms), terms), row_sum != 0.0
    if terms.sinks is not None:
        lse, of_keys = add_sink(lse, terms, h)
        share = share * of_keys
        lse = tl.where(rows < T, lse, float("-inf"))
    return acc * share[:, None], lse, sees


@triton.jit
def softmax_scale(scale, terms):
    """What scores are multiplied by in the softmax, in base 2: above 0, as the online form asks."""
    return tl.maximum(scale_log2_of(scale, terms), SMALLEST)


@triton.jit
def accumulate(
    of, key_tiles, value_tiles, b, h, hk, first_row, rows, split, splits, T, S, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, CHUNKS: tl.constexpr, RESIDENT: tl.constexpr, PARTIAL_STAGES: tl.constexpr,
):  # fmt: skip
    """`acc` [BLOCK_M, BLOCK_DV], `row_max` and `row_sum` [BLOCK_M] of the `rows` of a head, as of `online_softmax`.

    They are sums over all tiles of keys that the rows see, or over share `split` of `splits`; None: over all. `h` is
    the head of all rows, or [BLOCK_M] where heads of key head `hk` are the rows.
    """
    if of.mixing is None:
        head = h
        if of.grouped is not None:
            head = hk
        q = load_tile(
            of.query, b, head, first_row, rows < T, D, BLOCK_M, BLOCK_D
        )  # [BLOCK_M, BLOCK_D]
        acc, row_max, row_sum = _stream(
            of, key_tiles, value_tiles, q, None, None, 1, 0, b, h, hk, first_row, rows, split, splits, T, S, scale,
            D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PARTIAL_STAGES,
        )  # fmt: skip
    else:
        count, numbers = active_chunks(of.mixing, h, D, BLOCK_D, CHUNKS)
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        row_sum = tl.zeros((BLOCK_M,), tl.float32)
        for doubling in tl.static_range(0, 5):  # widths of up to MOST_CHUNKS chunks
            if (BLOCK_D << doubling) <= RESIDENT:  # noqa: SIM102 (known when it is compiled)
                if (count > (1 << doubling) // 2) & (count <= (1 << doubling)):
                    columns, used = active_features(
                        numbers, count, 0, D, BLOCK_D, BLOCK_D << doubling
                    )
                    q = load_features(of.query, b, first_row, rows < T, columns, used, BLOCK_M)
                    q = mixed(q, of.mixing, h, columns, used)  # [BLOCK_M, BLOCK_D << doubling]
                    acc, row_max, row_sum = _stream(
                        of, key_tiles, value_tiles, q, columns, used, count, numbers, b, h, hk, first_row, rows,
                        split, splits, T, S, scale,
                        D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PARTIAL_STAGES,
                    )  # fmt: skip
        if CHUNKS * BLOCK_D > RESIDENT:  # noqa: SIM102
            if count * BLOCK_D > RESIDENT:
                acc, row_max, row_sum = _stream(
                    of, key_tiles, value_tiles, None, None, None, count, numbers, b, h, hk, first_row, rows,
                    split, splits, T, S, scale,
                    D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PARTIAL_STAGES,
                )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def _stream(
    of, key_tiles, value_tiles, q, columns, used, count, numbers, b, h, hk, first_row, rows, split, splits, T, S, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PARTIAL_STAGES: tl.constexpr,
):  # fmt: skip
    """What `accumulate` returns, of a query tile `q` and its `columns`; None for one that is mixed chunk by chunk."""
    lo, hi = ranges(of.visible, b, rows, T, S)  # [BLOCK_M]
    own = first_row // BLOCK_M
    start, full_start, full_end, end = tiles_seen(of.visible, b, h, own, lo, hi, rows, T, BLOCK_N)
    if (of.visible.lists is None) and (
        (of.visible.dense is not None) or (of.terms.bias is not None)
    ):
        full_end = full_start  # pairs may be hidden one by one
    if splits is not None:
        start, full_start, full_end, end = tiles_of_split(
            start, full_start, full_end, end, split, splits
        )
    scale_log2 = softmax_scale(scale, of.terms)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    STEP_N: tl.constexpr = BLOCK_N if key_tiles is None else key_tiles.block_shape[2]
    STEP: tl.constexpr = STEP_N // BLOCK_N
    # Full tiles that do not fill a step are visited as partial ones.
    full_end = full_start + (full_end - full_start) // STEP * STEP
    for place in range(full_start, full_end, STEP):
        first = full_tile(of.visible, b, h, own, place) * BLOCK_N
        acc, row_max, row_sum = _attend_tile(
            of, key_tiles, value_tiles, q, columns, used, count, numbers, acc, row_max, row_sum, lo, hi, first,
            b, h, hk, first_row, rows, T, S, scale, scale_log2, False, D, DV, BLOCK_M, STEP_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    for index in tl.range(0, full_start - start + end - full_end, num_stages=PARTIAL_STAGES):
        first = partial_tile(of.visible, b, h, own, index, start, full_start, full_end) * BLOCK_N
        acc, row_max, row_sum = _attend_tile(
            of, key_tiles, value_tiles, q, columns, used, count, numbers, acc, row_max, row_sum, lo, hi, first,
            b, h, hk, first_row, rows, T, S, scale, scale_log2, True, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def _attend_tile(
    of, key_tiles, value_tiles, q, columns, used, count, numbers, acc, row_max, row_sum, lo, hi, first,
    b, h, hk, first_row, rows, T, S, scale, scale_log2,
    PARTIAL: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`acc`, `row_max` and `row_sum` after BLOCK_N keys from `first` on. Where PARTIAL, pairs are masked one by one."""
    keys = first + tl.arange(0, BLOCK_N)
    heads = h
    if of.grouped is not None:
        heads = h[:, None]
    there = None
    if PARTIAL:
        there = keys < S
    bias = load_bias(of.terms, b, heads, rows[:, None], keys[None, :], T, S)
    if of.content_bias is not None:
        content = load_content_bias(of.content_bias, b, h, keys, S)
    raw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if q is None:
        for place in range(count):
            column = chunk_at(numbers, place) * BLOCK_D
            features = column + tl.arange(0, BLOCK_D)
            chunk = load_columns(of.query, b, first_row, rows < T, column, D, BLOCK_M, BLOCK_D)
            k = load_columns(of.key, b, first, keys < S, column, D, BLOCK_N, BLOCK_D)
            chunk = mixed(chunk, of.mixing, h, features, features < D)  # [BLOCK_M, BLOCK_D]
            raw = product(chunk, tl.trans(k), raw)
    elif columns is not None:
        k = load_features(of.key, b, first, there, columns, used, BLOCK_N)
        raw = product(q, tl.trans(k), raw)
    else:
        k = load_keys(
            of.key, key_tiles, b, hk, first, there, D, BLOCK_N, BLOCK_D
        )  # [BLOCK_N, BLOCK_D]
        raw = product(q, tl.trans(k), raw)
    v = load_keys(
        of.value, value_tiles, b, hk, first, there, DV, BLOCK_N, BLOCK_DV
    )  # [BLOCK_N, BLOCK_DV]
    if of.content_bias is not None:
        raw += content[None, :]
    scores, _ = finish(raw, bias, of.terms, scale)  # [BLOCK_M, BLOCK_N]
    if PARTIAL:
        seen = pairs_visible(
            of.visible, of.terms, b, heads, lo[:, None], hi[:, None], rows[:, None], keys[None, :], T, S, bias
        )  # fmt: skip
        scores = tl.where(seen, scores + poison(v)[None, :], float("-inf"))
        v = finite_part(v)
    p, row_max, row_sum, alpha = online_softmax(scores, row_max, row_sum, scale_log2, of.terms)
    if of.dropout is not None:
        p = tl.where(kept(of.dropout, b, heads, rows, first, BLOCK_N), p, 0.0)
    return product(p.to(v.dtype), v, acc * alpha[:, None]), row_max, row_sum
