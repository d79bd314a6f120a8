"""Save and load models with pruned or converted heads, with a record of their shape."""

from __future__ import annotations

import copy
import json
import os
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from heads_kernels.checks import refuse
from heads_kernels.files import write_whole
from heads_kernels.heads.interface import own_configs
from heads_kernels.heads.layers import attention_layers, find_layers
from heads_kernels.heads.projected import projected_layers, with_projections
from heads_kernels.heads.reshape import check_can_share, read_key_heads, share, shrink
from heads_kernels.heads.weights import ProjectedLayer, check_projections
from heads_kernels.snapshot import kept_on_error


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Save the weights of a model and the shape of its attention layers as one safetensors file.

    The metadata of the file holds the shape as JSON (`shapes`). Learned gates are weights of the model; heads closed by
    `close` are saved as open. An interrupted call keeps the old file.

    Args:
        model: with attention layers (`attention_layers`).
        path: of the file, in an existing folder.

    Raises:
        ValueError: the model has no known attention layer, or the folder does not exist.
    """
    from safetensors.torch import save_model

    path = Path(path)
    if not path.parent.is_dir():
        refuse("path", f"is {str(path)!r}, but its folder does not exist", "create the folder first")
    every = {layer.name: shape(layer) for layer in projected_layers(model)}
    metadata = {RECORD: json.dumps({**record(model), "pruned": every})}
    write_whole(path, lambda new: save_model(model, str(new), metadata=metadata))


@torch.inference_mode(False)
def load(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a file of `save`: converts and prunes the model to the shape of the file, then copies the weights.

    On an error the model is unchanged. On Ctrl-C it gets its old shape back; if the weights were being copied, some of
    them are then those of the file: load again.

    Args:
        model: with the original shape of the saved model, or the one it was saved with, on any device and of any dtype.
            If the file has converted layers, call `hk.integrations.transformers.use` on a transformers model first.
            Learned gates must be attached again, to the same layers (`hk.heads.gate`): the file has their state, but
            not their settings.
        path: of the file.

    Raises:
        TypeError, ValueError: a layer of the file does not exist in the model or does not fit; weights or gates exist
            only in the file or only in the model, or differ in size. The message names them.
    """
    from safetensors import safe_open
    from safetensors.torch import load_model

    with safe_open(str(path), "pt") as file:
        found = json.loads((file.metadata() or {}).get(RECORD, "{}"))
        sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    with kept_on_error(model):
        restore_shape(model, found)
        _check_weights(model, sizes, path)
        load_model(model, str(path))
        record_in_config(model)


def _check_weights(model: nn.Module, sizes: Mapping[str, list[int]], path: str | os.PathLike[str]) -> None:
    """Check that the file has exactly the weights of the model, with equal sizes; shared ones under one name."""
    weights = model.state_dict(keep_vars=True)
    if unknown := sorted(sizes.keys() - weights.keys()):
        was = f"is {str(path)!r}, which has {', '.join(unknown)}; the model has not"
        refuse("path", was, "attach gates with hk.heads.gate(model, ...) to the layers that had them")
    there = {id(weights[name]) for name in sizes}
    if lacking := sorted(name for name, weight in weights.items() if id(weight) not in there):
        was = f"is {str(path)!r}, which lacks {', '.join(lacking)}"
        refuse("path", was, "remove gates that it lacks with hk.heads.ungate(model)")
    for name, size in sizes.items():
        if (own := list(weights[name].shape)) != size:
            was = f"is {str(path)!r}, which has {name} of shape {size}; in the model it has {own}"
            refuse("path", was, "load it into a model of the same sizes")


# ---------------------------------------------------------------------- checkpoints of another kind
def shapes(model: nn.Module) -> dict[str, Any]:
    """The shapes of a model's pruned and converted layers, for JSON: what `save` records beside the weights.

    For checkpoints that `save` does not write, such as those of `torch.distributed.checkpoint`:

        shapes = json.dumps(hk.heads.shapes(model))
        dcp.save({"model": model.state_dict(), "heads": shapes}, checkpoint_id=path)
        ...
        state = {"heads": ""}
        dcp.load(state, checkpoint_id=path)
        hk.heads.apply_shapes(model, json.loads(state["heads"]))  # then shard it, and load "model"

    Returns:
        `{"pruned": {layer name: {heads, key_heads, head_dim, value_dim}}, "converted": {layer name: {dim, ragged}}}`;
        what does not occur is left out.
    """
    attention_layers(model)  # refuses a model without
    return record(model)


@torch.inference_mode(False)
def apply_shapes(model: nn.Module, shapes: Mapping[str, Any]) -> None:
    """Convert and prune a model of the original shape to `shapes`, before weights are loaded.

    New parameters are uninitialised. On an error the model is unchanged.

    Args:
        model: as in `load`, before it is sharded.
        shapes: what `hk.heads.shapes` returned.

    Raises:
        TypeError, ValueError: a layer does not exist in the model, or does not fit.
    """
    with kept_on_error(model):
        restore_shape(model, shapes)
        record_in_config(model)


#: The key of `record` in a file's metadata, and its name in transformers' configs.
RECORD: Final = "heads_kernels"


def record(model: nn.Module) -> dict[str, Any]:
    """As `shapes`; converted layers with rotary positions have `slots` too (`SharedProjection`)."""
    found: dict[str, Any] = {}
    changed = [
        layer
        for layer in find_layers(model)
        if hasattr(layer.module, "kept_heads") or getattr(layer.module, "mixing", None) is not None
    ]
    for layer in with_projections(model, changed):
        if hasattr(layer.module, "kept_heads"):
            found.setdefault("pruned", {})[layer.name] = shape(layer)
        if layer.layout.shared:
            made = {"dim": layer.head_dim, "ragged": layer.module.ragged}
            if slots := getattr(layer.key.linear, "slots", 0):
                made["slots"] = slots
            found.setdefault("converted", {})[layer.name] = made
    return found


def shape(layer: ProjectedLayer) -> dict[str, Any]:
    """The shape of a pruned layer, for JSON.

    `heads`: original numbers of the remaining heads; `key_heads`: number of key heads; `head_dim` and `value_dim`:
    their widths; `value_heads`: number of value heads where it is another one.
    """
    found = {
        "heads": _kept_heads(layer),
        "key_heads": layer.num_key_heads,
        "head_dim": layer.head_dim,
        "value_dim": layer.value_dim,
    }
    if layer.layout.shared and layer.value.heads != layer.num_heads:
        found["value_heads"] = layer.value.heads
    return found


def _kept_heads(layer: ProjectedLayer) -> list[int]:
    """The original numbers of the heads of the layer."""
    kept = getattr(layer.module, "kept_heads", None)
    return list(range(layer.num_heads)) if kept is None else kept.tolist()


# ---------------------------------------------------------------------- configs of transformers
class _Record(dict[str, Any]):
    """The record in a config. Copies and pickles of the config, such as transformers makes to save it, get the record
    of the layers that the model has at that time."""

    def __init__(self, found: Mapping[str, Any], model: nn.Module) -> None:
        super().__init__(found)
        self._model = weakref.ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        model = self._model()
        if model is not None and id(model) in memo:  # the model is copied
            return _Record(copy.deepcopy(dict(self), memo), memo[id(model)])
        return copy.deepcopy(self._now(), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._now(),)

    def _now(self) -> dict[str, Any]:
        """The record of the present layers; the last one, if the model is gone or a layer no longer fits its layout."""
        model = self._model()
        try:
            return dict(self) if model is None else _updated(self, model)
        except (TypeError, ValueError):  # printing a config must not fail
            return dict(self)


def _updated(earlier: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """An earlier record of a model with the layers that it has now; other entries are kept."""
    others = {key: value for key, value in earlier.items() if key not in ("pruned", "converted")}
    return others | record(model.base_model)


def record_in_config(model: nn.Module) -> None:
    """Write `record` into the configs of transformers models, with the names that layers have in the base model.

    It replaces an earlier record, also where no changed layer is left; other entries of the config's dict are kept.
    """
    parts: list[Any] = [part for part in model.modules() if hasattr(part, "base_model_prefix")]
    if not record(model) and not any(hasattr(part.config, RECORD) for part in parts):
        return
    own_configs(model)
    recorded = set()
    for part in parts:
        if id(part.config) in recorded:
            continue
        recorded.add(id(part.config))
        earlier = getattr(part.config, RECORD, {})
        if found := _updated(earlier, part):
            setattr(part.config, RECORD, _Record(found, part))
        elif earlier:
            delattr(part.config, RECORD)


def number_heads(model: nn.Module, record: Mapping[str, Any]) -> None:
    """Set `kept_heads` from the record: buffers of a model created on the meta device have no values."""
    pruned = record.get("pruned", {})
    for layer in find_layers(model):
        if layer.name in pruned:
            heads = torch.tensor(pruned[layer.name]["heads"], dtype=torch.int64)
            layer.module.kept_heads = heads.to(layer.weight.device)


# ---------------------------------------------------------------------- restoring a recorded shape
def restore_shape(model: nn.Module, record: Mapping[str, Any], *, partly: bool = False) -> None:
    """Convert and prune a model to the recorded shape; new parameters are uninitialised, other layers do not change.

    With `partly` the record may have layers that this model does not have, as that of a larger model which contains it.
    Others that do not exist, or do not fit, are refused.
    """
    pruned, converted = (record.get(word, {}) for word in ("pruned", "converted"))
    names = {*pruned, *converted}
    named = [layer for layer in find_layers(model) if layer.name in names]
    _check_known(model, names - {layer.name for layer in named}, partly)
    for layer in with_projections(model, named):
        if layer.name in converted and not layer.layout.shared:
            check_can_share(model, layer)
            found = converted[layer.name]
            share(model, layer, found["dim"], ragged=False, slots=found.get("slots", 0))
    # Once more: `share` replaces modules.
    named = [layer for layer in find_layers(model) if layer.name in names]
    for layer in with_projections(model, named):
        if layer.name in converted:
            layer.module.ragged = converted[layer.name]["ragged"]
        if layer.name in pruned:
            heads, key_heads = _kept(layer, pruned[layer.name], layer.name in converted)
            if len(heads) < layer.num_heads:
                check_projections(layer, "prune")
                shrink(layer, heads, key_heads)


def _check_known(model: nn.Module, names: Iterable[str], partly: bool) -> None:
    """Refuse names of modules that do not exist, unless `partly`, or are no known attention layers."""
    modules = dict(model.named_modules())
    for name in sorted(names):
        if name in modules:
            instead = "call hk.integrations.transformers.use(model), or register its layout, first"
            if isinstance(modules[name], nn.MultiheadAttention):
                instead = "call hk.nn.replace_attention_(model) first"
            was = f"was pruned or converted; in the model it is a {type(modules[name]).__name__}"
            refuse(f"layer {name!r}", f"{was}, whose heads are unknown", instead)
        if not partly:
            there = ", ".join(layer.name for layer in attention_layers(model))
            refuse(f"layer {name!r}", "does not exist in the model", f"it has {there}")


def _kept(layer: ProjectedLayer, left: Mapping[str, Any], shared: bool) -> tuple[list[int], list[int]]:
    """The heads and key heads of the layer that the record keeps, by their current numbers."""
    own = _kept_heads(layer)
    widths = layer.head_dim, layer.value_dim
    fits = layer.layout.shared == shared and (left["head_dim"], left["value_dim"]) == widths
    heads = [own.index(head) for head in left["heads"] if head in own]
    count = left.get("value_heads", len(heads)) if shared else left["key_heads"]
    key_heads = read_key_heads(layer, heads, count)
    if not fits or heads != sorted(heads) or len(heads) < len(left["heads"]) or len(key_heads) != count:
        was = f"was saved with {dict(left)}; the model has {shape(layer)}"
        instead = "load it into a model of the original shape, before pruning and conversion"
        refuse(f"layer {layer.name!r}", was, instead)
    return heads, key_heads
