"""Register something with another library once that library is imported.

So `import heads_kernels` loads only the operators. Importing these libraries would take longer than the whole package:
PyTorch's FLOP counter imports Triton.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(module: str, register: Callable[[], object]) -> None:
    """Call `register` at the end of the import of `module`, or now if it is already imported.

    An error of `register` becomes a warning, since code that imports `module` may not need this package.
    """
    if module in sys.modules:
        _try(register, module)
    else:
        sys.meta_path.insert(0, _Finder(module, register))


class _Finder:
    """An entry of `sys.meta_path` that stays until the module it waits for has been imported."""

    def __init__(self, module: str, register: Callable[[], object]) -> None:
        self.module, self.register = module, register

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)  # the other finders locate it
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                _try(self.register, self.module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _try(register: Callable[[], object], module: str) -> None:
    try:
        register()
    except Exception as error:
        warnings.warn(
            f"heads_kernels was not registered with {module}: {error!r}",
            RuntimeWarning,
            stacklevel=2,
        )
