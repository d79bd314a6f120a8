"""How the installed package was built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

#: Name of the package and namespace of its ops; the Kernel Hub loads a copy under another.
PACKAGE: Final = __name__.partition(".")[0]


def build_info() -> dict[str, Any]:
    """How the package was built, for error reports and measurements.

    Returns:
        A new dict, empty if the package was not built but is only on the path:
        `version` of the package; `commit` of its sources, or None if unknown.
        `cpu`: `compiler` (the first line of its version) and `levels` (ISA levels of the CPU kernels); or `missing`,
        the reason why there are none.
        `cuda`: `nvcc` (its version) and `architectures` of the CUDA kernels ("compute_80" is PTX, for architectures
        without machine code); or `missing`, the reason why there are none.
    """
    path = Path(__file__).with_name("build.json")
    if not path.exists():
        return {}
    information: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return information
