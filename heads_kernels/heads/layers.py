"""The attention layers of a model."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar

from torch import nn

from heads_kernels.checks import refuse
from heads_kernels.heads.layout_check import misfit
from heads_kernels.heads.layouts import LAYOUTS, HeadLayout, form_of, layout_of
from heads_kernels.heads.weights import AttentionLayer, as_converted, check_has_parts, layer_of

#: `{layer: heads}`, layers by index or by name.
HeadsByLayer: TypeAlias = Mapping[int, Iterable[int]] | Mapping[str, Iterable[int]]


def register_layout(class_name: str, layout: HeadLayout, example: nn.Module | None = None) -> None:
    """Let `attention_layers` find modules of the class `class_name` and its subclasses, with this layout.

    The layout is verified once per class and shape, before its first use, or now with an example: a closed head is
    compared with the same head pruned, on random input and small random weights on the CPU.

    Args:
        class_name: name of a class whose modules call the attention operators or transformers' attention function.
        layout: of the class.
        example: a module of the class, which is not changed.

    Raises:
        ValueError: the layout does not fit the example; it is then not registered.
    """
    if example is not None:
        if class_name not in (base.__name__ for base in type(example).__mro__):
            was = f"is a {type(example).__name__}"
            refuse("example", was, f"pass a {class_name}, the class that the layout is of")
        _check_fits("example", example, layout)
    LAYOUTS[class_name] = layout


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """The attention layers of a model, in the order of `model.named_modules()`; a shared module counts once.

    Finds modules of the classes in `LAYOUTS` (heads/layouts.py), to which `register_layout` adds, and transformers'
    modules whose projections have the names of one of `FORMS`. If a pruned head of a class does not compute the same as
    a closed head, a class in `LAYOUTS` raises an error and one found by `FORMS` is skipped.

    Args:
        model: any model that contains such modules.

    Raises:
        ValueError: the model has no known attention layer (the message names what looks like attention, and why it is
            not supported), a class has a known name but not its parts, or a layout does not fit its class.
    """
    if not isinstance(model, nn.Module):
        refuse("model", f"is a {type(model).__name__}", "pass a torch.nn.Module", TypeError)
    layers = find_layers(model)
    if not layers and any(isinstance(part, nn.MultiheadAttention) for part in model.modules()):
        instead = "call hk.nn.replace_attention_(model) first"
        was = "has no known attention layer, but torch.nn.MultiheadAttention"
        refuse("model", was, instead)
    if not layers:
        seen = "; ".join(sorted(set(filter(None, map(_seen, model.modules())))))
        was = "has no attention layer that is known" + (f", but {seen}" if seen else "")
        instead = "known are those of hk.nn and of transformers"
        refuse("model", was, f"{instead}; hk.heads.register_layout adds your own classes")
    return layers


def _seen(module: nn.Module) -> str:
    """A module that looks like attention, and why it is not supported; "" for others."""
    name = type(module).__name__
    if (form := form_of(module)) is not None:
        return f"{name}, which {misfit(module, form)}"
    return name if "Attention" in name else ""


def find_layers(model: nn.Module) -> list[AttentionLayer]:
    """As `attention_layers`, but returns an empty list if there is none."""
    found = [
        (name, module, layout)
        for name, module in model.named_modules()
        if (layout := _layout(name, module)) is not None
    ]
    return [layer_of(index, *item) for index, item in enumerate(found)]


def _layout(name: str, module: nn.Module) -> HeadLayout | None:
    """The verified layout of a module in its current state; None if it is not known attention."""
    if (layout := layout_of(module)) is not None:
        converted = as_converted(module, layout)
        if converted is not layout:
            check_has_parts(f"module {name!r}", module, converted)
        else:
            _check_fits(f"module {name!r}", module, layout)
        return converted
    form = form_of(module)
    return form if form is not None and misfit(module, form) is None else None


def _check_fits(name: str, module: nn.Module, layout: HeadLayout) -> None:
    check_has_parts(name, module, layout)
    if (why := misfit(module, layout)) is not None:
        was = f"is a {type(module).__name__}, which does not have the layout {layout.name!r}: it {why}"
        refuse(name, was, "register a layout that fits (hk.heads.register_layout)")


def heads_of_layers(
    layers: list[AttentionLayer], heads: HeadsByLayer
) -> list[tuple[AttentionLayer, list[int]]]:
    """Resolve `{layer: heads}` to layers and sorted lists of heads.

    Raises:
        TypeError, ValueError: a layer or head does not exist; the message lists the existing ones.
    """
    if not isinstance(heads, Mapping):
        was = f"is a {type(heads).__name__}"
        refuse("heads", was, "pass {layer: heads}, layers by index or name", TypeError)
    asked: dict[int, set[int]] = {}
    for key, chosen in heads.items():
        layer = find_layer(layers, key, "heads")
        asked.setdefault(layer.index, set()).update(_heads(layer, chosen))
    return [(layers[index], sorted(asked[index])) for index in sorted(asked)]


class Named(Protocol):
    """Anything with an index and a name among layers."""

    @property
    def index(self) -> int: ...
    @property
    def name(self) -> str: ...


Layer = TypeVar("Layer", bound=Named)


def find_layer(layers: Sequence[Layer], key: int | str, argument: str) -> Layer:
    """The layer of this index or name.

    Raises:
        ValueError: there is none; the message lists the existing layers.
    """
    by_key: dict[int | str, Layer] = {layer.index: layer for layer in layers}
    by_key |= {layer.name: layer for layer in layers}
    if isinstance(key, bool) or key not in by_key:
        names = ", ".join(repr(layer.name) for layer in layers)
        there = f"this model has layers 0 to {len(layers) - 1}: {names}"
        refuse(argument, f"names layer {key!r}", there)
    return by_key[key]


def _heads(layer: AttentionLayer, heads: Iterable[int]) -> list[int]:
    count = layer.num_heads
    there = f"it has heads 0 to {count - 1}, {count} in all" if count else "it has no head left"
    if not isinstance(heads, Iterable) or isinstance(heads, str):
        refuse(f"heads of {layer}", f"is {heads!r}", f"pass a list of heads; {there}", TypeError)
    heads = list(heads)
    for head in heads:
        if isinstance(head, bool) or not hasattr(head, "__index__"):
            refuse(f"heads of {layer}", f"has {head!r}", f"pass integers; {there}", TypeError)
        if not 0 <= operator.index(head) < count:
            refuse(f"heads of {layer}", f"has head {operator.index(head)}", there)
    return [operator.index(head) for head in heads]
