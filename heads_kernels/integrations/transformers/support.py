"""Which models of transformers the attention function can serve, and why not the others."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from functools import cache
from typing import Any, Final

from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from heads_kernels.checks import refuse
from heads_kernels.heads.configs import NAME
from heads_kernels.heads.layouts import calls_interface, stock_of
from heads_kernels.integrations.transformers.attention import attention_forward
from heads_kernels.integrations.transformers.classes import replacement, serves
from heads_kernels.integrations.transformers.tested import TESTED

#: Arguments that the operator does not need: packed sequences, which the mask describes too, and whether flash
#: attention sums in a fixed order.
UNUSED: Final = {
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids", "deterministic",
}  # fmt: skip
#: Arguments that the attention function refuses where they are not None, as they are in some layers.
OPTIONAL: Final = {"block_indices", "cache"}
#: Arguments that modules may pass to the attention function.
KNOWN: Final = {*inspect.signature(attention_forward).parameters, *UNUSED, *OPTIONAL}

ITSELF: Final = "computes its attention itself"
INSTEAD: Final = "use 'eager' or 'sdpa', if necessary for this part of the model alone"
_MAKE: Final = (
    "create it with 'eager' or 'sdpa' and call heads_kernels.integrations.transformers.use(model)"
)


def configs_of(module: nn.Module) -> list[Any]:
    """The configs of a module and those nested in them, in a fixed order."""
    found = [value for value in vars(module).values() if isinstance(value, PreTrainedConfig)]
    for config in found:
        inner = (getattr(config, name, None) for name in config.sub_configs)
        found += [each for each in inner if each is not None]
    return found


def computes_itself(model: nn.Module) -> bool:
    """Whether a model has attention, but none that goes through an attention function."""
    modules = list(model.modules())
    looks_like_it = any("Attention" in type(module).__name__ for module in modules)
    return looks_like_it and not any(map(calls_interface, modules))


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model that the attention function cannot serve.

    Raises:
        ValueError: the model, or a model inside it, is not supported; or it has no attention.
    """
    for name, part in model.named_modules():
        if not isinstance(part, PreTrainedModel) or serves(type(part)):
            continue
        if why := _why_not(part):
            where = f"model{'.' if name else ''}{name}"
            instead = f"it cannot be used; tested families: {', '.join(TESTED)}"
            refuse(where, f"is a {family(part)}, which {why}", instead)
    check_keywords(model)
    for name, module in model.named_modules():
        made = replacement(type(module))
        if made is not None and (unknown := made.unknown_arguments()):
            was = f"is an argument of {name!r}, a {type(module).__name__}, and is not supported"
            refuse(unknown[0], was, INSTEAD)
    if not any(calls_interface(each) or replacement(type(each)) for each in model.modules()):
        why = ITSELF if computes_itself(model) else "has no attention"
        instead = f"there is nothing to use it for; tested families: {', '.join(TESTED)}"
        refuse("model", f"is a {family(model)}, which {why}", instead)


def check_named(model: PreTrainedModel, *, is_made: bool) -> None:
    """Refuse attn_implementation="heads_kernels" for a model; models inside it are checked on their own.

    Args:
        is_made: False while the model has no modules yet.
    """
    why = _why_not(model)
    instead = _MAKE if why and serves(type(model)) else INSTEAD
    if not why and not is_made and (table := _classes_by_name(model)):
        why = f"looks up its layers by this name while it is created ({table})"
        instead = _MAKE
    if is_made and not why:
        check_keywords(model)
    if why:
        refuse("attn_implementation", f"is {NAME!r} for a {family(model)}, which {why}", instead)


def check_keywords(model: PreTrainedModel) -> None:
    """Refuse a model that calls its attention function with an argument that the package does not serve."""
    for name, module in model.named_modules():
        if calls_interface(module) and (unknown := sorted(_asked(module) - KNOWN)):
            was = f"is passed to the attention function by {name!r}, a {type(module).__name__}, and is not supported"
            refuse(unknown[0], was, INSTEAD)


def _asked(module: nn.Module) -> set[str]:
    """The names of the arguments that a module's forward passes to its attention function."""
    calls = (names for names in _keywords(module) if {"scaling", "dropout"} & set(names))
    return {name for names in calls for name in names}


def _why_not(model: PreTrainedModel) -> str | None:
    """Why the attention function cannot serve a model, from its class and what its file imports; None where it can."""
    file = vars(sys.modules[type(model).__module__])
    if _has_attention(file) and not any(isinstance(e, AttentionInterface) for e in file.values()):
        return ITSELF
    if "BlockMask" in file:
        return (
            "handles masks of flex attention itself, and would mistake the package's masks for them"
        )
    return None


def _has_attention(file: dict[str, Any]) -> bool:
    """Whether classes of attention modules are defined in a file, of these names."""
    classes = (
        each for each in file.values() if isinstance(each, type) and issubclass(each, nn.Module)
    )
    return any(
        "Attention" in each.__name__ and each.__module__ == file["__name__"] for each in classes
    )


def _classes_by_name(model: PreTrainedModel) -> str | None:
    """The name of a table of attention classes in the file of a model that lacks the package's name; or None."""
    tables = vars(sys.modules[type(model).__module__]).items()
    return next(
        (n for n, table in tables if n.endswith("ATTENTION_CLASSES") and NAME not in table), None
    )


def _keywords(module: nn.Module) -> list[tuple[str, ...]]:
    """The names of the keyword arguments of every call in a module's forward; none where it has no source."""
    return _keywords_of(inspect.unwrap(stock_of(type(module)).forward))


@cache
def _keywords_of(forward: Any) -> list[tuple[str, ...]]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except OSError:
        return []
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [tuple(each.arg for each in call.keywords if each.arg) for call in calls]


def family(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} (family {model.config.model_type!r})"
