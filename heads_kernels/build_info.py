"""What the installed package was built from and with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def build_info() -> dict[str, Any]:
    """What the build wrote down, for reports of errors and measurements; anew at every call, yours to change.

    Returns:
        `version` of the package; `commit` of its sources, or None where the build did not know.
        `cpu`: `compiler` (its own first line about itself) and `levels` (instruction sets that `_cpu` has kernels for).
        `cuda`: `nvcc` (its version) and `architectures` (that `_cuda` holds code for; "compute_80" is PTX, for parts
        without machine code); or `missing`, why there is no `_cuda`, in words.
        Empty where the package was not built but is only on the path.
    """
    path = Path(__file__).with_name("build.json")
    if not path.exists():
        return {}
    information: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return information
