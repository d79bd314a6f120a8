"""Few query rows on the CPU: keys longer than a part of a task, every mask and term, bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import heads_kernels as hk
from heads_kernels.testing import compare, reference
from tests.ops.test_properties import DTYPE, cases
from tests.support.alike import assert_alike

OPERATORS = ["gated_attention", "collaborative_attention"]
#: Around the ends of words of 64 keys and of parts of 256.
KEYS = st.sampled_from([1, 15, 17, 63, 65, 255, 256, 257, 300, 513, 600])
ROWS = st.integers(1, 12)  # kFewRows in csrc/cpu/decode.h is 10


@pytest.mark.parametrize("operator", OPERATORS)
@given(data=st.data(), T=ROWS, S=KEYS, dtype=DTYPE)
@settings(max_examples=25)
def test_few_rows_are_accurate(
    operator: str, data: st.DataObject, T: int, S: int, dtype: torch.dtype
) -> None:
    inputs = replace(data.draw(cases(operator)), T=T, S=S).make(dtype)
    report = compare(reference(inputs, backward=False), "cpu")
    assert report.ok, str(report)


def _call(
    operator: str, dtype: torch.dtype, B: int, tokens_first: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """With its tokens first, so many keys that a task reads several of their heads."""
    H, Hk, T, D, S = (10, 5, 3, 256, 900) if tokens_first else (6, 2, 3, 40, 700)
    generator = torch.Generator().manual_seed(1)

    def draw(*size: int) -> torch.Tensor:
        drawn = torch.randn(4, *size, generator=generator)[:B].to(dtype)
        return drawn.transpose(1, -2).contiguous().transpose(1, -2) if tokens_first else drawn

    if operator == "gated_attention":
        tensors = {"query": draw(H, T, D), "key": draw(Hk, S, D), "value": draw(Hk, S, D)}
    else:
        tensors = {"query": draw(T, 96), "key": draw(S, 96), "value": draw(H, S, D)}
        tensors["mixing"] = torch.randn(H, 96, generator=generator).to(dtype)
    lengths = torch.tensor([S, 255, 513, 1])[:B]
    return tensors, {"attn_mask": hk.Mask(key_lengths=lengths)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("operator", OPERATORS)
def test_tokens_first_are_the_call(operator: str, dtype: torch.dtype) -> None:
    """A cache whose heads are next to each other, two of them closed, against one with its heads first."""
    tensors, options = _call(operator, dtype, 4, tokens_first=True)
    options["gate"] = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 1.0, 0.0, 0.0, 2.0, 1.0]).to(dtype)
    call = getattr(hk, operator)
    alone = {name: tensor.contiguous() for name, tensor in tensors.items()}
    got = call(**tensors, **options, backend="cpu")
    assert_alike(got, call(**alone, **options, backend="cpu"))
    assert_alike(got, call(**alone, **options, backend="eager"))


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("operator", OPERATORS)
def test_hidden_numbers_reach_no_row(
    operator: str, bad: float, dtype: torch.dtype, tokens_first: bool
) -> None:
    """A key that one row sees and another does not: only the first gets its NaN, or that of its value alone."""
    tensors, _ = _call(operator, dtype, 2, tokens_first)
    T, S = 3, 900 if tokens_first else 700
    hidden = torch.rand(S, generator=torch.Generator().manual_seed(2)) < 0.3
    spoiled = (("value",), ("key", "value"))
    for row_hides, names in product(([True, True, True], [True, False, True]), spoiled):
        dense = torch.ones(T, S, dtype=torch.bool)
        dense[torch.tensor(row_hides)] = ~hidden
        poisoned = dict(tensors)
        for name in names:
            poisoned[name] = tensors[name].clone()
            poisoned[name][..., hidden, :] = bad
        call = getattr(hk, operator)
        want = call(**tensors, attn_mask=dense, backend="cpu")
        got = call(**poisoned, attn_mask=dense, backend="cpu")
        kept = torch.tensor(row_hides)
        assert torch.equal(got[:, :, kept], want[:, :, kept])
        assert not got[:, :, ~kept].isfinite().any()


def test_no_heads_whose_tokens_are_first_in_memory() -> None:
    query = torch.empty(2, 1, 4, 8)[:, :, :0].transpose(1, 2)
    key = torch.empty(2, 5, 4, 8)[:, :, :0].transpose(1, 2)
    assert hk.gated_attention(query, key, key, backend="cpu").shape == (2, 0, 1, 8)
    assert hk.gated_attention(query, key, key, return_lse=True)[1].shape == (2, 0, 1)
