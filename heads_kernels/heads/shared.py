"""The projections of a converted layer of transformers, whose module expects queries and keys per head.

The module keeps its forward, with its dropout, norms, caches and masks; the attention function separates what these
projections return. So conversion needs no code per family.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class SharedProjection(nn.Module):
    """The query or key that all heads share, for a module that expects heads of `head_dim` features.

    The module reshapes the output to `[..., n, head_dim]`, so the output is `Ds` features, in a key followed by the
    content biases of the heads, and padded with zeros to a multiple of `head_dim`. The attention function separates
    them (`split_shared`). A cache keeps this one key per token for all heads.

    A module that rotates heads by their position turns features f and f + head_dim/2 of every head by the angle of
    frequency f. So each shared pair of features has a place in one of `slots` heads, at its frequency; other places
    hold zeros. The attention function takes the features from their places (`split_rotary`), a cache keeps them alone.

    It is not a `nn.Linear`, so that tools that wrap or quantise those skip it.

    Attributes:
        weight: `[Ds, D_in]`; with places the two features of a pair one after the other.
        bias: `[Ds]`, or None.
        content: a `nn.Linear` with weight `[H, D_in]` from the key's input to the content biases; None in a query, and
            with places.
        places: int64 `[Ds]`, the output of each feature; a buffer, or None where they are the first ones.
        head_dim, slots: of the module; slots is 0 without places.
    """

    content: nn.Linear | None
    bias: nn.Parameter | None
    places: Tensor | None

    def __init__(
        self,
        in_features: int,
        shared_dim: int,
        head_dim: int,
        *,
        content_heads: int | None = None,
        slots: int = 0,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.shared_dim = shared_dim
        self.head_dim = head_dim
        self.slots = slots
        self.weight = nn.Parameter(torch.empty(shared_dim, in_features, device=device, dtype=dtype))
        made = nn.Parameter(torch.empty(shared_dim, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", made)
        places = torch.zeros(shared_dim, device=device, dtype=torch.int64) if slots else None
        self.register_buffer("places", places)
        self.content = None
        if content_heads is not None:
            self.content = nn.Linear(
                in_features, content_heads, bias=False, device=device, dtype=dtype
            )

    @property
    def out_features(self) -> int:
        """`n * head_dim`: features, content biases, zeros."""
        used = self.shared_dim + (0 if self.content is None else self.content.out_features)
        return max(self.slots, -(-used // self.head_dim)) * self.head_dim

    def forward(self, inputs: Tensor) -> Tensor:
        # Outputs are concatenated, not weights: those of one token are fewer than the weights.
        parts = [nn.functional.linear(inputs, self.weight, self.bias)]
        if self.places is not None:
            spread = parts[0].new_zeros(*inputs.shape[:-1], self.out_features)
            return spread.index_copy(-1, self.places, parts[0])
        if self.content is not None:
            parts.append(self.content(inputs))
        if missing := -sum(part.shape[-1] for part in parts) % self.head_dim:
            parts.append(parts[0].new_zeros(*inputs.shape[:-1], missing))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def extra_repr(self) -> str:
        names = ("in_features", "shared_dim", "head_dim", "slots")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


class FusedProjection(nn.Module):
    """Projections of the same inputs as one module, its submodules; their outputs are concatenated.

    Args:
        parts: `{"query": ..., "key": ..., "value": ...}`, or two of them in this order.
        equal: whether parts are padded with zeros to the widest, for a module that splits the output into equal parts.
    """

    def __init__(
        self, parts: Mapping[str, nn.Linear | SharedProjection], equal: bool = False
    ) -> None:
        super().__init__()
        self.equal = equal
        for role, part in parts.items():
            self.add_module(role, part)

    @property
    def sizes(self) -> list[int]:
        """Output features of each part, by which a module splits the output."""
        return [part.out_features for part in self.children()]  # type: ignore[misc]

    def forward(self, inputs: Tensor) -> Tensor:
        found = [part(inputs) for part in self.children()]
        if self.equal:
            width = max(part.shape[-1] for part in found)
            found = [nn.functional.pad(part, (0, width - part.shape[-1])) for part in found]
        return torch.cat(found, -1)


def split_shared(query: Tensor, key: Tensor, mixing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split the outputs of `SharedProjection`s into operands of `hk.collaborative_attention`.

    Args:
        query: `[B, n, T, D]`.
        key: `[B, m, S, D]`; from a cache `[B, 1, S, m * D]`, which is not copied.
        mixing: `[H, Ds]`.

    Returns:
        The query `[B, T, Ds]`, the key `[B, S, Ds]` and the content bias `[B, H, S]`.
    """
    H, Ds = mixing.shape
    query, key = (heads.transpose(1, 2).flatten(2) for heads in (query, key))
    return query[..., :Ds], key[..., :Ds], key[..., Ds : Ds + H].transpose(1, 2)


def split_rotary(
    query: Tensor, key: Tensor, mixing: Tensor, places: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Operands of `hk.collaborative_attention` from rotated outputs of `SharedProjection`s with places.

    Args:
        query: `[B, n, T, D]`.
        key: `[B, n, S, D]`; from a cache `[B, 1, S, Ds]`, the features alone, which are not copied.
        mixing: `[H, Ds / 2]`, a weight for each pair.
        places: of the features, `[Ds]`.

    Returns:
        The query `[B, T, Ds]`, the key `[B, S, Ds]` and the mixing vectors `[H, Ds]`.
    """
    query = query.transpose(1, 2).flatten(2)[..., places]
    # Projections have two slots or more where one would have as many features as the cache.
    cached = key.shape[1] == 1 and key.shape[3] == len(places)
    key = key[:, 0] if cached else key.transpose(1, 2).flatten(2)[..., places]
    return query, key, mixing.repeat_interleave(2, 1)


def rotary_places(module: nn.Module) -> Tensor | None:
    """`places` of the projections of an attention module, whose `rotary_key` is the path of the key's; else None."""
    path: str | None = getattr(module, "rotary_key", None)
    return None if path is None else module.get_submodule(path).get_buffer("places")
