"""Files as modules: any, and the scripts of examples/."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def module_at(path: Path, name: str) -> ModuleType:
    """What a file defines, imported under this name."""
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there for their annotations
    spec.loader.exec_module(module)
    return module


@contextmanager
def example(script: str) -> Iterator[ModuleType]:
    """A script, imported beside the modules of its folder; what it changes for the process is set back."""
    path = EXAMPLES / script
    threads, paths = torch.get_num_threads(), sys.path.copy()
    sys.path.insert(0, str(path.parent))
    try:
        with torch.random.fork_rng():
            yield module_at(path, f"example_{path.parent.name}")
    finally:
        torch.set_num_threads(threads)
        sys.path[:] = paths
        for name, each in list(sys.modules.items()):
            if str(EXAMPLES) in (getattr(each, "__file__", None) or ""):
                del sys.modules[name]
