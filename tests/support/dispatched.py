"""The ops that run in a block."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Ops(TorchDispatchMode):
    """`ran`: each op with its arguments, those by keyword, and what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ran.append((func, args, kwargs or {}, out))
        return out

    @property
    def names(self) -> list[str]:
        return [func._schema.name for func, *_ in self.ran]
