"""The base class of replacements for stock classes of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn


class Replacing(type):
    """Makes stock modules instances of the class that replaces theirs: transformers' patched output recorders use that
    class for both."""

    def __instancecheck__(cls, instance: object) -> bool:
        stock = cls.__dict__.get("stock")
        return super().__instancecheck__(instance) if stock is None else isinstance(instance, stock)


class Replacement(nn.Module, metaclass=Replacing):
    """A replaced forward. `classes.replacement` derives a class from it and, as second base, the stock class.

    Attributes:
        prefix: prefix of the names of derived classes, before the name of the stock class.
        stock: the stock class, in derived classes.
        calls_operator: whether it calls the operator and its stock class computes attention itself.
    """

    prefix = "Fused"
    stock: type[nn.Module]
    calls_operator = False

    if TYPE_CHECKING:  # what the stock class has

        def __getattr__(self, name: str) -> Any: ...
