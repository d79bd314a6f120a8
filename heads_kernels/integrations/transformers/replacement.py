"""The base class of what stands before classes of transformers: subclasses that change how attention runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from heads_kernels.heads.interface import NAME, stock_arguments
from heads_kernels.integrations.transformers.attention import attention_forward
from heads_kernels.ops.statistics import AttentionStatistics


class Replacement(nn.Module):
    """Methods that go before those of a stock class, in a subclass of both (`subclass`).

    A subclass that repeats the stock forward defines `fused`, whose arguments have the names of the stock ones, but for
    `cache`; the stock forward runs where the config names another attention function. The others add to stock methods,
    which they call by `stock`.
    """

    calls_operator = False  # whether it calls the operator although the stock class computes attention itself
    fused: Callable[..., Any] | None = None
    kind: type[Replacement]  # the first of the two classes that the subclass is made of
    before: Any  # the second one: the stock class
    names: tuple[str, ...]  # the arguments of the stock forward
    cache_name: str  # the one that is a cache; releases name it differently

    if TYPE_CHECKING:  # the attributes of the stock class

        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def members(cls, stock: Any) -> dict[str, Any]:
        """What the subclass of a stock class has beside these methods."""
        arguments = stock_arguments(stock)
        caches = (name for name, each in arguments.items() if "Cache" in str(each.annotation))
        names, cache_name = tuple(arguments), next(caches, "")
        return {"kind": cls, "before": stock, "names": names, "cache_name": cache_name}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.fused is None or self.config._attn_implementation != NAME:
            return self.stock("forward", *args, **kwargs)
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if self.cache_name in given:
            given["cache"] = given.pop(self.cache_name)
        return self.fused(**given)

    def stock(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(), method)(*args, **kwargs)

    def attend(self, *operands: Any, dropout: float, **options: Any) -> tuple[Tensor, AttentionStatistics | None]:
        """The attention output `[B, T, H * Dv]` of query, key, value and mask, and statistics where they are requested.

        `dropout` is the probability in training; options are those of `attention_forward`.
        """
        dropout = dropout if self.training else 0.0
        out, statistics = attention_forward(self, *operands, dropout=dropout, **options)
        return out.flatten(2), statistics

    def __reduce_ex__(self, protocol: Any) -> Any:
        found: Any = super().__reduce_ex__(2)
        return _new, (self.kind, self.before), *found[2:]

    @classmethod
    def unknown_arguments(cls, stock: type[nn.Module]) -> list[str]:
        """The arguments of the forward of a class that `fused` has not."""
        if cls.fused is None:
            return []
        known = {*inspect.signature(cls.fused).parameters, "use_cache", "output_attentions"}
        return [
            name
            for name, each in inspect.signature(stock.forward).parameters.items()
            if name not in known and each.kind is not each.VAR_KEYWORD and "Cache" not in str(each.annotation)
        ]


@cache
def subclass(kind: Any, stock: Any) -> Any:
    """The subclass of a stock class whose methods are first those of `kind`; its name and signature are the stock's."""

    @wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **kwargs)

    members = {"forward": forward, "__module__": stock.__module__, **kind.members(stock)}
    return type(stock.__name__, (kind, stock), members)


def _new(kind: Any, stock: Any) -> Any:
    """A module without attributes, which a pickle or a copy fills."""
    made = subclass(kind, stock)
    return made.__new__(made)
