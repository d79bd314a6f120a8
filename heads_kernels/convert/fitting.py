"""One layer, with rotary positions or without: its spectrum, its factors, and their errors.

Moments, spectrum and factors are of the kind of the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from heads_kernels.convert.cp import cp
from heads_kernels.convert.factors import Factors, score_error, weight_error
from heads_kernels.convert.heads import Heads
from heads_kernels.convert.moments import Moments
from heads_kernels.convert.ragged import ragged
from heads_kernels.convert.rotary import (
    RotaryFactors,
    RotaryHeads,
    RotaryMoments,
    rotary_cp,
    rotary_ragged,
    rotary_spectrum,
    rotary_weight_error,
)
from heads_kernels.convert.spectrum import HeadSpectrum, Spectrum

AnyHeads: TypeAlias = Heads | RotaryHeads
AnyMoments: TypeAlias = Moments | RotaryMoments
AnyFactors: TypeAlias = Factors | RotaryFactors


def spectra_of(
    layers: Sequence[AnyHeads], moments: Sequence[Any] | None, method: str = "ragged"
) -> list[Spectrum]:
    """Of each layer."""
    all_moments = [None] * len(layers) if moments is None else moments
    return [
        rotary_spectrum(heads, own, method == "cp")
        if isinstance(heads, RotaryHeads)
        else HeadSpectrum.of(heads, own)
        for heads, own in zip(layers, all_moments, strict=True)
    ]


def fit(
    heads: AnyHeads,
    dim: int,
    moments: Any,
    spectrum: Any,
    *,
    method: str,
    iterations: int,
    multiple: int,
) -> AnyFactors:
    """Factors of `dim` features, by the method "cp" or "ragged"."""
    if isinstance(heads, RotaryHeads):
        if method == "cp":
            return rotary_cp(heads, dim, moments, iterations=iterations)
        return rotary_ragged(heads, dim, moments)
    if method == "cp":
        return cp(heads, dim, moments, iterations=iterations, spectrum=spectrum)
    return ragged(heads, dim, moments, multiple=min(multiple, dim), spectrum=spectrum)


def errors_of(heads: AnyHeads, factors: Any, moments: Any) -> tuple[float, float | None]:
    """`weight_error`, and with moments `score_error`."""
    if isinstance(heads, RotaryHeads):
        return rotary_weight_error(heads, factors), None if moments is None else factors.error
    found = None if moments is None else score_error(heads, factors, moments)
    return weight_error(heads, factors), found
