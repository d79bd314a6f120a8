"""Which models of transformers the attention function can serve, and why not the others."""

from __future__ import annotations

import inspect
import sys
from typing import Any, Final

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from heads_kernels.checks import refuse
from heads_kernels.heads.configs import NAME
from heads_kernels.heads.layouts import calls_interface
from heads_kernels.integrations.transformers.attention import UNSERVED, attention_forward
from heads_kernels.integrations.transformers.classes import replacement, serves
from heads_kernels.integrations.transformers.tested import TESTED

#: What models hand to any attention function that changes nothing in the operator: packed sequences for flash
#: attention, whose masks say the same, and how flash attention is to add up.
UNUSED: Final = {
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids", "deterministic",
}  # fmt: skip
#: What the attention function reads, or refuses where it is given.
KNOWN: Final = {*inspect.signature(attention_forward).parameters, *UNSERVED, *UNUSED}

ITSELF: Final = "computes its attention itself"
INSTEAD: Final = "use 'eager' or 'sdpa', if need be for this part of a model alone"
_MAKE: Final = (
    "make it with 'eager' or 'sdpa' and call heads_kernels.integrations.transformers.use(model)"
)


def stock_forward(module: nn.Module) -> Any:
    """The forward that transformers wrote for the module, without decorators."""
    return inspect.unwrap(getattr(type(module), "stock", type(module)).forward)


def configs_of(module: nn.Module) -> list[Any]:
    """The configs that a module holds and those in them, in an order that stays."""
    found = [value for value in vars(module).values() if isinstance(value, PreTrainedConfig)]
    for config in found:
        inner = (getattr(config, name, None) for name in config.sub_configs)
        found += [each for each in inner if each is not None]
    return found


def computes_itself(model: nn.Module) -> bool:
    """Whether no attention of a model goes through an attention function, though it has some."""
    modules = list(model.modules())
    looks_like_it = any("Attention" in type(module).__name__ for module in modules)
    return looks_like_it and not any(map(calls_interface, modules))


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model unless the attention function can serve it, and no model in it says that it can't.

    Raises:
        ValueError: the reason, and which of them it is; or there is no attention at all.
    """
    for name, part in model.named_modules():
        if not isinstance(part, PreTrainedModel) or serves(type(part)):
            continue
        if why := _why_not(part) or _why_not_sdpa(part):
            where = f"model{'.' if name else ''}{name}"
            instead = f"it can not be used; tested families: {', '.join(TESTED)}"
            refuse(where, f"is a {family(part)}, which {why}", instead)
    check_keywords(model)
    if not any(calls_interface(each) or replacement(type(each)) for each in model.modules()):
        why = ITSELF if computes_itself(model) else "has no attention"
        instead = f"there is nothing to use it for; tested families: {', '.join(TESTED)}"
        refuse("model", f"is a {family(model)}, which {why}", instead)


def check_named(model: PreTrainedModel, *, is_made: bool) -> None:
    """Refuse attn_implementation="heads_kernels" for a model; the models in it are asked for themselves.

    Args:
        is_made: False while the model has no modules yet.
    """
    why = _why_not(model)
    instead = _MAKE if why and serves(type(model)) else INSTEAD
    if not why and not is_made and (table := _classes_by_name(model)):
        why = f"looks its layers up by it while it is made ({table})"
        instead = _MAKE
    if is_made and not why:
        check_keywords(model)
    if why:
        refuse("attn_implementation", f"is {NAME!r} for a {family(model)}, which {why}", instead)


def check_keywords(model: PreTrainedModel) -> None:
    """Refuse a model that asks its attention function for something by a name that the package does not know."""
    for name, module in model.named_modules():
        if calls_interface(module) and (unknown := sorted(_asked(module) - KNOWN)):
            was = f"is handed to the attention function by {name!r}, a {type(module).__name__}, and has no meaning here"
            refuse(unknown[0], was, INSTEAD)


def _asked(module: nn.Module) -> set[str]:
    """The names of the arguments that the forward of a module calls its attention function with."""
    calls = (names for names in _constants(module) if {"scaling", "dropout"} & set(names))
    return {str(name) for names in calls for name in names}


def _why_not(model: PreTrainedModel) -> str | None:
    """Why the attention function can't serve a model, by the file of its class; or None."""
    if not model._can_set_attn_implementation():
        return ITSELF
    try:
        source = inspect.getsource(sys.modules[type(model).__module__])
    except (OSError, TypeError):
        return None
    if "BlockMask" in source:
        return "has its own way with masks of flex attention, for which those of the package pass"
    return None


def _classes_by_name(model: PreTrainedModel) -> str | None:
    """The table of attention classes by attention function that the file of the model has without the package's."""
    tables = vars(sys.modules[type(model).__module__]).items()
    return next(
        (n for n, table in tables if n.endswith("ATTENTION_CLASSES") and NAME not in table), None
    )


def _why_not_sdpa(model: PreTrainedModel) -> str | None:
    """Why, of a model that says that SDPA can't serve it; many say so for other reasons than their scores."""
    if model._supports_sdpa:
        return None
    handed = {
        name
        for module in model.modules()
        if calls_interface(module)
        for names in _constants(module)
        for name in names
    }
    asked = dict.fromkeys(what for name, what in UNSERVED.items() if name in handed)
    return f"computes more than plain attention ({', '.join(asked)})" if asked else None


def _constants(module: nn.Module) -> list[tuple[Any, ...]]:
    """The tuples among the constants of the forward of a module: names of arguments that it passes by name."""
    constants = stock_forward(module).__code__.co_consts
    return [names for names in constants if isinstance(names, tuple)]


def family(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} (family {model.config.model_type!r})"
