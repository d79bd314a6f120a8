"""The operators in C++ programs, which have no Python."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

#: The first version of PyTorch whose stable ABI has strings, which the ops take.
_OLDEST: Final = (2, 10)


def library_path() -> Path:
    """The library that registers the operators with PyTorch in a program without Python: `libheads_kernels.so`.

    It defines the ops that `torch.export` writes into programs, with their kernels for the CPU and no gradients, and
    needs nothing besides PyTorch. A C++ program links it or opens it with `dlopen` before it loads a model; Python
    without this package loads it with `torch.ops.load_library`. Where this package is imported already, the ops are
    there and loading it adds nothing. One file serves every PyTorch from 2.10 on.

    Raises:
        RuntimeError: PyTorch is older than 2.10.
        FileNotFoundError: the package was not built.
    """
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if version < _OLDEST:
        raise RuntimeError(
            f"PyTorch is {torch.__version__}; libheads_kernels.so needs 2.10 or newer, whose stable ABI it uses."
        )
    path = Path(__file__).parents[1] / "libheads_kernels.so"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there: build the package (python setup.py build_ext --inplace in a checkout)."
        )
    return path
