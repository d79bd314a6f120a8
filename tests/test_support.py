"""What the Triton backend says that it can not serve; refusals of the other backends are in test_bad_input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import tensors

import heads_kernels as hk
from heads_kernels import Problem
from heads_kernels.ops import support


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "TRITON_INTERPRETED", True)
    monkeypatch.setattr(support, "_TRITON", True)


def gated(**changes: Any) -> Problem:
    given = {**tensors("gated_attention", dtype=torch.float32), **changes}
    return Problem.gated(**given)


def wide(D: int, Dv: int) -> Problem:
    return gated(**tensors("gated_attention", D=D, Dv=Dv, dtype=torch.bfloat16))


REFUSED = {
    "float64": (
        lambda: gated(**tensors("gated_attention")),
        "tensors are float64; it computes in float32, use the eager backend",
    ),
    "dense mask": (
        lambda: gated(attn_mask=torch.rand(5, 7) < 0.5),
        "a dense attn_mask is no interval per row; use hk.Mask, or the eager backend",
    ),
    "stride": (
        lambda: gated(value=torch.randn(2, 2, 7, 12)[..., ::2]),
        "value has stride 2 in its last dimension; it needs 1 (.contiguous())",
    ),
    "wide query": (
        lambda: wide(257, 8),
        "query and key are 257 wide; it serves widths up to 256",
    ),
    "wide value": (lambda: wide(8, 300), "value is 300 wide; it serves widths up to 256"),
    "wide shared query": (
        lambda: Problem.collaborative(**tensors("collaborative_attention", D=1025).copy()),
        "query and key are 1025 wide; it serves widths up to 1024",
    ),
    "device": (
        lambda: gated(**{name: t.to("meta") for name, t in tensors("gated_attention").items()}),
        "tensors are on meta; it serves CUDA tensors",
    ),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", REFUSED)
def test_triton_refuses(case: str) -> None:
    make, reason = REFUSED[case]
    assert reason in support.triton(make())


@pytest.mark.usefixtures("interpreted")
def test_triton_serves() -> None:
    assert support.triton(wide(256, 256)) == []
    shared = tensors("collaborative_attention", D=1024, Dv=256, dtype=torch.float16)
    assert support.triton(Problem.collaborative(**shared)) == []
    query, key = torch.randn(2, 1, 2, 5, 256)
    assert support.triton(Problem.statistics(query, key)) == []
    assert support.triton(gated(attn_mask=hk.Mask(window=(3, 0), key_lengths=[2, 7]))) == []


def test_cpu_tensors_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "TRITON_INTERPRETED", False)
    monkeypatch.setattr(support, "_TRITON", True)
    (reason,) = support.triton(gated())
    assert reason.startswith(
        "tensors are on cpu; it serves CUDA tensors, and CPU tensors in Triton"
    )
    assert "TRITON_INTERPRET=1" in reason


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_TRITON", False)
    reason = support.triton(gated())[0]
    assert reason == "Triton is not installed (pip install 'heads_kernels[triton]')"
