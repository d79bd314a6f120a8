"""Caches of transformers for converted layers: one key for all heads, in the layout that the operator reads."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from heads_kernels.checks import refuse


def is_cache(value: object) -> bool:
    """Whether it is a cache of transformers. The arguments that take one have other names from release to release."""
    return hasattr(type(value), "get_seq_length")


def store_shared_keys(past: Any, layer_idx: int, places: Tensor | None = None) -> None:
    """Let the cache of a converted layer store keys as one head, `[B, 1, S, n * head_dim]`.

    The module's own code splits the shared key into `n` heads, which a cache would store head by head: the operator
    would need a copy of all of them in every step. A static cache then has room for as many heads of values as it gets.

    Args:
        past: a cache of transformers, or a pair of them for an encoder-decoder.
        layer_idx: of the converted layer.
        places: of the features in `n * head_dim`, where those of a `RotaryProjection` alone are stored.

    Raises:
        ValueError: the cache has room or keys for separate heads already.
    """
    if hasattr(past, "self_attention_cache"):
        store_shared_keys(past.self_attention_cache, layer_idx, places)
        store_shared_keys(past.cross_attention_cache, layer_idx, places)
        return
    if (made := getattr(past, "layer_class_to_replicate", None)) is not None:
        while len(past.layers) <= layer_idx:
            past.layers.append(made())
    layer = past.layers[layer_idx]
    if hasattr(layer, "shares_keys"):
        return
    if layer.is_initialized and layer.keys.dim() == 4 and layer.keys.shape[1] != 1:
        was = f"has keys of {layer.keys.shape[1]} heads in layer {layer_idx}"
        refuse("cache", was, "heads share keys here: pass an empty cache")
    stock: Any = type(layer)
    layer.__class__ = _with_shared_keys(stock)
    layer.places = places


@cache
def _with_shared_keys(stock: Any) -> Any:
    """A subclass of the class of a cache's layer, for keys that heads share; it adds no second base class, since the
    class of an object can only change to one with the same layout."""

    def lazy_initialization(self: Any, key_states: Tensor, value_states: Tensor) -> None:
        stock.lazy_initialization(self, key_states, value_states)
        heads = value_states.shape[1]
        if self.values.dim() == 4 and self.values.shape[1] != heads:  # static: as many as keys
            B, _, S, Dv = self.values.shape
            self.values = self.values.new_zeros(B, heads, S, Dv)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.values)

    def update(
        self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        key_states = key_states.transpose(1, 2).flatten(2)[:, None]
        if self.places is not None:
            key_states = key_states[..., self.places]
        found: tuple[Tensor, Tensor] = stock.update(self, key_states, value_states, *args, **kwargs)
        return found

    def reduce(self: Any) -> tuple[Any, ...]:
        return _remake, (stock, vars(self))

    methods = {
        "lazy_initialization": lazy_initialization,
        "update": update,
        "__reduce__": reduce,
        "shares_keys": True,
    }
    return type(f"{stock.__name__}OfSharedKeys", (stock,), methods)


def _remake(stock: type, attributes: dict[str, Any]) -> Any:
    made = object.__new__(_with_shared_keys(stock))
    vars(made).update(attributes)
    return made
