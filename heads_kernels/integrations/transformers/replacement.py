"""The base class of replacements for stock classes of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from heads_kernels.heads.configs import NAME
from heads_kernels.heads.layouts import stock_arguments


class Replacing(type):
    """Makes stock modules instances of the class that replaces theirs: transformers' patched output recorders use that
    class for both."""

    def __instancecheck__(cls, instance: object) -> bool:
        stock = cls.__dict__.get("stock")
        return super().__instancecheck__(instance) if stock is None else isinstance(instance, stock)


class Replacement(nn.Module, metaclass=Replacing):
    """A replaced forward. `classes.replacement` derives a class from it and, as second base, the stock class.

    A subclass that repeats the stock forward defines `fused`, whose arguments have the names of the stock ones, but for
    `cache`. The others add to the stock forward.

    Attributes:
        prefix: prefix of the names of derived classes, before the name of the stock class.
        stock: the stock class, in derived classes.
        calls_operator: whether it calls the operator and its stock class computes attention itself.
        unread: the arguments of the stock forward that `fused` need not read.
        names: the arguments of the stock forward, in derived classes.
        cache_name: the one that is a cache; releases name it differently.
    """

    prefix = "Fused"
    stock: type[nn.Module]
    calls_operator = False
    fused: Callable[..., Any] | None = None
    unread: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()
    cache_name = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "stock" in vars(cls):
            arguments = stock_arguments(cls)
            cls.names = tuple(arguments)
            caches = (n for n, each in arguments.items() if "Cache" in str(each.annotation))
            cls.cache_name = next(caches, "")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if self.fused is None or self.runs_stock(given):
            return super().forward(*args, **kwargs)
        if self.cache_name in given:
            given["cache"] = given.pop(self.cache_name)
        return self.fused(**given)

    def runs_stock(self, given: dict[str, Any]) -> bool:
        """Whether a call with these arguments runs the stock forward: the config names another attention function."""
        return bool(self.config._attn_implementation != NAME)

    @classmethod
    def unknown_arguments(cls) -> list[str]:
        """The arguments of the stock forward that `fused` has not, in derived classes."""
        if cls.fused is None:
            return []
        known = {*inspect.signature(cls.fused).parameters, cls.cache_name, *cls.unread}
        return [
            name
            for name, each in inspect.signature(cls.stock.forward).parameters.items()
            if name not in known and each.kind is not inspect.Parameter.VAR_KEYWORD
        ]

    if TYPE_CHECKING:  # what the stock class has

        def __getattr__(self, name: str) -> Any: ...
