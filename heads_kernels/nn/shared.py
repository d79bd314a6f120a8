"""The projections of a converted layer of transformers, whose module expects queries and keys per head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from heads_kernels.checks import refuse


class SharedProjection(nn.Module):
    """The query or key that all heads share, for a module that expects heads of `head_dim` features.

    The module reshapes the output to `[..., n, head_dim]`, so the output is `Ds` features, in a key followed by the
    content biases of the heads, and padded with zeros to a multiple of `head_dim`. The attention function separates
    them (`split_shared`). A cache keeps this one key per token for all heads.

    It is not a `nn.Linear`, so that tools that wrap or quantise those skip it: it has more outputs than its weight has
    rows.

    Attributes:
        weight: `[Ds, D_in]`; there is no bias.
        content: a `nn.Linear` with weight `[H, D_in]` from the key's input to the content biases; None in a query.
            Only its weight is used, so an adapter in its place is refused.
        head_dim: of the module.
    """

    content: nn.Linear | None
    bias: None

    def __init__(
        self,
        in_features: int,
        shared_dim: int,
        head_dim: int,
        content_heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.shared_dim = shared_dim
        self.head_dim = head_dim
        self.weight = nn.Parameter(torch.empty(shared_dim, in_features, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.content = None
        if content_heads is not None:
            self.content = nn.Linear(
                in_features, content_heads, bias=False, device=device, dtype=dtype
            )

    @property
    def out_features(self) -> int:
        """`n * head_dim`: features, content biases, zeros."""
        used = self.shared_dim + (0 if self.content is None else self.content.out_features)
        return -(-used // self.head_dim) * self.head_dim

    @property
    def rows(self) -> Tensor:
        """`[n * head_dim, D_in]`: features, content weights, zeros."""
        parts: list[Tensor] = [self.weight]
        if self.content is not None:
            parts.append(_plain("content", self.content).weight)
        if missing := -sum(map(len, parts)) % self.head_dim:
            parts.append(self.weight.new_zeros(missing, self.in_features))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, self.rows)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, shared_dim={self.shared_dim}"
        return f"{sizes}, head_dim={self.head_dim}"


class FusedProjection(nn.Module):
    """Projections of the same inputs as one product; their outputs are concatenated.

    Args:
        parts: `{"query": ..., "key": ..., "value": ...}`, or two of them in this order; each becomes a submodule with
            this name.
    """

    def __init__(self, parts: Mapping[str, nn.Linear | SharedProjection]) -> None:
        super().__init__()
        for role, part in parts.items():
            self.add_module(role, part)

    @property
    def sizes(self) -> list[int]:
        """Output features of each part, by which a module splits the output."""
        return [len(rows) for rows, _ in self._parts]

    @property
    def _parts(self) -> list[tuple[Tensor, Tensor | None]]:
        """Rows and bias of each."""
        parts: list[tuple[Tensor, Tensor | None]] = []
        for role, part in self.named_children():
            if isinstance(part, SharedProjection):
                parts.append((part.rows, None))
            else:
                linear = _plain(role, part)
                parts.append((linear.weight, linear.bias))
        return parts

    def forward(self, inputs: Tensor) -> Tensor:
        parts = self._parts
        bias = None
        if any(own is not None for _, own in parts):
            bias = torch.cat(
                [rows.new_zeros(len(rows)) if own is None else own for rows, own in parts]
            )
        return nn.functional.linear(inputs, torch.cat([rows for rows, _ in parts]), bias)


def _plain(name: str, linear: nn.Module) -> nn.Linear:
    """Check that a part is a plain `nn.Linear`: only its weight is used, so a wrapper around it would be ignored."""
    if not isinstance(linear, nn.Linear) or type(linear) is not nn.Linear:
        was = f"of a converted layer is a {type(linear).__module__}.{type(linear).__name__}"
        instead = f"only its weight is read: leave {name!r} out of target_modules, or merge it"
        refuse(name, was, instead, TypeError)
    return linear


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
