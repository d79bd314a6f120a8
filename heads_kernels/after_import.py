"""Register something with another library once that library is imported.

This keeps `import heads_kernels` fast: importing these libraries takes longer than the package itself (PyTorch's FLOP
counter imports Triton).
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

#: What is to be called after the import of a module, by its name.
_WAITING: Final[dict[str, list[Callable[[], object]]]] = {}


def after_import(module: str, register: Callable[[], object]) -> None:
    """Call `register` at the end of the import of `module`, or now if it is already imported.

    An error of `register` becomes a warning, since code that imports `module` may not need this package.
    """
    if module in sys.modules:
        _try(register, module)
    else:
        _WAITING.setdefault(module, []).append(register)


class _Finder:
    """Finds the modules in `_WAITING` through the other finders, and adds a step after their import."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _WAITING:
            return None
        waiting = _WAITING.pop(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            _WAITING[name] = waiting
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for register in _WAITING.pop(name, ()):
                    _try(register, name)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# Python has no other hook for a module that is imported later.
sys.meta_path.insert(0, _Finder)


def _try(register: Callable[[], object], module: str) -> None:
    try:
        register()
    except Exception as error:
        warnings.warn(
            f"heads_kernels was not registered with {module}: {error!r}",
            RuntimeWarning,
            stacklevel=2,
        )
