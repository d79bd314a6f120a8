"""Where attention runs in a model: its attention layers, whatever their projections are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from heads_kernels.checks import as_int, check_heads, is_int, refuse, refuse_type
from heads_kernels.heads.interface import NAME, attention_function, calls_interface
from heads_kernels.heads.layouts import at_path, check_has_parts, layout_of
from heads_kernels.nn.gates import HeadGate
from heads_kernels.nn.multihead import Multihead

#: `{layer: heads}`, layers by index or by name.
HeadsByLayer: TypeAlias = Mapping[int, Iterable[int]] | Mapping[str, Iterable[int]]

#: Names that attention modules and their configs have for the number of heads. In a config of transformers the second
#: is another name for whichever the family has.
_COUNTS: Final = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_head", "heads")


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a model: a module that calls the operators.

    Attributes:
        index: its index among the attention layers of the model.
        name: dotted name of `module` in the model.
        kind: "encoder" (bidirectional self-attention), "decoder" (causal self-attention) or "cross". transformers'
            modules have attributes for it; others are "cross" if their name contains "cross" or is `multihead_attn`, as
            in PyTorch's decoder layers, and "decoder" if "decoder" is in their path.
        module: the `nn.Module` whose forward calls the operator; it carries `head_gate`.
        num_heads: H, the number of its remaining heads.
    """

    index: int
    name: str
    kind: str
    module: Any
    num_heads: int

    @property
    def gate(self) -> HeadGate | None:
        """The head gate of the module, or None."""
        return getattr(self.module, "head_gate", None)

    @property
    def weight(self) -> Tensor:
        """The first parameter of its module, whose device gates are made on; an empty tensor if it has none."""
        return next(self.module.parameters(), torch.empty(0))

    @property
    def runs_operators(self) -> bool:
        """Whether its module calls the operators; transformers' modules do if their config says so."""
        return attention_function(self.module) == NAME

    def __str__(self) -> str:
        return f"layer {self.index} ({self.name!r})"


# ---------------------------------------------------------------------- the layers of a model
def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """The attention layers of a model, in the order of `model.named_modules()`; a shared module counts once.

    They are the modules of `hk.nn`, those that call transformers' attention function, and those of the classes that
    `register_layout` was given. Where their heads are in the weights is another question, which `projected_layers`
    answers.

    Raises:
        ValueError: the model has no attention layer (the message names what looks like attention), a class has a
            registered name but not its parts, or a module does not say how many heads it has.
    """
    if not isinstance(model, nn.Module):
        refuse_type("model", model, "pass a torch.nn.Module")
    layers = find_layers(model)
    if not layers:
        kinds = {type(each).__name__ for each in model.modules()}
        seen = "; ".join(sorted(kind for kind in kinds if "Attention" in kind))
        instead = "known are those of hk.nn, and of transformers after use(model); "
        instead += "hk.heads.register_layout adds your own classes"
        if any(isinstance(part, nn.MultiheadAttention) for part in model.modules()):
            instead = "call hk.nn.replace_attention_(model) first"
        refuse("model", f"has no attention layer that is known, but {seen or 'others'}", instead)
    return layers


def find_layers(model: nn.Module) -> list[AttentionLayer]:
    """As `attention_layers`, but returns an empty list if there is none."""
    found: list[AttentionLayer] = []
    for name, holder in model.named_modules():
        module: nn.Module = holder
        if calls_operators(holder):
            H = _num_heads(name, holder)
        elif (layout := layout_of(holder)) is not None:
            module = at_path(holder, layout.inner)
            if calls_operators(module):
                continue  # found by itself
            check_has_parts(f"module {name!r}", holder, layout)
            name = ".".join(part for part in (name, layout.inner) if part)
            H = layout.heads(holder)
        else:
            continue
        found.append(AttentionLayer(len(found), name, kind_of(module, name), module, H))
    return found


def calls_operators(module: nn.Module) -> bool:
    """Whether a module is one of `hk.nn`, or calls transformers' attention function: it then reads its gate."""
    return isinstance(module, Multihead) or calls_interface(module)


def _num_heads(name: str, module: Any) -> int:
    """The number of heads that are left in a module, which it or its config says."""
    if (kept := getattr(module, "kept_heads", None)) is not None:
        return len(kept)
    places = (module, getattr(module, "config", None))
    counts = (getattr(place, count, None) for place in places for count in _COUNTS)
    found: int | None = next((count for count in counts if is_int(count)), None)
    if found is None:
        was = f"is a {type(module).__name__} that does not say how many heads it has"
        refuse(f"module {name!r}", was, "set its attribute num_heads")
    return found


def kind_of(module: Any, name: str) -> str:
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


def gates_of(layer: AttentionLayer) -> Tensor:
    """The gates of a layer at inference, `[H]`; ones without a gate."""
    if layer.gate is not None:
        return layer.gate.export()
    dtype = torch.float64 if layer.weight.dtype == torch.float64 else torch.float32
    return torch.ones(layer.num_heads, dtype=dtype, device=layer.weight.device)


# ---------------------------------------------------------------------- layers and heads that are asked for
def choose_layers(there: list[AttentionLayer], layers: Iterable[int | str] | None) -> list[AttentionLayer]:
    """The layers of these indices or names, in the given order; all for None."""
    if layers is None:
        return there
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        refuse("layers", f"is {layers!r}", f"pass a list of layers: [{layers!r}]", TypeError)
    chosen: list[AttentionLayer] = []
    for key in layers:
        layer = find_layer(there, key, "layers")
        if layer in chosen:
            refuse("layers", f"names layer {layer.name!r} twice", "name it once")
        chosen.append(layer)
    if not chosen:
        refuse("layers", "is empty", "name at least one layer")
    return chosen


def heads_of_layers(layers: list[AttentionLayer], heads: HeadsByLayer) -> list[tuple[AttentionLayer, list[int]]]:
    """Resolve `{layer: heads}` to layers and sorted lists of heads; refuses those that do not exist."""
    if not isinstance(heads, Mapping):
        refuse_type("heads", heads, "pass {layer: heads}, layers by index or name")
    asked: dict[int, set[int]] = {}
    for key, chosen in heads.items():
        layer = find_layer(layers, key, "heads")
        count, argument = layer.num_heads, f"heads of {layer}"
        there = f"it has heads 0 to {count - 1}, {count} in all" if count else "it has no head left"
        is_number = getattr(chosen, "ndim", 1) == 0  # an array or a tensor
        if not isinstance(chosen, Iterable) or isinstance(chosen, str) or is_number:
            refuse(argument, f"is {chosen!r}", f"pass a list of heads; {there}", TypeError)
        asked.setdefault(layer.index, set()).update(check_heads(chosen, count, argument, there))
    return [(layers[index], sorted(asked[index])) for index in sorted(asked)]


def find_layer(layers: list[AttentionLayer], key: int | str, argument: str) -> AttentionLayer:
    number = key if isinstance(key, str) else as_int(key)
    found = next((layer for layer in layers if number in (layer.index, layer.name)), None)
    if found is None:
        names = ", ".join(repr(layer.name) for layer in layers)
        refuse(argument, f"names layer {key!r}", f"this model has layers 0 to {len(layers) - 1}: {names}")
    return found
