"""The emulated CUDA kernels in the folder HK_EMULATED, where that is set, in place of the package's own.

They are loaded when this module is imported, which has to be before the package: it looks for them once.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

if folder := os.environ.get("HK_EMULATED"):
    name = "heads_kernels._cuda_emulated"
    (found,) = Path(folder).glob("_cuda_emulated.*.so")
    spec = importlib.util.spec_from_file_location(name, found)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
