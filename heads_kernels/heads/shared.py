"""Projections, checks of calls and caches of converted layers of transformers, which expect queries and keys per head.

The module keeps its forward, with its dropout, norms, caches and masks; the attention function separates what these
projections return. So conversion needs no code per family.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from heads_kernels.checks import refuse
from heads_kernels.dtensor import is_sharded
from heads_kernels.heads.interface import NAME, SOURCES, attention_function, is_cache, stock_arguments


class SharedProjection(nn.Module):
    """The query or key that all heads share, for a module that expects heads of `head_dim` features.

    The module reshapes the output to `[..., n, head_dim]`, so the output is `Ds` features, in a key followed by the
    content biases of the heads, and padded with zeros to a multiple of `head_dim`. The attention function separates
    them (`split_shared`). A cache keeps this one key per token for all heads.

    A module that rotates heads by their position turns features f and f + head_dim/2 of every head by the angle of
    frequency f. So each shared pair of features has a place in one of `slots` heads, at its frequency; other places
    hold zeros. The attention function takes the features from their places (`split_rotary`), a cache keeps them alone.

    It is not a `nn.Linear`, so that tools that wrap or quantise those skip it. It is created on the meta device.
    """

    weight: nn.Parameter  # [Ds, D_in]; with places the two features of a pair one after the other
    bias: nn.Parameter | None  # [Ds]
    #: From the key's input to the content biases, [H, D_in]; None in a query, and with places.
    content: nn.Linear | None
    places: Tensor | None  # int64 [Ds], the output of each feature; a buffer, or None where they are the first ones
    slots: int  # 0 without places

    def __init__(
        self,
        in_features: int,
        shared_dim: int,
        head_dim: int,
        *,
        content_heads: int | None = None,
        slots: int = 0,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.shared_dim = shared_dim
        self.head_dim = head_dim
        self.slots = slots
        with torch.device("meta"):
            self.weight = nn.Parameter(torch.empty(shared_dim, in_features))
            self.register_parameter("bias", nn.Parameter(torch.empty(shared_dim)) if bias else None)
            self.register_buffer("places", torch.zeros(shared_dim, dtype=torch.int64) if slots else None)
            self.content = nn.Linear(in_features, content_heads, bias=False) if content_heads is not None else None

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

    def __init__(self, parts: Mapping[str, nn.Linear | SharedProjection], equal: bool = False) -> None:
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
    """Operands of `hk.collaborative_attention` from the outputs of `SharedProjection`s.

    Of a query `[B, n, T, D]`, a key `[B, m, S, D]`, or from a cache `[B, 1, S, m * D]`, which is not copied, and mixing
    `[H, Ds]` these are the query `[B, T, Ds]`, the key `[B, S, Ds]` and the content bias `[B, H, S]`.
    """
    H, Ds = mixing.shape
    query, key = (heads.transpose(1, 2).flatten(2) for heads in (query, key))
    return query[..., :Ds], key[..., :Ds], key[..., Ds : Ds + H].transpose(1, 2)


def split_rotary(query: Tensor, key: Tensor, mixing: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same from rotated outputs of `SharedProjection`s with places `[Ds]`.

    A cache gives the features of the key alone, `[B, 1, S, Ds]`, which are not copied; mixing is `[H, Ds / 2]`, a
    weight for each pair. The operands are the query `[B, T, Ds]`, the key `[B, S, Ds]` and mixing vectors `[H, Ds]`.
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


# ---------------------------------------------------------------------- calls
def check_runs_shared(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Hook before the forward of a converted transformers module, whose queries, keys and caches need this package.

    It refuses another attention function, tensor parallelism of what heads share, and caches of separate heads.
    """
    if (runs := attention_function(module)) != NAME:
        was = f"is {runs!r} in a {type(module).__name__}"
        instead = "queries and keys that heads share need attn_implementation='heads_kernels': call "
        instead += "hk.integrations.transformers.use(model)"
        refuse("attn_implementation", was, instead)
    _check_whole(module)
    given = {**dict(zip(stock_arguments(type(module)), args, strict=False)), **kwargs}
    is_cross = any(given.get(name) is not None for name in SOURCES)
    for each in given.values():
        if is_cache(each):
            if hasattr(each, "self_attention_cache"):  # each half belongs to another layer
                each = each.cross_attention_cache if is_cross else each.self_attention_cache
            store_shared_keys(each, module.layer_idx, rotary_places(module))


def _check_whole(module: nn.Module) -> None:
    """Refuse tensor parallelism of what heads share. What `fully_shard` has gathered for a pass is no DTensor."""
    shared = SharedProjection, FusedProjection
    parts = [f"{name}." for name, part in module.named_modules() if isinstance(part, shared)]
    for name, each in module.named_parameters():
        if is_sharded(each) and name.startswith(("mixing", *parts)):
            was = "is a DTensor, but the heads of all processes share it"
            refuse(name, was, "split the projections of values and outputs alone")


# ---------------------------------------------------------------------- caches
def store_shared_keys(past: Any, layer_idx: int, places: Tensor | None = None) -> None:
    """Let the cache of a converted layer store keys as one head, `[B, 1, S, n * head_dim]`, or with places those alone.

    The module's own code splits the shared key into `n` heads, which a cache would store head by head: the operator
    would need a copy of all of them in every step. A cache that has keys of separate heads already is refused.
    """
    if (made := getattr(past, "layer_class_to_replicate", None)) is not None:
        while len(past.layers) <= layer_idx:
            past.layers.append(made())
    layer = past.layers[layer_idx]
    if isinstance(layer, _SharedKeys):
        return
    if layer.is_initialized and layer.keys.dim() == 4 and layer.keys.shape[1] != 1:
        was = f"has keys of {layer.keys.shape[1]} heads in layer {layer_idx}"
        refuse("cache", was, "heads share keys here: pass an empty cache")
    past.layers[layer_idx] = _remake(type(layer), vars(layer) | {"places": places})


class _SharedKeys:
    """Methods of a cache's layer for keys that heads share; in a subclass they come before those of the stock class."""

    values: Tensor
    places: Tensor | None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)  # type: ignore[misc]
        heads = value_states.shape[1]
        if self.values.dim() == 4 and self.values.shape[1] != heads:  # static: as many as keys
            B, _, S, Dv = self.values.shape
            self.values = self.values.new_zeros(B, heads, S, Dv)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.values)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        key_states = key_states.transpose(1, 2).flatten(2)[:, None]
        if self.places is not None:
            key_states = key_states[..., self.places]
        return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (type(self).__bases__[1], vars(self))


@cache
def _with_shared_keys(stock: type) -> Any:
    return type(f"{stock.__name__}OfSharedKeys", (_SharedKeys, stock), {})


def _remake(stock: type, attributes: dict[str, Any]) -> Any:
    made = object.__new__(_with_shared_keys(stock))
    vars(made).update(attributes)
    return made
