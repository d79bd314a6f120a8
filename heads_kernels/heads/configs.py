"""Configs of transformers: the attention function that a module calls, and copies of configs.

Nothing here imports transformers: its configs are recognised by their attributes.
"""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any, Final

from torch import nn

#: The name of the package's attention function among those of transformers.
NAME: Final = "heads_kernels"


def attention_function(module: Any) -> str:
    """The name of the attention function that a module calls; modules without a config call the operators."""
    name: str = getattr(getattr(module, "config", None), "_attn_implementation", NAME)
    return name


def names_attention_function(value: Any) -> bool:
    """Whether this is a config that names an attention function."""
    return hasattr(value, "_attn_implementation")


def with_attention_function(config: Any, name: str) -> Any:
    """A copy of a config that names this attention function."""
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
