"""What stands before a stock class of transformers and runs in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn


class Replacing(type):
    """Stock modules are instances of the class that replaces theirs too: transformers' recorders of outputs, once they
    are patched, name that class for both."""

    def __instancecheck__(cls, instance: object) -> bool:
        stock = cls.__dict__.get("stock")
        return super().__instancecheck__(instance) if stock is None else isinstance(instance, stock)


class Replacement(nn.Module, metaclass=Replacing):
    """A forward of the package's. A class made of it (`classes.replacement`) has it before its stock class as a base.

    Attributes:
        prefix: what its classes are called, before the name of the stock class.
        stock: the stock class, in classes that are made of it.
        calls_operator: whether it calls the operator where its stock class computes attention itself.
    """

    prefix = "Fused"
    stock: type[nn.Module]
    calls_operator = False

    if TYPE_CHECKING:  # what the stock class has

        def __getattr__(self, name: str) -> Any: ...
