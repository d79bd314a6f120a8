"""Errors and energy of each layer by number of features, to choose `dim`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heads_kernels.convert.calibration import moments_of
from heads_kernels.convert.features import Spectrum
from heads_kernels.convert.heads import Heads
from heads_kernels.convert.install import prepare, read_heads
from heads_kernels.convert.rotary import AnyHeads, AnyMoments
from heads_kernels.snapshot import undone


@dataclass(frozen=True, eq=False)
class CapturedEnergy:
    """Shares of the squared singular values that the first 1, 2, ... dimensions hold, float64, rising to 1.

    The product of a head, `W_Q^hT W_K^h`, is what its scores are made of: unlike its factors it is the same for heads
    whose queries and keys are rotated alike.

    Attributes:
        query: `[H, min(D, D_in)]`, of every head's query weights; `key` and `product` likewise.
        stacked_query: `[min(H D, D_in)]`, of the query weights of all heads; `stacked_key` likewise.
        stacked_product: of `W_Q^T W_K`, the sum of all heads' products.
    """

    query: Tensor
    key: Tensor
    product: Tensor
    stacked_query: Tensor
    stacked_key: Tensor
    stacked_product: Tensor


def captured_energy(heads: Heads) -> CapturedEnergy:
    """The curves of figure 1 of Cordonnier et al. 2020: single heads are near full rank, all together are not."""
    return CapturedEnergy(
        *_curves(heads.query, heads.key),
        *_curves(heads.query.flatten(0, 1), heads.key.flatten(0, 1)),
    )


def _curves(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows `[..., D, D_in]`, of `[..., D, D_in_k]` and of their product, whose QR factors are thin."""
    query_r, key_r = (torch.linalg.qr(rows.mT, mode="r").R for rows in (query, key))
    product = query_r @ key_r.mT
    return _share(query_r), _share(key_r), _share(product)


def _share(matrices: Tensor) -> Tensor:
    held = torch.linalg.svdvals(matrices).square().cumsum(-1)
    return torch.where(held[..., -1:] == 0, 1.0, held / held[..., -1:])


@dataclass(frozen=True, eq=False)
class Curves:
    """Error curves of the layers of a model before conversion.

    Attributes:
        layers: their names.
        errors: `[R + 1]` per layer: the relative error of the scores with 0 to R features, or of the weights without
            calibration. It is that of `"ragged"`, and that of `"cp"` is below it; after a conversion with `"cp"` that
            of a layer with rotary positions is the least that any shared features could have.
        squares: per layer, the mean square of the scores of all heads, scale included, that the error is relative to.
        energy: per layer, the `CapturedEnergy` of the weights; None with rotary positions.
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
                each.scale**2 * spectrum.square
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
        spectra = [each.spectrum(own) for each, own in zip(heads, moments, strict=True)]
    return Curves.of([layer.name for layer in chosen], heads, spectra)
