"""What is known of transformers without its import: modules that call its attention functions, caches, and configs."""

from __future__ import annotations

import inspect
from copy import copy, deepcopy
from functools import cache
from typing import Any, Final

from torch import nn

#: The name of the package's attention function among those of transformers.
NAME: Final = "heads_kernels"

#: Names of arguments from which modules compute keys and values.
SOURCES: Final = (
    "key", "value", "keys", "values", "key_value_states", "encoder_hidden_states", "cross_attention_states",
)  # fmt: skip


def calls_interface(module: nn.Module) -> bool:
    """Whether a module calls transformers' attention function, or has a replaced forward that calls the operator."""
    kind: Any = type(module)
    return getattr(module, "calls_operator", False) or class_calls_interface(kind)


def stock_arguments(kind: Any) -> dict[str, inspect.Parameter]:
    """The parameters of the forward of modules of a class, without `self`."""
    return _parameters(inspect.unwrap(kind.forward))


@cache
def _parameters(forward: Any) -> dict[str, inspect.Parameter]:
    return dict(list(inspect.signature(forward).parameters.items())[1:])


@cache
def class_calls_interface(kind: Any) -> bool:
    """Whether the forward of a class refers to transformers' table of attention functions; no class says so itself."""
    forward = inspect.unwrap(getattr(kind, "forward", kind))
    if not inspect.isfunction(forward):
        return False
    found = inspect.getclosurevars(forward).globals.values()
    return any(type(each).__name__ == "AttentionInterface" for each in found)


def is_cache(value: object) -> bool:
    """Whether it is a cache of transformers. The arguments that take one have other names from release to release."""
    return hasattr(type(value), "get_seq_length")


def attention_function(module: Any) -> str:
    """The name of the attention function that a module calls; modules without a config call the operators."""
    name: str = getattr(getattr(module, "config", None), "_attn_implementation", NAME)
    return name


def names_attention_function(value: Any) -> bool:
    return hasattr(value, "_attn_implementation")


def with_attention_function(config: Any, name: str) -> Any:
    made = copy(config)
    made._attn_implementation = {"": name}  # not of the configs nested in it, which the copy shares
    return made


def own_configs(model: nn.Module) -> None:
    """Give a transformers model its own copies of its configs, which models created from one config share."""
    memo: dict[int, Any] = {}
    for part in model.modules():
        for name, value in list(vars(part).items()):
            if hasattr(type(value), "sub_configs"):  # transformers' PreTrainedConfig
                setattr(part, name, deepcopy(value, memo))
