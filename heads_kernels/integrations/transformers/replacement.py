"""The base class of forwards that replace those of modules of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from heads_kernels.heads.configs import NAME
from heads_kernels.heads.layouts import stock_arguments


class Replacement:
    """The forward of one module of transformers: `module.forward`, in the place of the method of its class.

    It reads the attributes of the module as its own. A subclass that repeats the stock forward defines `fused`, whose
    arguments have the names of the stock ones, but for `cache`. The others add to the stock forward.

    Attributes:
        module: the module.
        names: the arguments of the stock forward.
        cache_name: the one that is a cache; releases name it differently.
        calls_operator: whether it calls the operator and the class of the module computes attention itself.
        unread: the arguments of the stock forward that `fused` need not read.
        beside: other attributes that it gives to the module.
    """

    calls_operator = False
    fused: Callable[..., Any] | None = None
    unread: frozenset[str] = frozenset()
    beside: tuple[str, ...] = ()

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        arguments = stock_arguments(type(module))
        self.names = tuple(arguments)
        caches = (n for n, each in arguments.items() if "Cache" in str(each.annotation))
        self.cache_name = next(caches, "")

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # of an object that a pickle or a copy has not filled yet
            raise AttributeError(name)
        return getattr(self.module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if self.fused is None or self.runs_stock(given):
            return self.stock("forward", *args, **kwargs)
        if self.cache_name in given:
            given["cache"] = given.pop(self.cache_name)
        return self.fused(**given)

    def stock(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the class of the module."""
        return getattr(type(self.module), method)(self.module, *args, **kwargs)

    def runs_stock(self, given: dict[str, Any]) -> bool:
        """Whether a call with these arguments runs the stock forward: the config names another attention function."""
        return bool(self.config._attn_implementation != NAME)

    @classmethod
    def unknown_arguments(cls, stock: type[nn.Module]) -> list[str]:
        """The arguments of the forward of a class that `fused` has not."""
        if cls.fused is None:
            return []
        known = {*inspect.signature(cls.fused).parameters, *cls.unread}
        return [
            name
            for name, each in inspect.signature(stock.forward).parameters.items()
            if name not in known
            and each.kind is not inspect.Parameter.VAR_KEYWORD
            and "Cache" not in str(each.annotation)
        ]
