"""Where the heads of a model are: its attention layers, and the rows and columns of each head in their weights."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from heads_kernels.checks import refuse
from heads_kernels.heads.configs import NAME, attention_function
from heads_kernels.heads.layouts import (
    LAYOUTS,
    HeadLayout,
    at_path,
    form_of,
    is_projection,
    layout_of,
)
from heads_kernels.nn.gates import HeadGate
from heads_kernels.nn.shared import FusedProjection

#: `{layer: heads}`, layers by index or by name.
HeadsByLayer: TypeAlias = Mapping[int, Iterable[int]] | Mapping[str, Iterable[int]]


@dataclass(frozen=True)
class Projection:
    """The features of a projection by head: head `h` has features `[start + h * width, start + (h + 1) * width)`.

    They are output features of `linear` (rows of the weight of an `nn.Linear`, columns of transformers' `Conv1D`), or,
    in the output projection, input features.

    Attributes:
        linear: an `nn.Linear`, or transformers' `Conv1D`, whose weight is transposed.
        heads: number of heads in it: H, Hk, or 1 if all heads share it.
        width: features per head. If logits of an output gate follow the query of each head, the query is the first
            `head_dim` features.
        start: the first feature of head 0; nonzero only in a fused projection.
    """

    linear: Any
    heads: int
    width: int
    start: int = 0

    @property
    def inputs(self) -> int:
        """Input features of `linear`."""
        return _size(self.linear, 0)

    @property
    def outputs(self) -> int:
        """Output features of `linear`."""
        return _size(self.linear, 1)

    def features(self, heads: Iterable[int]) -> Tensor:
        """The features of these heads, int64 on the device of the weight, head after head."""
        first = torch.tensor([self.start + h * self.width for h in heads], dtype=torch.int64)
        features = (first[:, None] + torch.arange(self.width)).flatten()
        return features.to(self.linear.weight.device)


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a model, with uniform names for its parts.

    Attributes:
        index: its index among the attention layers of the model.
        name: dotted name of `module` in the model.
        kind: "encoder" (bidirectional self-attention), "decoder" (causal self-attention) or "cross". transformers'
            modules have attributes for it; others are "cross" if their name contains "cross" or is `multihead_attn`, as
            in PyTorch's decoder layers, and "decoder" if "decoder" is in their path.
        module: the `nn.Module` whose forward calls the operator; it carries `head_gate`.
        query, key, value, output: its projections; the heads of `output` are in its input features.
        num_heads, num_key_heads: H and Hk; Hk is 1 if `shared`, and `value.heads` the number of value heads.
        head_dim, value_dim: D (Ds if `shared`) and Dv.
        layout: its `HeadLayout`; that of a converted layer describes it after conversion.
        scale: the factor of its scores; None if the layout's path does not exist.
        beside: other projections with rows for every query head: output gates, content biases.
    """

    index: int
    name: str
    kind: str
    module: Any
    query: Projection
    key: Projection
    value: Projection
    output: Projection
    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int
    layout: HeadLayout
    scale: float | None
    beside: tuple[Projection, ...] = ()

    @property
    def gate(self) -> HeadGate | None:
        """The head gate of the module, or None."""
        return getattr(self.module, "head_gate", None)

    @property
    def runs_operators(self) -> bool:
        """Whether its module calls the operators; transformers' modules do if their config says so."""
        return attention_function(self.module) == NAME

    def __str__(self) -> str:
        return f"layer {self.index} ({self.name!r})"


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
        return f"{name}, which {_misfit(module, form)}"
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
        converted = _as_converted(module, layout)
        if converted is not layout:
            _check_has_parts(f"module {name!r}", module, converted)
        else:
            _check_fits(f"module {name!r}", module, layout)
        return converted
    form = form_of(module)
    return form if form is not None and _misfit(module, form) is None else None


def _check_fits(name: str, module: nn.Module, layout: HeadLayout) -> None:
    _check_has_parts(name, module, layout)
    if (why := _misfit(module, layout)) is not None:
        was = f"is a {type(module).__name__}, which does not have the layout {layout.name!r}: it {why}"
        refuse(name, was, "register a layout that fits (hk.heads.register_layout)")


def _misfit(module: nn.Module, layout: HeadLayout) -> str | None:
    from heads_kernels.heads.layout_check import misfit  # it prunes copies of layers

    return misfit(module, layout)


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


# ---------------------------------------------------------------------- one layer from its layout
def layer_of(index: int, name: str, holder: nn.Module, layout: HeadLayout) -> AttentionLayer:
    """The layer of this index and name, whose parts are where `layout` says."""
    module = at_path(holder, layout.inner) if layout.inner else holder
    D = at_path(holder, layout.head_dim)
    Dv = at_path(holder, layout.value_dim) if layout.value_dim else D
    output = at_path(holder, layout.output)
    H = _size(output, 0) // Dv
    query, key, value = _roles(holder, layout, H, (D, Dv))
    beside = (at_path(holder, path) for path in layout.beside)
    name = ".".join(part for part in (name, layout.inner) if part)
    return AttentionLayer(
        index=index,
        name=name,
        kind=_kind(module, name),
        module=module,
        query=query,
        key=key,
        value=value,
        output=Projection(output, H, Dv),
        num_heads=H,
        num_key_heads=key.heads,
        head_dim=D,
        value_dim=Dv,
        layout=layout,
        scale=at_path(holder, layout.scale) if layout.scale else D**-0.5,
        beside=tuple(
            Projection(linear, H, _size(linear) // max(H, 1)) for linear in beside if linear
        ),
    )


def _as_converted(holder: nn.Module, layout: HeadLayout) -> HeadLayout:
    """The layout of a module that was converted within its class, which then has `mixing`."""
    inner = at_path(holder, layout.inner) if layout.inner else holder
    if layout.shared or getattr(inner, "mixing", None) is None:
        return layout
    paths: dict[str, Any] = {}
    for role in ("query", "key", "value"):
        path = existing(holder, getattr(layout, role))
        fused = isinstance(at_path(holder, path), FusedProjection)
        paths[role] = f"{path}.{role}" if fused else path
    return replace(
        layout,
        **paths,
        head_dim=f"{paths['query']}.shared_dim",
        value_dim=layout.value_dim or layout.head_dim,
        beside=(*layout.beside, f"{paths['key']}.content"),
        rows=(*layout.rows, "mixing"),
        shared=True,
    )


def _check_has_parts(name: str, holder: nn.Module, layout: HeadLayout) -> None:
    """Classes are found by name: refuse one that is another class of that name."""
    instead = "register another class name for it (hk.heads.register_layout), or rename the class"
    for path in (*layout.projections, layout.head_dim, layout.value_dim):
        found = at_path(holder, path) if path else 0
        if found is None:
            was = f"is a {type(holder).__name__} without {path!r}, where {layout.name} has it"
            refuse(name, was, instead)
        if path in layout.projections and not is_projection(found):
            was = f"is projected by a {type(found).__name__} at {path!r}, which has no in_features"
            refuse(name, was, "call this before the projection is wrapped")


def _roles(
    holder: nn.Module, layout: HeadLayout, H: int, widths: tuple[int, int]
) -> tuple[Projection, Projection, Projection]:
    """Query, key and value: head by head in projections of their own or fused in this order, or shared by all heads."""
    D, Dv = widths
    paths = [existing(holder, path) for path in (layout.query, layout.key, layout.value)]
    query, key, value = (at_path(holder, path) for path in paths)
    if layout.shared:
        return (
            Projection(query, 1, D),
            Projection(key, 1, D),
            Projection(value, _size(value) // Dv, Dv),
        )
    has_query, has_value = paths[0] == paths[1], paths[1] == paths[2]
    start = H * D if has_query else 0
    key_features = (_size(key) - start) // (2 if has_value else 1)
    Hk = key_features // D
    return (
        Projection(query, H, D if has_query or H == 0 else _size(query) // H),
        Projection(key, Hk, D, start),
        Projection(value, Hk, Dv, start + key_features if has_value else 0),
    )


def _kind(module: Any, name: str) -> str:
    """The kind by attributes of transformers' modules, for others by their names in the model."""
    last = name.rpartition(".")[2].lower()
    if hasattr(module, "is_causal"):
        is_causal = module.is_causal
        says = (getattr(module, word, False) for word in ("is_cross_attention", "is_decoder"))
        is_cross = any(says) or "Cross" in type(module).__name__
    else:
        is_cross = "cross" in last or last == "multihead_attn"
        is_causal = not is_cross and "decoder" in name.lower()
    return "decoder" if is_causal else "cross" if is_cross else "encoder"


#: Names of the input and of the output size, of `nn.Linear` and of `Conv1D`. A packed weight has another shape.
_SIZES: Final = (("in_features", "nx"), ("out_features", "nf"))


def _size(linear: Any, of: int = 1) -> int:
    """Input features (`of` = 0) or output features (1)."""
    features: int = next(getattr(linear, size) for size in _SIZES[of] if hasattr(linear, size))
    return features


def is_transposed(linear: Any) -> bool:
    """True for transformers' `Conv1D`, whose weight is `[in, out]`."""
    return type(linear).__name__ == "Conv1D"


def existing(holder: Any, path: str) -> str:
    """Of alternatives `first|second` the first that exists."""
    return next(one for one in path.split("|") if at_path(holder, one) is not None)
