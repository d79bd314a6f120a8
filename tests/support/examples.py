"""The scripts of examples/ as modules."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextmanager
def example(script: str) -> Iterator[ModuleType]:
    """A script, imported beside the modules of its folder; what it changes for the process is set back."""
    path = EXAMPLES / script
    spec = importlib.util.spec_from_file_location(f"example_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    threads, paths = torch.get_num_threads(), sys.path.copy()
    sys.path.insert(0, str(path.parent))
    sys.modules[spec.name] = module  # dataclasses look there for their annotations
    try:
        with torch.random.fork_rng():
            spec.loader.exec_module(module)
            yield module
    finally:
        torch.set_num_threads(threads)
        sys.path[:] = paths
        for name, each in list(sys.modules.items()):
            if str(EXAMPLES) in (getattr(each, "__file__", None) or ""):
                del sys.modules[name]
