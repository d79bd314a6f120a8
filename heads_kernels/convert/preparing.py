"""A model made ready for conversion: its layers chosen, on modules and an attention function that know heads."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from heads_kernels.checks import is_int
from heads_kernels.errors import refuse
from heads_kernels.heads.layers import AttentionLayer, attention_layers, find_layers
from heads_kernels.heads.sharing import check_can_share
from heads_kernels.nn import GatedMultiheadAttention


def prepare(model: nn.Module, layers: Iterable[int | str] | None) -> list[AttentionLayer]:
    """The layers to convert, in the order in which they are named, of a model that runs on the operators from now on.

    Those that are `torch.nn.MultiheadAttention` become `GatedMultiheadAttention`, and models of transformers with
    chosen layers are put in use. Attention that is not chosen stays what it was.

    Args:
        model: what holds the layers, not a layer itself.
        layers: indices or names; modules of `torch.nn` count too, in the order of `model.named_modules()`. None means
            all that have heads.

    Raises:
        TypeError, ValueError: a layer that doesn't exist, is named twice or can not be converted; no layer at all.
    """
    names = _names(model, layers)
    _replace_torch(model, names)
    _use(model, names)
    there = {layer.name: layer for layer in attention_layers(model)}
    chosen = [there[name] for name in names]
    if layers is None:
        chosen = [layer for layer in chosen if layer.num_heads]
    if not chosen:
        refuse("model", "has no heads left", "convert it before all of them are pruned")
    for layer in chosen:
        check_can_share(model, layer)
    return chosen


def _names(model: nn.Module, layers: Iterable[int | str] | None) -> list[str]:
    """The names of the chosen layers."""
    place = {module: number for number, module in enumerate(model.modules())}
    found = {layer.name: place[layer.module] for layer in find_layers(model)}
    found |= {name: place[module] for name, module in _torch_attention(model).items()}
    names = sorted(found, key=lambda name: found[name])
    if layers is None:
        return names
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        refuse("layers", f"is {layers!r}", f"pass a list of layers: [{layers!r}]", TypeError)
    chosen: list[str] = []
    for key in layers:
        known = key in found or (is_int(key) and 0 <= key < len(names))
        if not known:
            there = f"this model has layers 0 to {len(names) - 1}: {', '.join(map(repr, names))}"
            refuse("layers", f"names layer {key!r}", there)
        name = names[key] if is_int(key) else str(key)
        if name in chosen:
            refuse("layers", f"names layer {name!r} twice", "name it once")
        chosen.append(name)
    if not chosen:
        refuse("layers", "is empty", "name at least one layer, or pass None for all")
    return chosen


# ---------------------------------------------------------------------- torch.nn.MultiheadAttention
def _torch_attention(model: nn.Module) -> dict[str, nn.MultiheadAttention]:
    """Those whose forward is PyTorch's own."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
    }


def _replace_torch(model: nn.Module, names: list[str]) -> None:
    made: dict[nn.Module, nn.Module] = {}
    for name, module in _torch_attention(model).items():
        if name in names:
            _check_torch(model, name, module)
            made[module] = GatedMultiheadAttention.from_torch(module)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in made:
                setattr(parent, name, made[child])


def _check_torch(model: nn.Module, name: str, module: nn.MultiheadAttention) -> None:
    if module is model:
        was = "is a MultiheadAttention itself"
        refuse("model", was, "pass a module that holds it: nn.Sequential(model)")
    if not module.batch_first:
        instead = "make it with batch_first=True: converted attention takes [B, T, embed_dim]"
        refuse(f"layer {name!r}", "has batch_first=False", instead)
    for argument, there in (
        ("add_bias_kv", module.bias_k is not None),
        ("add_zero_attn", module.add_zero_attn),
    ):
        if there:
            refuse(f"layer {name!r}", f"has {argument}", "leave it out, by layers")


# ---------------------------------------------------------------------- transformers
def _use(model: nn.Module, names: list[str]) -> None:
    """Put the models of transformers that hold chosen layers in use, where they run another attention function."""
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    from heads_kernels.integrations.transformers import use

    stock = {
        layer.module
        for layer in find_layers(model)
        if layer.name in names and not runs_operators(layer.module)
    }
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and stock & set(part.modules()):
            stock -= set(part.modules())
            use(part)


def runs_operators(module: Any) -> bool:
    """Whether a module calls the operators: those of transformers do where their config says so, the package's do."""
    config = getattr(module, "config", None)
    return bool(getattr(config, "_attn_implementation", "heads_kernels") == "heads_kernels")
