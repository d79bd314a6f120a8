"""A transformers model put on the operators with one line, and taken off again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from torch import nn
from transformers import PreTrainedModel

from heads_kernels.errors import refuse
from heads_kernels.integrations.transformers.attention import NAME, PLACE, HeadMaskPlace
from heads_kernels.integrations.transformers.families import FAMILIES
from heads_kernels.integrations.transformers.output_gated import fused_class
from heads_kernels.integrations.transformers.shared_layers import rowwise_class

Model = TypeVar("Model", bound=nn.Module)

#: Names of submodules that look at an encoder from a decoder.
_CROSS: Final = {
    "crossattention",
    "cross_attn",
    "cross_attention",
    "encoder_attn",
    "EncDecAttention",
}
_BEFORE: Final = "_heads_kernels_before"


@dataclass(frozen=True)
class _Before:
    """What a model was before `use`."""

    implementations: tuple[tuple[Any, str | None], ...]  # of every config
    classes: tuple[tuple[nn.Module, type[nn.Module]], ...]  # of the modules that got another one
    placed: tuple[nn.Module, ...]  # modules that know their head mask since


def use(model: Model) -> Model:
    """Run the attention of a transformers model on `hk.gated_attention`, in place; `release` takes it back.

    All sub-configs get `attn_implementation="heads_kernels"`. Layers that gate their output run gate and attention as
    one op (`FAMILIES`). Every attention layer learns which row of `head_mask=` (and of `decoder_head_mask=` and
    `cross_attn_head_mask=`) is its own, so that `model(..., head_mask=...)` works again: `[H]`, or `[L, H]` with a row
    for each layer of the stack, 0 where a head is closed.

    Args:
        model: a `PreTrainedModel`, in train or eval mode.

    Returns:
        The model itself.

    Raises:
        TypeError: it is no `PreTrainedModel`.
        ValueError: it is in use already, or transformers does not let other functions compute its attention.
    """
    if not isinstance(model, PreTrainedModel):
        was, instead = f"is a {type(model).__name__}", "pass a transformers PreTrainedModel"
        refuse("model", was, f"{instead}; tested families: {', '.join(FAMILIES)}", TypeError)
    if _BEFORE in vars(model):
        refuse("model", f"({type(model).__name__}) is in use already", "call release(model) first")
    _check_supported(model)
    places = dict(_places(model))
    classes = []
    implementations = tuple((c, c._attn_implementation_internal) for c in _configs(model))
    model.set_attn_implementation(NAME)
    for module, place in places.items():
        setattr(module, PLACE, place)
    for module in model.modules():
        stock: Any = type(module)
        replacement = fused_class(stock) or rowwise_class(stock)
        if replacement is not None:
            classes.append((module, stock))
            module.__class__ = replacement
    setattr(model, _BEFORE, _Before(implementations, tuple(classes), tuple(places)))
    return model


def release(model: Model) -> Model:
    """Take back everything that `use` did to a model, which is stock then.

    Raises:
        ValueError: the model is not in use.
    """
    before: _Before | None = vars(model).get(_BEFORE)
    if before is None:
        refuse("model", f"({type(model).__name__}) is not in use", "call use(model) first")
    for config, implementation in before.implementations:
        config._attn_implementation_internal = implementation
    for module, stock in before.classes:
        module.__class__ = stock
    for module in before.placed:
        delattr(module, PLACE)
    delattr(model, _BEFORE)
    return model


def _check_supported(model: PreTrainedModel) -> None:
    """Every submodel with attention of its own lets attention functions compute it, and says that SDPA would do."""
    for name, part in model.named_modules():
        if not isinstance(part, PreTrainedModel):
            continue
        if not part._can_set_attn_implementation():
            why = "computes its attention itself"
        elif not part._supports_sdpa and any(map(_calls_interface, part.modules())):
            why = "computes more than plain attention (softcap, sinks, relative positions)"
        else:
            continue
        where = f"model{'.' if name else ''}{name}"
        was = f"is a {type(part).__name__} (family {part.config.model_type!r}), which {why}"
        refuse(where, was, f"it can not be used; tested families: {', '.join(FAMILIES)}")


def _configs(model: PreTrainedModel) -> list[Any]:
    """The configs of the model and of all its parts, each once."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [p.config for p in model.modules() if isinstance(p, PreTrainedModel)]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def _calls_interface(module: nn.Module) -> bool:
    """Whether its forward asks transformers for an attention function."""
    forward = inspect.unwrap(getattr(type(module), "stock", type(module)).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _places(model: PreTrainedModel) -> Iterator[tuple[nn.Module, HeadMaskPlace]]:
    """Every attention layer with its head mask: the row is the first number of its name."""
    for name, module in model.named_modules():
        if not _calls_interface(module):
            continue
        parts = name.split(".")
        argument = "head_mask"
        if _CROSS & set(parts):
            argument = "cross_attn_head_mask"
        elif "decoder" in parts and model.config.is_encoder_decoder:
            argument = "decoder_head_mask"
        shared = "albert_layer_groups" in parts
        number = next((int(part) for part in parts if part.isdigit()), 0)
        yield module, HeadMaskPlace(argument, None if shared else number)
