"""The base class of replacements for stock classes of transformers."""

from __future__ import annotations

import inspect
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
        repeats: whether its forward repeats that of the stock class.
        unread: the arguments of the stock forward that a repeated one need not read.
        cache_name: the argument of the stock forward that is a cache, in derived classes; releases name it differently.
    """

    prefix = "Fused"
    stock: type[nn.Module]
    calls_operator = False
    repeats = False
    unread: frozenset[str] = frozenset()
    cache_name = ""

    @classmethod
    def unknown_arguments(cls, stock: type[nn.Module]) -> list[str]:
        """The arguments of a stock forward that are not those of the forward that repeats it."""
        if not cls.repeats:
            return []
        methods = (getattr(cls, name, None) for name in ("forward", "fused"))
        known = {name for each in methods if each for name in inspect.signature(each).parameters}
        known |= {cache_name(stock), *cls.unread}
        return [
            name
            for name, each in inspect.signature(stock.forward).parameters.items()
            if name not in known and each.kind is not inspect.Parameter.VAR_KEYWORD
        ]

    if TYPE_CHECKING:  # what the stock class has

        def __getattr__(self, name: str) -> Any: ...


def cache_name(stock: type[nn.Module]) -> str:
    """The argument of a stock forward that is a cache; "" where none is."""
    arguments = inspect.signature(stock.forward).parameters.items()
    return next((name for name, each in arguments if "Cache" in str(each.annotation)), "")
