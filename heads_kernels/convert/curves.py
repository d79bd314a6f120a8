"""Errors and energy of each layer by number of features, to choose `dim`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heads_kernels.convert.calibration import moments_of
from heads_kernels.convert.fitting import AnyHeads, AnyMoments, spectra_of
from heads_kernels.convert.heads import Heads
from heads_kernels.convert.install import prepare, read_heads
from heads_kernels.convert.spectrum import CapturedEnergy, Spectrum, captured_energy
from heads_kernels.nn.snapshot import undone


@dataclass(frozen=True, eq=False)
class Curves:
    """Error curves of the layers of a model before conversion.

    Attributes:
        layers: their names.
        errors: `[R + 1]` per layer (`error_curve`): the relative error of the scores with 0 to R features, or of the
            weights without calibration.
        squares: per layer, the mean square of the scores of all heads, scale included, that the error is relative to.
        energy: per layer, the captured energy of the weights; None with rotary positions.
    """

    layers: tuple[str, ...]
    errors: tuple[Tensor, ...]
    squares: tuple[float, ...]
    energy: tuple[CapturedEnergy | None, ...]

    @classmethod
    def of(
        cls, layers: Sequence[str], heads: Sequence[AnyHeads], spectra: Sequence[Spectrum]
    ) -> Curves:
        return cls(
            layers=tuple(layers),
            errors=tuple(spectrum.errors().cpu() for spectrum in spectra),
            squares=tuple(
                each.scale**2 * (float(spectrum.values.square().sum()) + spectrum.content)
                for each, spectrum in zip(heads, spectra, strict=True)
            ),
            energy=tuple(
                captured_energy(each) if isinstance(each, Heads) else None for each in heads
            ),
        )


@torch.inference_mode(False)
@torch.no_grad()
def curves(
    model: nn.Module,
    calibration: Iterable[Any] | Mapping[str, AnyMoments] | None = None,
    layers: Iterable[int | str] | None = None,
    *,
    progress: bool = True,
) -> Curves:
    """The error of each layer of a model for every `dim`, without changing the model; `plot` draws it.

    Args:
        model, calibration, layers, progress: as in `collaborate`.

    Raises:
        TypeError, ValueError: as `collaborate`.
    """
    with undone(model, lambda: prepare(model, layers)) as chosen:
        heads = [read_heads(layer) for layer in chosen]
        moments = moments_of(model, chosen, calibration, progress)
    return Curves.of([layer.name for layer in chosen], heads, spectra_of(heads, moments))
