"""The folder for the Kernel Hub, loaded by the Hub's own library beside the installed package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import heads_kernels as hk
from csrc import hub
from tests.support.alike import assert_alike

pytestmark = pytest.mark.check

ROOT = Path(hub.__file__).parents[1]


def test_a_kernel_of_the_hub_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = pytest.importorskip("kernels")  # which a development environment has
    monkeypatch.chdir(ROOT)
    hub.write(tmp_path, hk.__version__, "0123456789")
    kernel = kernels.get_local_kernel(tmp_path, backend="cpu")
    assert kernel.__name__ == "_heads_kernels_cpu_0123456"
    assert set(kernel.__all__) < set(hk.__all__)
    assert kernel.Mask is not hk.Mask

    query, key, value = torch.randn(3, 2, 4, 16, 8, requires_grad=True)
    gate = torch.tensor([1.0, 0.0, 0.5, 2.0])
    results = []
    for package in (hk, kernel):
        mask = package.Mask(key_lengths=torch.tensor([16, 9]))
        out = package.gated_attention(query, key, value, mask, gate=gate, backend="eager")
        results.append((out, *torch.autograd.grad(out.square().sum(), (query, key, value))))
    assert torch.ops._heads_kernels_cpu_0123456.attention != torch.ops.heads_kernels.attention
    assert_alike(*results)
