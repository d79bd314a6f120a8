"""Two results of one formula, which may differ by rounding and by nothing else.

A BLAS library adds up in an order of its own, which depends on the processor, the number of threads, the shapes and how
memory is aligned. So what it computed is equal in no bits, and how far it may be off follows from the dtype.
"""

from typing import Any

import torch

#: In units of eps. The largest difference seen was 137, of a gradient whose terms cancel: four times that, a heuristic.
#: Sums of half precision are of float32, and few numbers between them are rounded.
ROUNDINGS = {torch.float64: 512, torch.float32: 512, torch.bfloat16: 4, torch.float16: 4}


def rounding(dtype: torch.dtype) -> float:
    """Of numbers up to 1."""
    return ROUNDINGS[dtype] * torch.finfo(dtype).eps


def assert_alike(found: Any, expected: Any, *, dtype: torch.dtype | None = None, name: str = "result") -> None:
    """Tensors, or dicts and sequences of them: as close as `rounding` of the largest number, or of 1.

    `dtype` is the least accurate one that a step of the arithmetic has, where the results have a better one.
    """
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert_alike(found[key], tensor, dtype=dtype, name=str(key))
        return
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_alike(one, other, dtype=dtype, name=f"{name} {number}")
        return
    tolerance = 0.0
    if expected is not None and expected.is_floating_point():
        finite = expected.detach()[expected.isfinite()].abs()
        largest = max(1.0, finite.max().item()) if finite.numel() else 1.0
        tolerance = rounding(dtype or expected.dtype) * largest
    torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance, msg=lambda text: f"{name}: {text}")
