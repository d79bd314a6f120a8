"""All that a model is, for tests that nothing of it changed."""

from typing import Any

from torch import nn


def state(model: nn.Module) -> list[Any]:
    """Objects are compared by identity, so that an equal copy of a weight or a config is a change."""
    return [
        (name, type(module), id(module), _attributes(module), _config(module)) for name, module in model.named_modules()
    ]


def structure(model: nn.Module) -> dict[str, Any]:
    """What a copy of the model has too: its modules, the names of what they hold, their attention functions."""
    return {n: (type(m), set(vars(m)), _config(m)[0]) for n, m in model.named_modules()}


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Registries by what is in them, hooks among that; numbers and flags by value. A gate of None is none."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if isinstance(value, dict):
            found[name] = [(key, id(each)) for key, each in value.items() if each is not None]
        else:
            found[name] = value if isinstance(value, (bool, int, float, str)) else id(value)
    return found


def _config(module: Any) -> Any:
    config = getattr(module, "config", None)
    return getattr(config, "_attn_implementation", None), getattr(config, "heads_kernels", None)
