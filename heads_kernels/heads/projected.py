"""The layers whose heads are known in the weights of a model: those that pruning, conversion and files can change."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from heads_kernels.checks import refuse
from heads_kernels.heads.layers import AttentionLayer, attention_layers
from heads_kernels.heads.layout_check import misfit
from heads_kernels.heads.layouts import HeadLayout, at_path, check_has_parts, form_of, layout_of
from heads_kernels.heads.weights import ProjectedLayer, as_converted, layer_of


def projected_layers(model: nn.Module) -> list[ProjectedLayer]:
    """Those of `attention_layers(model)` whose heads are known in their weights; indices and names are the same.

    They are modules of the classes in `LAYOUTS` (heads/layouts.py), to which `register_layout` adds, and transformers'
    modules whose projections have the names of one of `FORMS`. If a pruned head of a class does not compute the same as
    a closed head, a class in `LAYOUTS` raises an error and one found by `FORMS` is left out.

    Raises:
        ValueError: what `attention_layers` refuses; a layout does not fit its class.
    """
    found = _projected(model, attention_layers(model))
    return [layer for layer in found if isinstance(layer, ProjectedLayer)]


def with_projections(model: nn.Module, layers: Iterable[AttentionLayer]) -> list[ProjectedLayer]:
    """These attention layers of a model with their projections; refuses those whose heads are not known in them."""
    layers = list(layers)
    found = []
    for layer, made in zip(layers, _projected(model, layers), strict=True):
        if isinstance(made, str):
            was = f"is a {type(layer.module).__name__}, {made}"
            instead = "close heads instead (hk.heads.close), or register its layout (hk.heads.register_layout)"
            refuse(str(layer), was, instead)
        found.append(made)
    return found


def _projected(model: nn.Module, layers: Iterable[AttentionLayer]) -> list[ProjectedLayer | str]:
    """For each layer its projections, or why they are not known, in words that follow the name of its class."""
    layouts: dict[nn.Module, tuple[str, nn.Module, HeadLayout]] = {}
    for name, holder in model.named_modules():
        if (layout := layout_of(holder) or form_of(holder)) is not None:
            inner = at_path(holder, layout.inner)
            layouts.setdefault(inner, (name, holder, layout))
    return [
        _verified(layer, *layouts[layer.module])
        if layer.module in layouts
        else "whose projections have no names that are known"
        for layer in layers
    ]


def _verified(
    layer: AttentionLayer, name: str, holder: nn.Module, layout: HeadLayout
) -> ProjectedLayer | str:
    named, converted = f"module {name!r}", as_converted(holder, layout)
    if converted is not layout or layout_of(holder) is not None:
        check_has_parts(named, holder, converted)
    if converted is layout and (why := misfit(holder, layout)) is not None:
        if layout_of(holder) is None:
            return f"which {why}"
        was = f"is a {type(holder).__name__}, which does not have the layout {layout.name!r}: it {why}"
        refuse(named, was, "register a layout that fits (hk.heads.register_layout)")
    return layer_of(holder, converted, layer.index, layer.name)
