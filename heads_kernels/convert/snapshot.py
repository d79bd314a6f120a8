"""A model put back as it was, whatever was begun with it."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from heads_kernels.errors import refuse


class Snapshot:
    """What the modules of a model consist of: their classes, attributes, submodules, parameters, buffers and hooks.

    Values are not copied. Whoever puts new parameters in the place of old ones can be undone; who writes into them
    can not.

    Raises:
        TypeError: `model` is no `nn.Module`.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            refuse("model", f"is a {type(model).__name__}", "pass a torch.nn.Module", TypeError)
        self._modules = [
            (module, type(module), dict(vars(module)), _registries(module))
            for module in model.modules()
        ]

    def restore(self) -> None:
        """Make the model again what it was. Registries stay the same objects, which handles of hooks refer to."""
        for module, kind, attributes, registries in self._modules:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
            for name, items in registries.items():
                registry = attributes[name]
                registry.clear()
                registry.update(items)


def _registries(module: nn.Module) -> dict[str, dict[object, object]]:
    return {
        name: dict(value)
        for name, value in vars(module).items()
        if type(value) in (dict, OrderedDict)
    }
