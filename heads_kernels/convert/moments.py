"""Moments of the inputs of a layer's queries and keys, gathered batch by batch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from heads_kernels.checks import refuse

#: Minimum eigenvalue of a covariance relative to the largest, so that directions absent from calibration keep a small
#: weight, and all features together are exact in them (heuristic).
_FLOOR = 1e-6

_Own = TypeVar("_Own", bound="Sums")


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over query rows; `+` adds those of two batches."""

    count: Tensor  # query rows, a scalar
    query_outer: Tensor  # sum of products of queries
    key_outer: Tensor  # sum of the covariances of the keys that a row sees

    @property
    def widths(self) -> tuple[int, ...]:
        """Equal for moments that can be added."""
        return *self.query_outer.shape[:-1], self.key_outer.shape[-1]

    def check(self, widths: tuple[int, ...], argument: str = "moments") -> None:
        """Refuse moments of no tokens, of other widths, or that are not finite."""
        if self.widths != widths:
            refuse(argument, f"has widths {self.widths}", f"those of the layer are {widths}")
        if not self.count > 0:
            refuse(argument, "has no tokens", "add a batch with real tokens")
        if not all(bool(each.isfinite().all()) for each in (self.query_outer, self.key_outer)):
            refuse(argument, "holds NaN or infinity", "look for them in the batch and the weights")

    def __add__(self: _Own, other: _Own) -> _Own:
        if other.widths != self.widths:
            refuse("moments", f"are of widths {other.widths}", f"those that they are added to are of {self.widths}")
        names = [field.name for field in fields(self)]
        return type(self)(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, eq=False)
class Moments(Sums):
    """Sums over query rows, in float64; `+` adds those of two batches.

    Scores that differ by one number per row give the same attention. So the keys' inputs matter only by their variation
    among the keys that a row sees, and the queries' inputs by their covariance, because the content bias absorbs the
    effect of their mean.

    Attributes:
        count: query rows, a scalar.
        query_outer: `[D_in, D_in]`, the sum of `x x^T`.
        key_outer: `[D_in_k, D_in_k]`, the sum over rows of the covariance of the inputs of the keys that a row sees.
        query_sum: `[D_in]`, the sum of the queries' inputs.
        widths: `(D_in, D_in_k)`.
    """

    query_sum: Tensor

    @classmethod
    def of(
        cls,
        query_inputs: Tensor,
        key_inputs: Tensor | None = None,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Moments:
        """The moments of one batch of sentences.

        Args:
            query_inputs: floating `[..., T, D_in]`, one sentence in each `[T, D_in]`.
            key_inputs: floating `[..., S, D_in_k]`; None for self-attention, where they are the queries'.
            query_mask: bool `[..., T]`, True for real tokens; other positions may be NaN.
            key_mask: bool `[..., S]`; None means `query_mask` in self-attention, otherwise all True.
            is_causal: a row sees the keys up to its own position; self-attention only.

        Raises:
            TypeError, ValueError: a tensor has another dtype or shape; `is_causal` with `key_inputs`.
        """
        query, query_real = _real("query", query_inputs, query_mask)
        if key_inputs is None:
            key, key_real = query, query_real
            if key_mask is not None:
                key, key_real = _real("key", query_inputs, key_mask)
        elif is_causal:
            refuse("is_causal", "is True with key_inputs", "leave key_inputs out: self-attention")
        else:
            key, key_real = _real("key", key_inputs, key_mask)
            if key.shape[:-2] != query.shape[:-2]:
                was = f"has shape {list(key.shape)}"
                refuse("key_inputs", was, f"make its batch {list(query.shape[:-2])}, as queries'")
        covariance = causal_covariance if is_causal else covariance_of_all
        outer = covariance(key, query_real, key_real)
        return cls(query_real.sum(), gram(query), outer, query.flatten(0, -2).sum(0))

    @cached_property
    def query_mean(self) -> Tensor:
        """`[D_in]`."""
        return self.query_sum / self.count

    @cached_property
    def query_root(self) -> Tensor:
        """`[D_in, D_in]` of which `query_root query_root^T` is the covariance of the queries' inputs."""
        mean = self.query_mean
        return _root(self.query_outer / self.count - mean[:, None] * mean)

    @cached_property
    def key_root(self) -> Tensor:
        """`[D_in_k, D_in_k]`, the same of the keys' inputs within what a row sees, the mean over rows."""
        return _root(self.key_outer / self.count)


def _real(name: str, inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Inputs in float64 with zeros at what is not real, and the mask."""
    if not inputs.is_floating_point() or inputs.dim() < 2:
        was = f"has dtype {inputs.dtype} and shape {list(inputs.shape)}"
        refuse(f"{name}_inputs", was, "pass a floating tensor [..., tokens, width]")
    if mask is None:
        mask = torch.ones(inputs.shape[:-1], dtype=torch.bool, device=inputs.device)
    if mask.dtype != torch.bool or mask.shape != inputs.shape[:-1]:
        was = f"has dtype {mask.dtype} and shape {list(mask.shape)}"
        refuse(f"{name}_mask", was, f"pass bool {list(inputs.shape[:-1])}, True for real tokens")
    return inputs.detach().double().where(mask[..., None], 0.0), mask


def gram(rows: Tensor) -> Tensor:
    """The sum over rows of `x conj(x)^T`."""
    flat = rows.flatten(0, -2)
    return flat.T @ flat.conj()


def covariance_of_all(key: Tensor, query_real: Tensor, key_real: Tensor) -> Tensor:
    """The sum over real rows of the covariance of all real keys of the sentence."""
    keys = key_real.sum(-1, dtype=torch.float64)[..., None, None].clamp(min=1)
    rows = query_real.sum(-1, dtype=torch.float64)[..., None, None]
    centred = (key - key.sum(-2, keepdim=True) / keys).where(key_real[..., None], 0.0)
    return gram(centred * (rows / keys).sqrt())


def causal_covariance(key: Tensor, query_real: Tensor, key_real: Tensor) -> Tensor:
    """The same, of the real keys up to the row's place: the sum of `mean(y y^T) - mean(y) mean(y)^T`."""
    seen = key_real.cumsum(-1, dtype=torch.float64).clamp(min=1)  # [..., T]
    share = query_real / seen  # what each key weighs in row t
    weight = share.flip(-1).cumsum(-1).flip(-1)  # what key s weighs in all rows from s on
    means = key.cumsum(-2) * share[..., None]
    return gram(key * weight[..., None].sqrt()) - gram(means)


def _root(covariance: Tensor) -> Tensor:
    """R with `R R^T` the covariance, its eigenvalues raised to a floor."""
    values, vectors = torch.linalg.eigh(covariance)
    root: Tensor = vectors * values.clamp(min=_FLOOR * values[-1]).sqrt()
    return root
