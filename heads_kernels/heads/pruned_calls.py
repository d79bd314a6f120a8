"""Calls of pruned layers of transformers that would fail, for their bias or their cache is of all heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from heads_kernels.checks import refuse
from heads_kernels.heads.configs import NAME, attention_function
from heads_kernels.heads.layouts import stock_arguments
from heads_kernels.heads.shared_cache import is_cache


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
