"""No fused kernel has a `[T, S]` matrix in memory, in neither pass; nor have statistics of rows on any backend."""

from __future__ import annotations

import pytest
import torch

from benchmarks.peak import peak_memory
from tests.ops.calls import FUSED, NAMES, call, run, tensors, with_offsets

pytestmark = pytest.mark.slow

T = 4096
MATRIX = 4 * T * T  # bytes of one head's scores in float32: 64 MiB


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(("operator", "backend"), [*FUSED, *(("attention_statistics", name) for name in NAMES)])
def test_memory_is_linear_in_length(operator: str, backend: str, offsets: bool) -> None:
    given = tensors(operator, B=1, H=2, Hk=2, T=T, S=T, D=16, Dv=16, dtype=torch.float32)
    if offsets:
        given["offset_table"] = torch.randn(2, 65)

    def both() -> object:
        if operator == "attention_statistics":
            return call(operator, backend, **with_offsets(given), received=True)
        return run(operator, backend, **given, is_causal=True)

    both()
    peak = peak_memory(both)
    # Eager has 64 rows of both heads at a time, in several steps: half of what two matrices take.
    most = MATRIX / (1 if backend == "eager" else 8)
    assert peak.extra < most, f"{peak.extra / 2**20:.1f} MiB ({peak.how})"
