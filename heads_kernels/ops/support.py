"""What each backend can serve: for a `Problem`, the list of reasons against it (empty: it can).

torch only, so that the choice of a backend traces under `torch.compile`; the backends themselves are not imported.
"""

from __future__ import annotations

from importlib.util import find_spec

from heads_kernels.problem import Problem

_CPU_EXTENSION = find_spec("heads_kernels._cpu") is not None


def eager(problem: Problem) -> list[str]:
    """The formula in plain PyTorch serves every valid problem."""
    return []


def cpu(problem: Problem) -> list[str]:
    """The C++ kernels read tensors in CPU memory, rows contiguous, masks as intervals."""
    reasons = []
    if not _CPU_EXTENSION:
        reasons.append(
            "the extension heads_kernels._cpu is not built (install the package with a C++ compiler)"
        )
    if problem.query.device.type != "cpu":
        reasons.append(f"tensors are on {problem.query.device}; it serves CPU tensors")
    if problem.intervals.dense is not None:
        reasons.append(
            "a dense attn_mask is no interval per row; use hk.Mask, or the eager backend"
        )
    for name in ("query", "key", "value"):
        tensor = getattr(problem, name)
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            reasons.append(
                f"{name} has stride {tensor.stride(-1)} in its last dimension; it needs 1 (.contiguous())"
            )
    return reasons
