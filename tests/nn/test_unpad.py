"""`hk.nn.unpad`: padded batches as one row of real tokens, for modules of the package and of torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.nn.unpadding import Packing
from tests.support.refusals import assert_refused

B, T, E = 4, 9, 32


def batch(kind: str) -> Tensor:
    """Real tokens of a batch: a row of all, one of one, one of none, padded at the ends or anywhere; all, or none."""
    if kind in ("all", "none"):
        return torch.full((B, T), kind == "all")
    real = torch.zeros(B, T, dtype=torch.bool)
    real[0] = True
    real[1, {"left": T - 1, "right": 0, "holes": 4}[kind]] = True
    real[2, {"left": slice(5, T), "right": slice(6), "holes": slice(1, T, 2)}[kind]] = True
    return real


@pytest.mark.parametrize("kind", ["left", "right", "holes", "all", "none"])
def test_there_and_back(kind: str) -> None:
    real = batch(kind)
    x = torch.randn(B, T, 3, 2, dtype=torch.float64, requires_grad=True)
    packed, mask, pad_back = hk.nn.unpad(x, real)
    N = int(real.sum())
    assert torch.equal(packed, x[real][None])
    assert torch.equal(pad_back(packed), x * real[..., None, None])
    places = torch.arange(T)  # of a row that all share
    assert torch.equal(Packing.of(real).pack(places[None])[0], places.expand(B, T)[real])
    assert pad_back(torch.ones(1, N)).shape == (B, T)
    rows = torch.arange(B).repeat_interleave(real.sum(1))
    assert torch.equal(mask.to_dense(1, 1, N, N)[0, 0], rows[:, None] == rows)
    assert torch.autograd.gradcheck(lambda x: pad_back(hk.nn.unpad(x, real)[0].sin()), x)


def test_refusals() -> None:
    x, real = torch.ones(B, T, E), torch.ones(B, T, dtype=torch.bool)
    assert_refused(
        (([1], real), TypeError, r"x is a list; pass a tensor \[B, T, ...\]"),
        ((torch.ones(B), real), TypeError, r"x has shape \[4\]"),
        ((x, real.long()), TypeError, "real has dtype torch.int64; pass a bool"),
        ((x, real.T), r"real has shape \[9, 4\]"),
        ((x, None), TypeError, "real is a NoneType"),
        of=hk.nn.unpad,
    )
