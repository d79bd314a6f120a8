"""A model made ready for conversion: its layers chosen, on an attention function that knows heads."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import nn

from heads_kernels.errors import refuse
from heads_kernels.heads.layers import AttentionLayer, attention_layers, find_layer
from heads_kernels.heads.reshape import check_can_share


def prepare(
    model: nn.Module, layers: Iterable[int | str] | None, argument: str = "layers"
) -> list[AttentionLayer]:
    """The layers to convert, in the order in which they are named, of a model that runs on the operators from now on.

    Models of transformers with chosen layers are put in use. Attention that is not chosen stays what it was.

    Args:
        model: what holds the layers, not a layer itself.
        layers: indices or names of `attention_layers(model)`; None means all that have heads.
        argument: what errors call `layers`.

    Raises:
        TypeError, ValueError: a layer that doesn't exist, is named twice or can not be converted; no layer at all.
    """
    named = _chosen(attention_layers(model), layers, argument)
    _use(model, named)
    there = attention_layers(model)
    chosen = [there[layer.index] for layer in named]
    if layers is None:
        chosen = [layer for layer in chosen if layer.num_heads]
    if not chosen:
        refuse("model", "has no heads left", "convert it before all of them are pruned")
    for layer in chosen:
        check_can_share(model, layer)
    return chosen


def _chosen(
    there: list[AttentionLayer], layers: Iterable[int | str] | None, argument: str
) -> list[AttentionLayer]:
    if layers is None:
        return there
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        refuse(argument, f"is {layers!r}", f"pass a list of layers: [{layers!r}]", TypeError)
    chosen: list[AttentionLayer] = []
    for key in layers:
        layer = find_layer(there, key, argument)
        if layer in chosen:
            refuse(argument, f"names layer {layer.name!r} twice", "name it once")
        chosen.append(layer)
    if not chosen:
        refuse(argument, "is empty", "name at least one layer")
    return chosen


def _use(model: nn.Module, layers: Iterable[AttentionLayer]) -> None:
    """Put the models of transformers that hold chosen layers in use, where they run another attention function."""
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    from heads_kernels.integrations.transformers import use

    stock = {layer.module for layer in layers if not layer.runs_operators}
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and stock & set(part.modules()):
            stock -= set(part.modules())
            use(part)
