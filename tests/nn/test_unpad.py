"""`hk.nn.unpad`: padded batches as one row of real tokens, for modules of the package and of torch."""

import pytest
import torch

import heads_kernels as hk
from heads_kernels.nn.unpadding import Packing
from tests.support.refusals import assert_refused

B, T, E = 4, 9, 32


#: Real tokens of rows that are whole, of one, of some and of none, padded at the ends or anywhere; all, or none.
ROWS = {
    "left": ["111111111", "000000001", "000001111", "000000000"],
    "right": ["111111111", "100000000", "111111000", "000000000"],
    "holes": ["111111111", "000010000", "010101010", "000000000"],
    "all": ["111111111"] * B,
    "none": ["000000000"] * B,
}


@pytest.mark.parametrize("kind", ROWS)
def test_there_and_back(kind: str) -> None:
    real = torch.tensor([[token == "1" for token in row] for row in ROWS[kind]])
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
