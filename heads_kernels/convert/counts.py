"""Parameters and FLOPs of ordinary and collaborative attention, as closed formulas.

`D_in` is the width of the inputs, `D_k` the concatenated key width of all `H` heads, `Ds` the shared width. FLOPs are
2 per multiply-add. (Cordonnier et al. 2020, table 1, with the biases.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

from heads_kernels.checks import check_size, refuse


def count_parameters(
    D_in: int,
    D_k: int,
    H: int,
    Ds: int | None = None,
    *,
    D_in_k: int | None = None,
    Hk: int | None = None,
    bias: bool = True,
    trained: bool = False,
    rotary: bool = False,
) -> int:
    """Query and key parameters of one attention layer.

    Ordinary attention (`Ds` None): `D_in D_k + D_in_k D_k Hk / H`, and a bias for each row. Converted:
    `(D_in + D_in_k + H) Ds` of the projections and mixing, and `H D_in_k` content weights, which the query bias
    became. Trained as collaborative from the start: `2 Ds` biases instead of those. Converted with rotary positions:
    `2 Ds` biases instead, if there were some, and `H Ds / 2` mixing weights, one for a pair of features.

    Args:
        D_in, D_k, H, Ds: the sizes of the layer.
        D_in_k: width of the keys' inputs; None means `D_in`.
        Hk: key heads of ordinary attention; None means H.
        bias: whether the projections have biases; a converted layer has content weights in either case, for the mean of
            its calibration inputs.
        trained: count a layer that was trained as collaborative, not converted.
        rotary: count a converted layer with rotary positions.

    Raises:
        TypeError, ValueError: a size is not an int >= 1.
    """
    D_in_k = D_in if D_in_k is None else D_in_k
    _check_sizes(D_in=D_in, D_k=D_k, H=H, Ds=Ds, D_in_k=D_in_k, Hk=Hk)
    if Ds is None:
        key_rows = _of_key_heads(D_k, H, Hk)
        return D_in * D_k + D_in_k * key_rows + (D_k + key_rows) * bias
    if rotary:
        return (D_in + D_in_k + 2 * bias) * Ds + H * Ds // 2
    return (D_in + D_in_k + H) * Ds + (2 * Ds * bias if trained else H * D_in_k)


class Flops(NamedTuple):
    """FLOPs of the forward pass of one attention layer, by part."""

    query: int
    key: int
    mixing: int
    scores: int
    content: int
    values: int
    value: int
    output: int

    @property
    def total(self) -> int:
        return sum(self)


def count_flops(
    T: int,
    S: int,
    D_in: int,
    D_k: int,
    H: int,
    Ds: int | None = None,
    *,
    D_v: int | None = None,
    D_in_k: int | None = None,
    D_out: int | None = None,
    Hk: int | None = None,
    pairs: int | None = None,
    executed_features: int | None = None,
    open_heads: int | None = None,
    rotary: bool = False,
) -> Flops:
    """FLOPs of the forward pass of one layer: projections, scores, weighted values; the softmax does not count.

    | part | ordinary (`Ds` None) | collaborative |
    |---|---|---|
    | `query`, `key` | `2 T D_in D_k`, `2 S D_in_k D_k` | `2 T D_in Ds`, `2 S D_in_k Ds` |
    | `mixing` | 0 | `T F` |
    | `scores` | `2 P F`, `F = D_k` | `2 P F`, `F = H Ds`; ragged `F = Ds` |
    | `content` | 0 | `2 S D_in_k H + P H` |
    | `values`, `value`, `output` | `2 P D_v`, `2 S D_in_k D_v`, `2 T D_v D_out` | the same |

    With rotary positions `content` is 0; the rotation does not count. With `Hk < H` heads of values, `value` is
    multiplied by `Hk / H`, and in ordinary attention `key` too.

    Args:
        T, S: query rows and keys, padding left out; summed over a batch.
        D_in, D_k, H, Ds: the sizes of the layer.
        D_v, D_in_k, D_out: concatenated width of the values, widths of the keys' inputs and of the output; None means
            `D_k`, `D_in`, `D_in`.
        Hk: heads of values, and of keys in ordinary attention; None means H.
        pairs: P, visible (row, key) pairs, summed over a batch: about half of `T S` in causal attention; None means
            `T S`.
        executed_features: F, features that the scores of the open heads use (`Factors.executed_features`).
        open_heads: number of open heads; a closed one costs only its share of the projections.
        rotary: whether positions are rotary, so that a collaborative layer has no content biases.

    Raises:
        TypeError, ValueError: a size is not an int >= 1, or `open_heads` is above H.
    """
    D_v, D_out = D_k if D_v is None else D_v, D_in if D_out is None else D_out
    D_in_k = D_in if D_in_k is None else D_in_k
    open_heads = H if open_heads is None else open_heads
    _check_sizes(
        T=T, S=S, D_in=D_in, D_k=D_k, H=H, Ds=Ds, D_v=D_v, D_in_k=D_in_k, D_out=D_out, Hk=Hk
    )
    if not 0 <= open_heads <= H:
        refuse("open_heads", f"is {open_heads}", f"pass 0 to {H}, which is H")
    P = T * S if pairs is None else pairs
    width, all_features = (D_k, D_k) if Ds is None else (Ds, H * Ds)
    key_width = _of_key_heads(D_k, H, Hk) if Ds is None else width
    F = all_features * open_heads // H if executed_features is None else executed_features
    return Flops(
        query=2 * T * D_in * width,
        key=2 * S * D_in_k * key_width,
        mixing=0 if Ds is None else T * F,
        scores=2 * P * F,
        content=0 if Ds is None or rotary else 2 * S * D_in_k * H + P * open_heads,
        values=2 * P * D_v * open_heads // H,
        value=2 * S * D_in_k * _of_key_heads(D_v, H, Hk),
        output=2 * T * D_v * D_out,
    )


def break_even(
    D_in: int,
    D_k: int,
    Ds: int,
    H: int,
    *,
    Hk: int | None = None,
    executed_features: int | None = None,
) -> float:
    """The T below which collaborative self-attention takes fewer FLOPs than ordinary attention.

    It saves projections, `2 T D_in (D_k + D_k Hk / H - 2 Ds)`, and adds scores, `2 T^2 (F - D_k)`; mixing and content,
    which are small, are left out. With dense mixing `F = H Ds`.

    Args:
        D_in, D_k, Ds, H: the sizes of the layer.
        Hk: its key heads; None means H.
        executed_features: F if mixing has zeros (`Factors.executed_features`).

    Returns:
        A rounded whole number; `math.inf` if scores cost no more than before; 0 if nothing is saved.

    Raises:
        TypeError, ValueError: a size is not an int >= 1.
    """
    _check_sizes(D_in=D_in, D_k=D_k, Ds=Ds, H=H, Hk=Hk)
    saved = D_k + _of_key_heads(D_k, H, Hk) - 2 * Ds
    paid = (H * Ds if executed_features is None else executed_features) - D_k
    if paid <= 0:
        return math.inf if saved >= 0 else 0
    return max(0, round(D_in * saved / paid))


def _of_key_heads(rows: int, H: int, Hk: int | None) -> int:
    """What is left of the rows of H heads where only Hk have some."""
    return rows if Hk is None else rows * Hk // H


def _check_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None:
            check_size(name, size)
