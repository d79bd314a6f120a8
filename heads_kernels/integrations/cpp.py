"""The operators in C++ programs, which have no Python."""

from __future__ import annotations

from pathlib import Path

from heads_kernels.build_info import build_info


def library_path() -> Path:
    """The library that registers the operators with PyTorch in a program without Python: `libheads_kernels.so`.

    It defines the ops that `torch.export` writes into programs, with their kernels for the CPU and no gradients, and
    needs nothing besides PyTorch. A C++ program links it or opens it with `dlopen` before it loads a model; Python
    without this package loads it with `torch.ops.load_library`. Where this package is imported already, the ops are
    there and loading it adds nothing. One file serves every supported PyTorch.

    Raises:
        FileNotFoundError: the package has no kernels for the CPU.
    """
    path = Path(__file__).parents[1] / "libheads_kernels.so"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not there: {build_info().get('cpu', {}).get('missing', 'nothing was built')}; "
            "install the package with a C++ compiler, on Linux"
        )
    return path
