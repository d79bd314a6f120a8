"""The record of a model's shape: what pruning left and what was converted, and a whole model brought to that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn

from heads_kernels.errors import refuse
from heads_kernels.heads.configs import own_configs
from heads_kernels.heads.dense import check_projections
from heads_kernels.heads.layers import AttentionLayer, find_layers
from heads_kernels.heads.reshape import check_can_share, share, shrink

#: The key of a file's metadata, and the name of the attribute of transformers' configs: what `record` gives.
RECORD: Final = "heads_kernels"
_WORDS: Final = ("pruned", "converted")


def record(layers: Iterable[AttentionLayer]) -> dict[str, Any]:
    """`{"pruned": {layer name: shape}, "converted": {layer name: {"dim": Ds, "ragged": bool}}}`, in types of JSON.

    Layers that were never pruned or have heads of their own are left out.
    """
    layers = list(layers)
    pruned = {layer.name: shape(layer) for layer in layers if hasattr(layer.module, "kept_heads")}
    converted = {
        layer.name: {"dim": layer.head_dim, "ragged": layer.module.ragged}
        for layer in layers
        if layer.layout.shared
    }
    return {word: each for word, each in zip(_WORDS, (pruned, converted), strict=True) if each}


def shape(layer: AttentionLayer) -> dict[str, Any]:
    """What is left of a layer, in types of JSON.

    `heads`: the heads that are left, numbered as in the model that was never pruned; `key_heads`: how many; `head_dim`
    and `value_dim`: their widths.
    """
    return {
        "heads": kept_heads(layer),
        "key_heads": layer.num_key_heads,
        "head_dim": layer.head_dim,
        "value_dim": layer.value_dim,
    }


def kept_heads(layer: AttentionLayer) -> list[int]:
    """The heads of the layer, numbered as before it was ever pruned."""
    kept = getattr(layer.module, "kept_heads", None)
    return list(range(layer.num_heads)) if kept is None else kept.tolist()


# ---------------------------------------------------------------------- configs of transformers
def record_in_config(model: nn.Module) -> None:
    """Put what is left of the heads, and what was converted, into the configs of transformers models.

    Layers are named as in the base model, so that models with a task head and without find the same names. Parts of a
    model that share its config leave it to the whole.
    """
    if not record(find_layers(model)):
        return
    own_configs(model)
    part: Any
    recorded = set()
    for part in model.modules():
        if not hasattr(part, "base_model_prefix") or id(part.config) in recorded:
            continue
        recorded.add(id(part.config))
        if found := record(find_layers(part.base_model)):
            setattr(part.config, RECORD, {**getattr(part.config, RECORD, {}), **found})


def number_heads(model: nn.Module, record: Mapping[str, Any]) -> None:
    """Write the numbers of the heads that are left: buffers of a model made on the meta device have no values."""
    pruned = record.get("pruned", {})
    for layer in find_layers(model):
        if layer.name in pruned:
            heads = torch.tensor(pruned[layer.name]["heads"], dtype=torch.int64)
            layer.module.kept_heads = heads.to(layer.output.linear.weight.device)


# ---------------------------------------------------------------------- back to the recorded shape
def restore_shape(model: nn.Module, record: Mapping[str, Any]) -> None:
    """Bring a model to the recorded shape: heads share queries and keys where they did, and those that are missing go.

    Layers that only one of them has are left alone. New parameters are empty.

    Raises:
        TypeError, ValueError: a layer that doesn't fit, named with what the record and what the model has.
    """
    pruned, converted = (record.get(word, {}) for word in _WORDS)
    for layer in find_layers(model):
        if layer.name in converted and not layer.layout.shared:
            check_can_share(model, layer)
            share(model, layer, converted[layer.name]["dim"], ragged=False)
    layers = find_layers(model)
    for layer in layers:
        if layer.name in converted:
            layer.module.ragged = converted[layer.name]["ragged"]
        if layer.name in pruned:
            heads, key_heads = _kept(layer, pruned[layer.name], layer.name in converted)
            if len(heads) < layer.num_heads:
                check_projections(layer, "prune", adapters=True)
                shrink(layer, heads, key_heads)


def _kept(
    layer: AttentionLayer, left: Mapping[str, Any], shared: bool
) -> tuple[list[int], list[int]]:
    """The heads and key heads of the layer that a record says are left, numbered as they are in the layer."""
    own = kept_heads(layer)
    widths = layer.head_dim, layer.value_dim
    fits = layer.layout.shared == shared and (left["head_dim"], left["value_dim"]) == widths
    heads = [own.index(head) for head in left["heads"] if head in own]
    key_heads = _sources(layer, heads, left["key_heads"])
    if not fits or len(heads) < len(left["heads"]) or key_heads is None:
        was = f"was saved with {_words(left)}; the model has {_words(shape(layer))}"
        instead = (
            "load it into a model of the shape that it had before heads were pruned or converted"
        )
        refuse(f"layer {layer.name!r}", was, instead)
    return heads, key_heads


def _sources(layer: AttentionLayer, heads: list[int], count: int) -> list[int] | None:
    """The key heads of the layer that `count` key heads of the record come from; None where they don't fit."""
    if layer.layout.shared or not heads:
        return [0] * count
    if not count or len(heads) % count:
        return None
    group, size = layer.num_heads // layer.num_key_heads, len(heads) // count
    read = [head // group for head in heads]
    firsts = read[::size]
    return firsts if read == [key for key in firsts for _ in range(size)] else None


def _words(left: Mapping[str, Any]) -> str:
    widths = f"of widths {left['head_dim']} and {left['value_dim']}"
    return f"heads {left['heads']} and {left['key_heads']} key heads {widths}"
