"""A model made ready for conversion: its layers chosen, on modules and an attention function that know heads."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

from torch import nn

from heads_kernels.errors import refuse
from heads_kernels.heads.layers import AttentionLayer, attention_layers, find_layer, find_layers
from heads_kernels.heads.replacing import replace_torch, torch_attention
from heads_kernels.heads.sharing import check_can_share


def prepare(
    model: nn.Module, layers: Iterable[int | str] | None, argument: str = "layers"
) -> list[AttentionLayer]:
    """The layers to convert, in the order in which they are named, of a model that runs on the operators from now on.

    Those that are `torch.nn.MultiheadAttention` become `GatedMultiheadAttention`, and models of transformers with
    chosen layers are put in use. Attention that is not chosen stays what it was.

    Args:
        model: what holds the layers, not a layer itself.
        layers: indices or names; modules of `torch.nn` count too, in the order of `model.named_modules()`. None means
            all that have heads.
        argument: what errors call `layers`.

    Returns:
        The layers, numbered as they are named.

    Raises:
        TypeError, ValueError: a layer that doesn't exist, is named twice or can not be converted; no layer at all.
    """
    places = _chosen(_places(model), layers, argument)
    names = {place.name for place in places}
    replace_torch(model, names)
    _use(model, names)
    there = {layer.name: layer for layer in attention_layers(model)}
    chosen = [replace(there[place.name], index=place.index) for place in places]
    if layers is None:
        chosen = [layer for layer in chosen if layer.num_heads]
    if not chosen:
        refuse("model", "has no heads left", "convert it before all of them are pruned")
    for layer in chosen:
        check_can_share(model, layer)
    return chosen


@dataclass(frozen=True)
class _Place:
    """A layer before it is made ready: its number among all that can be named, and its name."""

    index: int
    name: str


def _places(model: nn.Module) -> list[_Place]:
    place = {module: number for number, module in enumerate(model.modules())}
    found = {layer.name: place[layer.module] for layer in find_layers(model)}
    found |= {name: place[module] for name, module in torch_attention(model).items()}
    return [_Place(*each) for each in enumerate(sorted(found, key=lambda name: found[name]))]


def _chosen(there: list[_Place], layers: Iterable[int | str] | None, argument: str) -> list[_Place]:
    if layers is None:
        return there
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        refuse(argument, f"is {layers!r}", f"pass a list of layers: [{layers!r}]", TypeError)
    chosen: list[_Place] = []
    for key in layers:
        place = find_layer(there, key, argument)
        if place in chosen:
            refuse(argument, f"names layer {place.name!r} twice", "name it once")
        chosen.append(place)
    if not chosen:
        refuse(argument, "is empty", "name at least one layer")
    return chosen


def _use(model: nn.Module, names: Container[str]) -> None:
    """Put the models of transformers that hold chosen layers in use, where they run another attention function."""
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    from heads_kernels.integrations.transformers import use

    stock = {
        layer.module
        for layer in find_layers(model)
        if layer.name in names and not layer.runs_operators
    }
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and stock & set(part.modules()):
            stock -= set(part.modules())
            use(part)
