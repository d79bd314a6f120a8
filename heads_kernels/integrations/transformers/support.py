"""Which models of transformers can be served, why not the others, and the classes whose forwards are replaced."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, Final

from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from heads_kernels.checks import refuse
from heads_kernels.heads.interface import calls_interface, class_calls_interface
from heads_kernels.integrations.transformers.biased import BIASED
from heads_kernels.integrations.transformers.masks import computes_with_masks
from heads_kernels.integrations.transformers.output_gated import OUTPUT_GATED
from heads_kernels.integrations.transformers.replacement import Replacement, subclass
from heads_kernels.snapshot import set_class

#: The attribute of modules that were given the config of their model, which says how attention runs.
_GIVEN: Final = "_has_config_of_model"
_ITSELF: Final = "computes its attention itself"
#: By the name of the class.
_REPLACED: Final[dict[str, type[Replacement]]] = {**OUTPUT_GATED, **BIASED}


def replacement(kind: Any) -> type[Replacement] | None:
    """What replaces the forward of a class; None where it stays.

    A class that calls the attention function stays, where its forward has arguments that the repeated one does not
    know, or where it is replaced only because other releases compute attention themselves.
    """
    stock = _unsharded(kind)
    found = _REPLACED.get(stock.__name__)
    if found is None or not stock.__module__.startswith("transformers."):
        return None
    stays = class_calls_interface(stock) and (found.calls_operator or found.unknown_arguments(stock))
    return None if stays else found


def replace_forwards(model: PreTrainedModel) -> None:
    """Replace forwards of a model's modules; with another attention function they run the stock forward.

    A module gets a subclass of its class, which its copies, pickles and replicas have too. If somebody else replaced
    its forward, it keeps that one. Attention without a config gets that of its model.
    """
    for name, module in model.named_modules():
        kind: Any = type(module)
        found: Any = None if isinstance(module, Replacement) else replacement(kind)
        if found is not None and "forward" not in vars(module):
            stock = _unsharded(kind)
            set_class(module, _with_base(kind, stock, subclass(found, stock)))
        attends = isinstance(module, Replacement) or calls_interface(module)
        if attends and not hasattr(module, "config"):
            setattr(module, _GIVEN, True)
            module.config = inmost_model(model, name).config


def restore_forward(module: nn.Module) -> None:
    """Undo `replace_forwards` for one module."""
    if isinstance(module, Replacement):
        own: Any = vars(module).get("forward")
        if getattr(own, "__func__", None) is type(module).forward:
            del module.forward  # the method of the class, put back there by somebody who had wrapped it
        if "forward" in vars(module):
            return
        kind: Any = type(module)
        made: Any = next(base for base in kind.__mro__ if "before" in vars(base))
        set_class(module, _with_base(kind, made, made.before))
    if vars(module).pop(_GIVEN, False):
        del module.config


def _unsharded(kind: Any) -> Any:
    """The class of a module before `fully_shard`, which makes a subclass of it and of an `FSDPModule`."""
    first, *rest = kind.__bases__
    is_made = rest and any(base.__name__ == "FSDPModule" for base in first.__mro__)
    return rest[0] if is_made else kind


@cache
def _with_base(kind: Any, old: Any, new: Any) -> Any:
    """The class `new` for `old`, and for a class made of `old` the same made of `new`."""
    if kind is old:
        return new
    if not issubclass(kind, old):
        return kind
    bases = tuple(_with_base(base, old, new) for base in kind.__bases__)
    own = dict(vars(kind))
    for name in ("__dict__", "__weakref__"):  # which each class makes
        own.pop(name, None)
    return type(kind.__name__, bases, own)


# ---------------------------------------------------------------------- which models
def inmost_model(model: Any, name: str) -> Any:
    """The inmost model that contains the module of this name: `model`, or one in it."""
    path = name.split(".")
    around = (model.get_submodule(".".join(path[:end])) for end in range(len(path) - 1, 0, -1))
    return next((each for each in around if isinstance(each, PreTrainedModel)), model)


def configs_of(module: nn.Module) -> list[Any]:
    """The configs of a module and those nested in them, in a fixed order."""
    found = [value for value in vars(module).values() if isinstance(value, PreTrainedConfig)]
    for config in found:
        inner = (getattr(config, name, None) for name in config.sub_configs)
        found += [each for each in inner if each is not None]
    return found


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model that the attention function cannot serve, or that has none."""
    instead = "it cannot be used; docs/transformers.md lists the tested families"
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel) and _computes_itself(_unsharded(type(part))):
            where = f"model{'.' if name else ''}{name}"
            refuse(where, f"is a {family(part)}, which {_ITSELF}", instead)
    for name, module in model.named_modules():
        found = replacement(type(module))
        if found is not None and (unknown := found.unknown_arguments(type(module))):
            was = f"is an argument of {name!r}, a {type(module).__name__}, and is not supported"
            other = "use 'eager' or 'sdpa', if necessary for this part of the model alone"
            refuse(unknown[0], was, other)
        if (what := computes_with_masks(type(module))) is not None:
            refuse("model", f"is a {family(model)}, in which {name!r}, a {type(module).__name__}, {what}", instead)
    if not any(calls_interface(each) or replacement(type(each)) for each in model.modules()):
        has_attention = any("Attention" in type(module).__name__ for module in model.modules())
        why = _ITSELF if has_attention else "has no attention"
        refuse("model", f"is a {family(model)}, which {why}", instead)


def _computes_itself(model_class: type) -> bool:
    """Whether classes of attention modules are defined in the file of a model, by their names, and none of them
    imports the table of attention functions or is replaced."""
    file = vars(sys.modules[model_class.__module__])
    modules = [each for each in file.values() if isinstance(each, type) and issubclass(each, nn.Module)]
    has_attention = any("Attention" in each.__name__ and each.__module__ == model_class.__module__ for each in modules)
    serves = any((kind := replacement(each)) is not None and kind.calls_operator for each in modules)
    calls = any(isinstance(each, AttentionInterface) for each in file.values())
    return has_attention and not calls and not serves


def family(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} (family {model.config.model_type!r})"
