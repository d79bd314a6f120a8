"""Parameters and FLOPs of ordinary and collaborative attention, as closed formulas.

`D_in` is the width of the inputs and `D_in_k` that of the keys' inputs, `D_k` the concatenated key width of all `H`
heads, `Ds` the shared width, None in ordinary attention. `Hk` is the number of key heads of ordinary attention, None
means H. (Cordonnier et al. 2020, table 1, with the biases.)
"""

from __future__ import annotations

import math


def count_parameters(
    D_in: int,
    D_k: int,
    H: int,
    Ds: int | None = None,
    *,
    D_in_k: int,
    Hk: int | None = None,
    bias: bool = True,
    rotary: bool = False,
) -> int:
    """Query and key parameters of one attention layer.

    Ordinary attention: `D_in D_k + D_in_k D_k Hk / H`, and a bias for each row. Converted: `(D_in + D_in_k + H) Ds` of
    the projections and mixing, and `H D_in_k` content weights, with or without biases before, for the mean of the
    calibration inputs. Converted with rotary positions: `2 Ds` biases instead, if there were some, and `H Ds / 2`
    mixing weights, one for a pair of features.
    """
    if Ds is None:
        key_rows = _of_key_heads(D_k, H, Hk)
        return D_in * D_k + D_in_k * key_rows + (D_k + key_rows) * bias
    if rotary:
        return (D_in + D_in_k + 2 * bias) * Ds + H * Ds // 2
    return (D_in + D_in_k + H) * Ds + H * D_in_k


def count_flops(
    T: int,
    D_in: int,
    D_k: int,
    H: int,
    Ds: int | None = None,
    *,
    D_in_k: int,
    Hk: int | None = None,
    executed_features: int | None = None,
    rotary: bool = False,
) -> int:
    """FLOPs of the forward pass of one layer for T query rows and keys: projections, scores, weighted values.

    | part | ordinary | collaborative |
    |---|---|---|
    | query, key | `2 T D_in D_k`, `2 T D_in_k D_k Hk / H` | `2 T D_in Ds`, `2 T D_in_k Ds` |
    | mixing | 0 | `T F` |
    | scores | `2 T^2 F`, `F = D_k` | `2 T^2 F`, `F = H Ds` or `executed_features` |
    | content | 0 | `2 T D_in_k H + T^2 H`; 0 with rotary positions |
    | values, weighted; their projection, output | `2 T^2 D_k`; `2 T D_in_k D_k Hk / H`, `2 T D_k D_in` | the same |
    """
    of_key_heads = _of_key_heads(D_k, H, Hk)
    width, key_width, F = (D_k, of_key_heads, D_k) if Ds is None else (Ds, Ds, H * Ds)
    if executed_features is not None:
        F = executed_features
    mixing = content = 0
    if Ds is not None:
        mixing = T * F
        content = 0 if rotary else 2 * T * D_in_k * H + T * T * H
    projections = D_in * width + D_in_k * (key_width + of_key_heads) + D_k * D_in
    return 2 * T * projections + mixing + content + 2 * T * T * (F + D_k)


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

    Returns:
        A rounded whole number; `math.inf` if scores cost no more than before; 0 if nothing is saved.
    """
    saved = D_k + _of_key_heads(D_k, H, Hk) - 2 * Ds
    paid = (H * Ds if executed_features is None else executed_features) - D_k
    if paid <= 0:
        return math.inf if saved >= 0 else 0
    return max(0, round(D_in * saved / paid))


def _of_key_heads(rows: int, H: int, Hk: int | None) -> int:
    """What is left of the rows of H heads where only Hk have some."""
    return rows if Hk is None else rows * Hk // H
