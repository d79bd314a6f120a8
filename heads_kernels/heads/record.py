"""The record of what pruning left of a model: written beside its weights, and a whole model brought to that shape."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Final

import torch
from torch import nn

from heads_kernels.errors import refuse
from heads_kernels.heads.layers import AttentionLayer, find_layers
from heads_kernels.heads.shrinking import shrink

#: The key of a file's metadata, and the name of the attribute of transformers' configs: `{"pruned": {layer: shape}}`.
RECORD: Final = "heads_kernels"


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
def own_config(model: nn.Module) -> None:
    """Give a transformers model configs of its own: models that are made from one config object share it otherwise.

    Parts of the model that share a config share the copy.
    """
    memo: dict[int, Any] = {}
    for part in model.modules():
        for name, value in list(vars(part).items()):
            if hasattr(type(value), "sub_configs"):  # transformers' PreTrainedConfig
                setattr(part, name, deepcopy(value, memo))


def record_in_config(model: nn.Module) -> None:
    """Put what is left of the heads into the configs of transformers models.

    Layers are named as in the base model, so that models with a task head and without find the same names. Parts of a
    model that share its config leave it to the whole.
    """
    if not any(hasattr(module, "kept_heads") for module in model.modules()):
        return
    own_config(model)
    part: Any
    recorded = set()
    for part in model.modules():
        if not hasattr(part, "base_model_prefix") or id(part.config) in recorded:
            continue
        recorded.add(id(part.config))
        pruned = {
            layer.name: shape(layer)
            for layer in find_layers(part.base_model)
            if hasattr(layer.module, "kept_heads")
        }
        if pruned:
            setattr(part.config, RECORD, {**getattr(part.config, RECORD, {}), "pruned": pruned})


def number_heads(model: nn.Module, record: Mapping[str, Any]) -> None:
    """Write the numbers of the heads that are left: buffers of a model made on the meta device have no values."""
    pruned = record.get("pruned", {})
    for layer in find_layers(model):
        if layer.name in pruned:
            heads = torch.tensor(pruned[layer.name]["heads"], dtype=torch.int64)
            layer.module.kept_heads = heads.to(layer.output.linear.weight.device)


# ---------------------------------------------------------------------- back to the recorded shape
def restore_shape(model: nn.Module, record: Mapping[str, Any]) -> None:
    """Take out of the model the heads that are missing in `record["pruned"]`; layers that only one has are left alone.

    Raises:
        ValueError: a layer that doesn't fit, named with what the record and what the model has; nothing is changed.
    """
    pruned = record.get("pruned", {})
    layers = [layer for layer in find_layers(model) if layer.name in pruned]
    kept = [_kept(layer, pruned[layer.name]) for layer in layers]
    for layer, (heads, key_heads) in zip(layers, kept, strict=True):
        if len(heads) < layer.num_heads:
            shrink(layer, heads, key_heads)


def _kept(layer: AttentionLayer, left: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """The heads and key heads of the layer that a record says are left, numbered as they are in the layer."""
    own = kept_heads(layer)
    fits = (left["head_dim"], left["value_dim"]) == (layer.head_dim, layer.value_dim)
    heads = [own.index(head) for head in left["heads"] if head in own]
    key_heads = _sources(layer, heads, left["key_heads"])
    if not fits or len(heads) < len(left["heads"]) or key_heads is None:
        was = f"was saved with {_words(left)}; the model has {_words(shape(layer))}"
        instead = "load it into a model of the shape that it had before heads were pruned"
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
