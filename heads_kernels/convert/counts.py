"""Parameters and FLOPs of ordinary and collaborative attention, as closed formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Sizes of an attention layer, and its counts with `Ds` shared features, or as ordinary attention where Ds is None.

    (Cordonnier et al. 2020, table 1, with the biases.)

    Attributes:
        D_in, D_in_k: width of the inputs of the queries, and of the keys.
        D_k: the concatenated key width of all heads.
        H: heads.
        Hk: key heads of ordinary attention; None means H.
        bias: whether queries or keys have biases.
        rotary: whether positions are rotary.
    """

    D_in: int
    D_in_k: int
    D_k: int
    H: int
    Hk: int | None = None
    bias: bool = True
    rotary: bool = False

    @property
    def key_rows(self) -> int:
        """What is left of the key width of H heads where only Hk have keys."""
        return self.D_k if self.Hk is None else self.D_k * self.Hk // self.H

    @property
    def of_feature(self) -> int:
        """Parameters of one more feature."""
        return self.parameters(2) - self.parameters(1)

    def parameters(self, Ds: int | None = None) -> int:
        """Query and key parameters.

        Ordinary attention: `D_in D_k + D_in_k D_k Hk / H`, and a bias for each row. Converted: `(D_in + D_in_k + H) Ds`
        of the projections and mixing, and `H D_in_k` content weights, with or without biases before, for the mean of
        the calibration inputs. Converted with rotary positions: `2 Ds` biases instead, if there were some, and
        `H Ds / 2` mixing weights, one for a pair of features.
        """
        if Ds is None:
            rows = self.D_in * self.D_k + self.D_in_k * self.key_rows
            return rows + (self.D_k + self.key_rows) * self.bias
        if self.rotary:
            return (self.D_in + self.D_in_k + 2 * self.bias) * Ds + self.H * Ds // 2
        return (self.D_in + self.D_in_k + self.H) * Ds + self.H * self.D_in_k

    def flops(self, T: int, Ds: int | None = None, executed_features: int | None = None) -> int:
        """FLOPs of the forward pass for T query rows and keys: projections, scores, weighted values.

        | part | ordinary | collaborative |
        |---|---|---|
        | query, key | `2 T D_in D_k`, `2 T D_in_k D_k Hk / H` | `2 T D_in Ds`, `2 T D_in_k Ds` |
        | mixing | 0 | `T F` |
        | scores | `2 T^2 F`, `F = D_k` | `2 T^2 F`, `F = H Ds` or `executed_features` |
        | content | 0 | `2 T D_in_k H + T^2 H`; 0 with rotary positions |
        | values, weighted; their projection, output | `2 T^2 D_k`; `2 T D_in_k D_k Hk / H`, `2 T D_k D_in` | the same |
        """
        D_in, D_in_k, D_k, H = self.D_in, self.D_in_k, self.D_k, self.H
        width, key_width, F = (D_k, self.key_rows, D_k) if Ds is None else (Ds, Ds, H * Ds)
        if executed_features is not None:
            F = executed_features
        mixing = content = 0
        if Ds is not None:
            mixing = T * F
            content = 0 if self.rotary else 2 * T * D_in_k * H + T * T * H
        projections = D_in * width + D_in_k * (key_width + self.key_rows) + D_k * D_in
        return 2 * T * projections + mixing + content + 2 * T * T * (F + D_k)

    def break_even(self, Ds: int, executed_features: int | None = None) -> float:
        """The T below which collaborative self-attention takes fewer FLOPs than ordinary attention.

        It saves projections, `2 T D_in (D_k + D_k Hk / H - 2 Ds)`, and adds scores, `2 T^2 (F - D_k)`; mixing and
        content, which are small, are left out. With dense mixing `F = H Ds`.

        Returns:
            A rounded whole number; `math.inf` if scores cost no more than before; 0 if nothing is saved.
        """
        saved = self.D_k + self.key_rows - 2 * Ds
        paid = (self.H * Ds if executed_features is None else executed_features) - self.D_k
        if paid <= 0:
            return math.inf if saved >= 0 else 0
        return max(0, round(self.D_in * saved / paid))
