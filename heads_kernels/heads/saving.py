"""Models whose heads were pruned, saved with the shape that they have and loaded into models that are whole."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from heads_kernels.errors import refuse
from heads_kernels.heads.layers import AttentionLayer, attention_layers, find_layers
from heads_kernels.heads.pruning import kept_heads, shape, shrink

#: The key of the metadata, and the name of the attribute of transformers' configs: `{"pruned": {layer: shape}}`.
RECORD = "heads_kernels"


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Save the weights of a model, and what is left of its heads, as one safetensors file.

    The metadata of the file holds the shape, `{"pruned": {layer name: {heads, key_heads, head_dim, value_dim}}}`, as
    JSON. Gates that are learned are weights of the model; heads that `close` closed are not saved. The file is written
    beside its place and then renamed: what was there stays whole if saving is interrupted.

    Args:
        model: with attention layers of the table.
        path: of the file; its folder exists.

    Raises:
        ValueError: no attention layer of the table is in the model, or there is no such folder.
    """
    from safetensors.torch import save_model

    path = Path(path)
    if not path.parent.is_dir():
        refuse("path", f"is {str(path)!r}", "its folder does not exist: make it first")
    record = {"pruned": {layer.name: shape(layer) for layer in attention_layers(model)}}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        beside = Path(folder) / path.name
        save_model(model, str(beside), metadata={RECORD: json.dumps(record)})
        os.replace(beside, path)


def load(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load what `save` saved: the heads that the file lacks are taken out of the model, then the weights are copied.

    Args:
        model: of the shape that the saved model once had, pruned or not, on any device and of any dtype. Gates that
            were attached when it was saved have to be attached again (`hk.heads.gate`, in the same layers): a file
            holds their state, not their settings.
        path: of the file.

    Raises:
        ValueError: a layer of the file that doesn't exist in the model or doesn't fit it, named with what the file and
            what the model has; gates that the model lacks. Nothing is changed then.
        RuntimeError: other weights that don't fit, named by PyTorch. Heads have been taken out then.
    """
    from safetensors import safe_open
    from safetensors.torch import load_model

    with safe_open(str(path), "pt") as file:
        record = json.loads((file.metadata() or {}).get(RECORD, "{}"))
        names = list(file.keys())
    found = {layer.name: layer for layer in attention_layers(model)}
    for name in record.get("pruned", {}):
        if name not in found:
            was = f"of the file {str(path)!r} does not exist in the model"
            refuse(f"layer {name!r}", was, f"the model has {', '.join(found)}")
    without = {name for name, layer in found.items() if _gate(layer) is None}
    for name in names:
        holder, is_gate, _ = name.partition(".head_gate.")
        if is_gate and holder in without:
            was = f"has gates in the file {str(path)!r}, but not in the model"
            refuse(f"layer {holder!r}", was, "attach them first, with hk.heads.gate(model, ...)")
    restore_shape(model, record)
    load_model(model, str(path))


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
    key_heads = _key_heads(layer, heads, left["key_heads"])
    if not fits or len(heads) < len(left["heads"]) or key_heads is None:
        was = f"was saved with {_words(left)}; the model has {_words(shape(layer))}"
        instead = "load it into a model of the shape that it had before heads were pruned"
        refuse(f"layer {layer.name!r}", was, instead)
    return heads, key_heads


def _key_heads(layer: AttentionLayer, heads: list[int], count: int) -> list[int] | None:
    """The key heads of the layer that `count` key heads of the record come from; None where they don't fit."""
    if layer.family.shared or not heads:
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


def _gate(layer: AttentionLayer) -> nn.Module | None:
    return getattr(layer.module, "head_gate", None)
