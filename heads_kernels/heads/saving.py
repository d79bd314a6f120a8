"""Models whose heads were pruned or converted, saved with the shape that they have and loaded into whole models."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

from heads_kernels.errors import refuse
from heads_kernels.heads.layers import attention_layers
from heads_kernels.heads.record import RECORD, record, record_in_config, restore_shape, shape
from heads_kernels.nn.snapshot import kept_on_error


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Save the weights of a model, and what became of its heads, as one safetensors file.

    The metadata of the file holds the shape as JSON: what is left of the heads,
    `{"pruned": {layer name: {heads, key_heads, head_dim, value_dim}}}`, and which layers are collaborative,
    `{"converted": {layer name: {dim, ragged}}}`. Gates that are learned are weights of the model; heads that `close`
    closed are not saved. The file is written beside its place and then renamed: what was there stays whole if saving is
    interrupted.

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
    layers = attention_layers(model)
    found = {**record(layers), "pruned": {layer.name: shape(layer) for layer in layers}}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        beside = Path(folder) / path.name
        save_model(model, str(beside), metadata={RECORD: json.dumps(found)})
        beside.chmod(0o644)  # safetensors gives it to its owner alone
        beside.replace(path)


@torch.inference_mode(False)
def load(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load what `save` saved: the model is brought to the shape of the file, then the weights are copied.

    Layers that are collaborative in the file become so, and the heads that it lacks are taken out. Everything is
    checked before anything is changed. On Ctrl-C the model has its own shape again; if weights were being copied then,
    some of them are the file's: load once more.

    Args:
        model: of the shape that the saved model once had, before or after it was pruned and converted, on any device
            and of any dtype; a transformers model whose file has converted layers is in use
            (`hk.integrations.transformers.use`). Gates that were attached when it was saved have to be attached again
            (`hk.heads.gate`, in the same layers): a file holds their state, not their settings.
        path: of the file.

    Raises:
        TypeError, ValueError: a layer of the file that doesn't exist in the model or doesn't fit it, named with what
            the file and what the model has; weights or gates that only one of them has, or of other sizes in the two.
    """
    from safetensors import safe_open
    from safetensors.torch import load_model

    with safe_open(str(path), "pt") as file:
        found = json.loads((file.metadata() or {}).get(RECORD, "{}"))
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    layers = found.get("pruned", {})
    trial = _without_weights(model)
    there = {layer.name for layer in attention_layers(trial)}
    for name in layers:
        if name not in there:
            was = f"of the file {str(path)!r} does not exist in the model"
            instead = f"the model has {', '.join(sorted(there))}"
            if isinstance(dict(model.named_modules()).get(name), nn.MultiheadAttention):
                instead = "call hk.nn.replace_attention_(model) first"
            refuse(f"layer {name!r}", was, instead)
    restore_shape(trial, found)
    _check_weights(trial, sizes, path)
    with kept_on_error(model):
        restore_shape(model, found)
        load_model(model, str(path))
        record_in_config(model)


def _without_weights(model: nn.Module) -> nn.Module:
    """A copy with its parameters on the meta device, those that parts share shared."""
    memo = {
        id(old): nn.Parameter(torch.empty_like(old, device="meta"), old.requires_grad)
        for old in model.parameters()
    }
    return deepcopy(model, memo)


def _check_weights(
    model: nn.Module, sizes: Mapping[str, list[int]], path: str | os.PathLike[str]
) -> None:
    """The file has the weights of the model in their sizes, those that parts share under one name, and no others."""
    weights = model.state_dict(keep_vars=True)
    there = {id(weights[name]) for name in sizes if name in weights}
    lacking = sorted(name for name, weight in weights.items() if id(weight) not in there)
    if unknown := sorted(sizes.keys() - weights.keys()):
        was = f"is {str(path)!r}, which has {', '.join(unknown)}; the model has not"
        refuse("path", was, "attach gates with hk.heads.gate(model, ...) where the file has them")
    if lacking:
        was = f"is {str(path)!r}, which lacks {', '.join(lacking)}"
        refuse("path", was, "take off gates that it lacks with hk.heads.ungate(model)")
    for name, size in sizes.items():
        if (own := list(weights[name].shape)) != size:
            was = f"is {str(path)!r}, which has {name} of shape {size}; in the model it has {own}"
            refuse("path", was, "load it into a model of the same sizes")
