"""No fused kernel has a `[T, S]` matrix in memory, in neither pass."""

from __future__ import annotations

import pytest
import torch

import heads_kernels as hk
from benchmarks.peak import peak_memory
from tests.ops.calls import DIFFERENTIABLE, tensors

T = 4096
MATRIX = 4 * T * T  # bytes of one head's scores in float32: 64 MiB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator", "backend"), [row for row in DIFFERENTIABLE if row[1] != "eager"]
)
@pytest.mark.parametrize("offsets", [False, True])
def test_memory_is_linear_in_length(operator: str, backend: str, offsets: bool) -> None:
    leaves = tensors(operator, B=1, H=2, Hk=2, T=T, S=T, D=16, Dv=16, dtype=torch.float32)
    table = torch.randn(2, 65, requires_grad=True)

    def both() -> list[torch.Tensor]:
        for leaf in leaves.values():
            leaf.requires_grad_()
        bias = hk.OffsetBias(table) if offsets else None
        out = getattr(hk, operator)(**leaves, bias=bias, is_causal=True, backend=backend)
        wanted = [*leaves.values(), *([table] if offsets else [])]
        return [out.detach(), *torch.autograd.grad(out.sum(), wanted)]

    both()
    peak = peak_memory(both)
    assert peak.extra < MATRIX / 8, f"{peak.extra / 2**20:.1f} MiB ({peak.how})"
