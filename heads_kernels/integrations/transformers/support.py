"""Which models of transformers the attention function can serve, and why not the others."""

from __future__ import annotations

import inspect
import sys
from typing import Any, Final

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from heads_kernels.errors import refuse
from heads_kernels.heads.layers import NAME
from heads_kernels.integrations.transformers.tested import TESTED

#: What models may ask of their attention function that the operator does not compute.
UNSERVED: Final = {
    "softcap": "scores under a tanh",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "indices": "keys chosen by index",
    "block_indices": "keys chosen by index",
    "cache": "a paged cache",
}

_ITSELF: Final = "computes its attention itself"


def stock_forward(module: nn.Module) -> Any:
    """The forward that transformers wrote for the module, without decorators."""
    return inspect.unwrap(getattr(type(module), "stock", type(module)).forward)


def calls_interface(module: nn.Module) -> bool:
    """Whether the module's forward asks transformers for an attention function."""
    code = getattr(stock_forward(module), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def configs_of(module: nn.Module) -> list[Any]:
    """The configs that a module holds and those in them, in an order that stays."""
    found = [value for value in vars(module).values() if isinstance(value, PreTrainedConfig)]
    for config in found:
        inner = (getattr(config, name, None) for name in config.sub_configs)
        found += [each for each in inner if each is not None]
    return found


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model unless the attention function can serve every model in it that has attention.

    Raises:
        ValueError: one of them can't be served, with the reason; or there is no attention at all.
    """
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel) and (why := _why_not(part) or _why_not_sdpa(part)):
            where = f"model{'.' if name else ''}{name}"
            instead = f"it can not be used; tested families: {', '.join(TESTED)}"
            refuse(where, f"is a {_family(part)}, which {why}", instead)
    if not any(map(calls_interface, model.modules())):
        was = f"is a {_family(model)}, which has no attention"
        refuse("model", was, "pass a model that has")


def check_named(model: PreTrainedModel, *, is_made: bool) -> None:
    """Refuse attn_implementation="heads_kernels" for a model; the models in it are asked for themselves.

    Args:
        is_made: False while the model has no modules yet.
    """
    why = _why_not(model) if is_made else _why_not_class(model) or _why_not_made(model)
    if why:
        was = f"is {NAME!r} for a {_family(model)}, which {why}"
        instead = "use 'eager' or 'sdpa', if need be for this part of a model alone"
        refuse("attn_implementation", was, instead)


def _why_not(model: PreTrainedModel) -> str | None:
    """Why the attention function can't serve a model, or None."""
    if why := _why_not_class(model):
        return why
    modules = list(model.modules())
    looks_like_it = any("Attention" in type(module).__name__ for module in modules)
    return _ITSELF if looks_like_it and not any(map(calls_interface, modules)) else None


def _why_not_class(model: PreTrainedModel) -> str | None:
    if not model._can_set_attn_implementation():
        return _ITSELF
    try:
        source = inspect.getsource(sys.modules[type(model).__module__])
    except (OSError, TypeError):
        return None
    if "BlockMask" in source:
        return "has its own way with masks of flex attention, for which those of the package pass"
    return None


def _why_not_made(model: PreTrainedModel) -> str | None:
    for name, table in vars(sys.modules[type(model).__module__]).items():
        if name.endswith("ATTENTION_CLASSES") and NAME not in table:
            return (
                f"looks its layers up by it while it is made ({name}): make it with 'eager' or 'sdpa' "
                "and call heads_kernels.integrations.transformers.use(model)"
            )
    return None


def _why_not_sdpa(model: PreTrainedModel) -> str | None:
    """Why, of a model that says that SDPA can't serve it; many say so for other reasons than their scores."""
    if model._supports_sdpa:
        return None
    handed = {
        name for module in model.modules() if calls_interface(module) for name in _keywords(module)
    }
    asked = dict.fromkeys(what for name, what in UNSERVED.items() if name in handed)
    return f"computes more than plain attention ({', '.join(asked)})" if asked else None


def _keywords(module: nn.Module) -> set[str]:
    """The names of all arguments that the forward of a module passes by name: tuples among its constants."""
    constants = stock_forward(module).__code__.co_consts
    return {str(name) for names in constants if isinstance(names, tuple) for name in names}


def _family(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} (family {model.config.model_type!r})"
