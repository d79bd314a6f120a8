"""Integrations with other libraries, imported on first use.

`attn_implementation="heads_kernels"` is registered once both packages are imported, in either order.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from heads_kernels.after_import import after_import

if TYPE_CHECKING:
    from heads_kernels.integrations import cpp as cpp
    from heads_kernels.integrations import distributed as distributed
    from heads_kernels.integrations import onnx as onnx
    from heads_kernels.integrations import transformers as transformers
else:

    def __getattr__(name: str) -> ModuleType:
        if name not in ("cpp", "distributed", "onnx", "transformers"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{name}")


# Every model of transformers needs this module, which `import transformers` does not load yet.
after_import("transformers.modeling_utils", lambda: importlib.import_module(f"{__name__}.transformers"))
