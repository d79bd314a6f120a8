"""Checks before the forward of pruned and converted modules of transformers, and the caches of converted ones, which
hold one key for all heads in the layout that the operator reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from heads_kernels.checks import refuse
from heads_kernels.dtensor import is_sharded
from heads_kernels.heads.configs import NAME, attention_function
from heads_kernels.heads.layouts import stock_arguments
from heads_kernels.heads.shared import FusedProjection, SharedProjection, rotary_places


# ---------------------------------------------------------------------- pruned modules
def check_pruned_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hook before the forward of a pruned module of transformers.

    Raises:
        ValueError: stock attention would add a position bias of the heads before pruning; or the cache has, or is made
            for, another number of key heads.
    """
    arguments = [*zip(stock_arguments(type(module)), args, strict=False), *kwargs.items()]
    H, before = len(module.kept_heads), module.heads_before
    if (runs := attention_function(module)) != NAME:
        biases = (
            isinstance(value, Tensor) and value.dim() == 4 and value.shape[1] == before != H
            for _, value in arguments[1:]
        )
        if adds_bias_of_all_heads(module) or any(biases):
            was = f"is {runs!r} in a {type(module).__name__} with {H} of {before} heads"
            was += ", to which stock attention adds the position bias of all"
            instead = (
                "call hk.integrations.transformers.use(model), which selects those of its heads"
            )
            refuse("attn_implementation", was, instead)
    if getattr(module, "mixing", None) is None:
        for name, heads in _heads_in_caches(module, arguments):
            if heads != module.kept_key_heads:
                was = f"has keys of {heads} heads for layer {module.layer_idx}, of which "
                was += f"pruning left {module.kept_key_heads}"
                instead = "pass an empty cache, and no prefill_chunk_size to generate: it reserves memory for all heads"
                refuse(name, was, instead)


def adds_bias_of_all_heads(module: Any) -> bool:
    """Whether stock attention of a pruned module adds a position bias that pruning leaves as it is: T5, Swin, BEiT."""
    own = ("has_relative_attention_bias", "has_relative_position_bias", "relative_position_bias")
    is_biased = any(getattr(module, name, None) not in (None, False) for name in own)
    H = len(module.kept_heads)
    return is_biased or getattr(module, "n_heads", H) != H  # T5 adds zeros of all heads


def _heads_in_caches(module: Any, arguments: list[tuple[str, Any]]) -> Iterator[tuple[str, int]]:
    """The number of heads of the keys that a cache has for a module, or has memory for."""
    given = dict(arguments)
    index = given.get("layer_idx", getattr(module, "layer_idx", None))
    if not isinstance(index, int):
        return
    # Of layers that run several times.
    index += sum(given.get(name, 0) for name in ("cycle_offset", "cache_offset"))
    for name, value in arguments:
        layers = getattr(value, "layers", None) if is_cache(value) else None
        if isinstance(layers, list) and index < len(layers):
            keys = getattr(layers[index], "keys", None)
            if isinstance(keys, Tensor) and keys.dim() == 4:
                yield name, keys.shape[1]


# ---------------------------------------------------------------------- converted modules
#: Names of the arguments from which encoder-decoder attention computes keys and values.
_SOURCES: Final = ("key_value_states", "encoder_hidden_states")


def check_runs_shared(
    module: Any, inputs: tuple[Any, ...], arguments: Mapping[str, Any] | None = None
) -> None:
    """Hook before the forward of a converted transformers module, whose queries, keys and caches need this package.

    Raises:
        ValueError: the config names another attention function; weights that heads share are split by tensor
            parallelism; a cache with keys of separate heads.
    """
    runs = attention_function(module)
    if runs != NAME:
        was = f"is {runs!r} in a {type(module).__name__}"
        instead = (
            "queries and keys that heads share need attn_implementation='heads_kernels': "
            "call hk.integrations.transformers.use(model)"
        )
        refuse("attn_implementation", was, instead)
    _check_whole(module)
    given = dict(zip(stock_arguments(type(module)), inputs, strict=False)) | dict(arguments or {})
    is_cross = any(given.get(name) is not None for name in _SOURCES)
    for each in given.values():
        if is_cache(each):
            if hasattr(each, "self_attention_cache"):  # each half belongs to another layer
                each = each.cross_attention_cache if is_cross else each.self_attention_cache
            store_shared_keys(each, module.layer_idx, rotary_places(module))


def _check_whole(module: nn.Module) -> None:
    """Refuse tensor parallelism of what heads share: each process would have a part of its features.

    Parameters that `fully_shard` gathers for the forward pass are not DTensors there.
    """
    sharded = [name for name, each in module.named_parameters() if is_sharded(each)]
    if not sharded:
        return
    shared = SharedProjection, FusedProjection
    parts = [f"{name}." for name, part in module.named_modules() if isinstance(part, shared)]
    for name in sharded:
        if name == "mixing" or name.startswith(tuple(parts)):
            was = "is a DTensor, but the heads of all processes share it"
            refuse(name, was, "split the projections of values and outputs alone")


# ---------------------------------------------------------------------- caches
def is_cache(value: object) -> bool:
    """Whether it is a cache of transformers. The arguments that take one have other names from release to release."""
    return hasattr(type(value), "get_seq_length")


def store_shared_keys(past: Any, layer_idx: int, places: Tensor | None = None) -> None:
    """Let the cache of a converted layer store keys as one head, `[B, 1, S, n * head_dim]`.

    The module's own code splits the shared key into `n` heads, which a cache would store head by head: the operator
    would need a copy of all of them in every step. A static cache then has room for as many heads of values as it gets.

    Args:
        past: a cache of transformers; of an encoder-decoder's pair of caches, one.
        layer_idx: of the converted layer.
        places: of the features in `n * head_dim`, of a `SharedProjection` that has them, which alone are stored.

    Raises:
        ValueError: the cache has room or keys for separate heads already.
    """
    if (made := getattr(past, "layer_class_to_replicate", None)) is not None:
        while len(past.layers) <= layer_idx:
            past.layers.append(made())
    layer = past.layers[layer_idx]
    if hasattr(layer, "shares_keys"):
        return
    if layer.is_initialized and layer.keys.dim() == 4 and layer.keys.shape[1] != 1:
        was = f"has keys of {layer.keys.shape[1]} heads in layer {layer_idx}"
        refuse("cache", was, "heads share keys here: pass an empty cache")
    past.layers[layer_idx] = _remake(type(layer), vars(layer) | {"places": places})


@cache
def _with_shared_keys(stock: Any) -> Any:
    """A subclass of the class of a cache's layer, for keys that heads share."""

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
