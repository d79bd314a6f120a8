"""Import one module as soon as another one has been imported, by whomever and whenever that is."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(watched: str, wanted: str) -> None:
    """Import the module `wanted` once the module `watched` is there: at once, or at the end of its import.

    An error of `wanted` is a warning, for whoever imports `watched` may not need it.
    """
    if watched in sys.modules:
        _try_import(wanted)
    else:
        sys.meta_path.insert(0, _Finder(watched, wanted))


class _Finder:
    """An entry of `sys.meta_path` that is there until the module has been imported that it watches."""

    def __init__(self, watched: str, wanted: str) -> None:
        self.watched, self.wanted = watched, wanted

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.watched:
            return None
        sys.meta_path.remove(self)  # the other entries know where it is
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                _try_import(self.wanted)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _try_import(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:
        warnings.warn(f"{name} could not be imported: {error!r}", RuntimeWarning, stacklevel=2)
