"""The package inside other libraries; each is imported when it is asked for."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heads_kernels.integrations import transformers as transformers


def __getattr__(name: str) -> ModuleType:
    if name != "transformers":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
