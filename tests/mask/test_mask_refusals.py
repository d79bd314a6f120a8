"""Arguments of `Mask` that do not fit raise before anything runs, with the argument's name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from heads_kernels.mask import Mask
from tests.mask.masks import all_real, from_tensor, in_a_call, longs

REFUSALS: list[tuple[Callable[[], object], type[Exception], tuple[str, ...]]] = [
    # what an argument is
    (lambda: Mask(causal="left"), ValueError, ("causal is 'left'", "lower_right")),  # type: ignore[arg-type]
    (lambda: Mask(causal=1), ValueError, ("causal is 1",)),  # type: ignore[arg-type]
    (lambda: Mask(window=(1, 2, 3)), ValueError, ("window is (1, 2, 3)", "(left, right)")),  # type: ignore[arg-type]
    (lambda: Mask(window=4), ValueError, ("window is 4", "(left, right)")),  # type: ignore[arg-type]
    (lambda: Mask(window=(1, -2)), ValueError, ("window is (1, -2)", "-1 = unlimited")),
    (lambda: Mask(window=(1.0, 0)), TypeError, ("window is (1.0, 0)",)),  # type: ignore[arg-type]
    (lambda: Mask(window=(True, 0)), TypeError, ("window is (True, 0)",)),
    (lambda: Mask(prefix_lengths=[1]), ValueError, ("prefix_lengths", "pass causal=True")),
    (
        lambda: Mask(key_lengths=torch.ones(2)),
        TypeError,
        ("key_lengths has dtype torch.float32", "integer tensor [B]"),
    ),
    (lambda: Mask(key_lengths=all_real(2)), TypeError, ("key_lengths has dtype torch.bool",)),
    (lambda: Mask(key_lengths=3), TypeError, ("key_lengths is a int", "list of B ints")),  # type: ignore[arg-type]
    (lambda: Mask(query_lengths=[1.5]), TypeError, ("query_lengths is [1.5]",)),  # type: ignore[list-item]
    (lambda: Mask(query_lengths=longs(1)[None]), ValueError, ("query_lengths has shape [1, 1]",)),
    (
        lambda: Mask(key_mask=longs(1, 0)[None]),
        TypeError,
        ("key_mask has dtype torch.int64", "bool tensor [B, S], True = real key"),
    ),
    (lambda: Mask(key_mask=all_real(5)), ValueError, ("key_mask has shape [5]", "[B, S]")),
    (lambda: Mask(key_mask=[[True]]), TypeError, ("key_mask is a list", "[B, S]")),  # type: ignore[arg-type]
    (lambda: Mask(query_mask=all_real(1, 1, 4)), ValueError, ("query_mask has shape [1, 1, 4]",)),
    (lambda: Mask(query_mask=torch.ones(1, 4)), TypeError, ("query_mask has dtype", "[B, T]")),
    (
        lambda: Mask(document_ids=torch.ones(4)),
        TypeError,
        ("document_ids has dtype torch.float32",),
    ),
    (lambda: Mask(document_ids=longs(1)[None, None]), ValueError, ("document_ids has shape",)),
    (lambda: Mask(document_ids=(longs(1),)), ValueError, ("document_ids has 1 parts", "a pair")),  # type: ignore[arg-type]
    (lambda: Mask(document_ids=3), TypeError, ("document_ids is a int", "a pair")),  # type: ignore[arg-type]
    (
        lambda: Mask(document_ids=longs(0, 2, 1)),
        ValueError,
        ("document_ids does not ascend", "in the order"),
    ),
    (
        lambda: Mask(document_ids=(longs(0, 1), longs(2, 1))),
        ValueError,
        ("document_ids does not ascend",),
    ),
    (lambda: Mask.from_cu_seqlens([0, 4], 4), TypeError, ("cu_seqlens is a list",)),  # type: ignore[arg-type]
    (lambda: Mask.from_cu_seqlens(torch.ones(2), 4), TypeError, ("cu_seqlens has dtype",)),
    (lambda: Mask.from_cu_seqlens(longs(0)[None], 4), ValueError, ("cu_seqlens has shape [1, 1]",)),
    (lambda: Mask.from_cu_seqlens(longs(0, 4), 4.0), TypeError, ("total is a float", "an int")),  # type: ignore[arg-type]
    (lambda: Mask.from_cu_seqlens(longs(1, 4), 4), ValueError, ("cu_seqlens is [1, 4]",)),
    (lambda: Mask.from_cu_seqlens(longs(0, 3, 2), 4), ValueError, ("cu_seqlens is [0, 3, 2]",)),
    (lambda: Mask.from_cu_seqlens(longs(0, 5), 4), ValueError, ("[0, 5]", "at most total = 4")),
    (lambda: Mask.from_cu_seqlens(longs(), 4), ValueError, ("cu_seqlens is []",)),
    # how it fits a call of B 2, T 4, S 5
    (lambda: in_a_call(Mask(key_lengths=[1, 2, 3])), ValueError, ("key_lengths holds 3", "B is 2")),
    (lambda: in_a_call(Mask(key_lengths=longs(1, 2, 3))), ValueError, ("key_lengths holds 3",)),
    (lambda: in_a_call(Mask(key_lengths=[1, 6])), ValueError, ("key_lengths is [1, 6]", "S = 5")),
    (lambda: in_a_call(Mask(key_lengths=longs(-1, 2))), ValueError, ("key_lengths is [-1, 2]",)),
    (
        lambda: in_a_call(Mask(query_lengths=longs(5))),
        ValueError,
        ("query_lengths is [5]", "T = 4"),
    ),
    (
        lambda: in_a_call(Mask(causal=True, prefix_lengths=longs(6))),
        ValueError,
        ("prefix_lengths is [6]", "S = 5"),
    ),
    (
        lambda: in_a_call(Mask(key_mask=all_real(2, 4))),
        ValueError,
        ("key_mask has shape [2, 4]", "B is 2 and S is 5", "[2 or 1, 5]"),
    ),
    (lambda: in_a_call(Mask(key_mask=all_real(3, 5))), ValueError, ("key_mask has shape [3, 5]",)),
    (lambda: in_a_call(Mask(query_mask=all_real(2, 5))), ValueError, ("query_mask", "T is 4")),
    (
        lambda: in_a_call(Mask(document_ids=longs(0, 0, 1, 1))),
        ValueError,
        ("document_ids", "T is 4 and S is 5", "pair (query_ids, key_ids)"),
    ),
    (
        lambda: in_a_call(Mask(document_ids=(longs(0, 0), longs(0, 0, 1, 1, 1)))),
        ValueError,
        ("document_ids has shape [1, 2]", "T is 4"),
    ),
    (
        lambda: in_a_call(Mask(document_ids=(longs(0, 0, 0, 0), longs(0, 0)))),
        ValueError,
        ("document_ids has shape [1, 2]", "S is 5"),
    ),
    # devices
    *(
        (
            lambda mask=mask: in_a_call(mask),  # type: ignore[misc]
            ValueError,
            (f"{name} is on meta", "query is on cpu", "move it there"),
        )
        for name, mask in {
            "key_lengths": Mask(key_lengths=longs(1).to("meta")),
            "query_lengths": Mask(query_lengths=longs(1).to("meta")),
            "prefix_lengths": Mask(causal=True, prefix_lengths=longs(1).to("meta")),
            "key_mask": Mask(key_mask=all_real(2, 5, device="meta")),
            "query_mask": Mask(query_mask=all_real(2, 4, device="meta")),
            "document_ids": Mask(document_ids=(longs(0, 0, 0, 0), longs(*range(5)).to("meta"))),
            "attn_mask": from_tensor(all_real(4, 5, device="meta")),
        }.items()
    ),
    (
        lambda: in_a_call(from_tensor(all_real(5)), "cuda:1"),
        ValueError,
        ("attn_mask is on cpu", "query is on cuda:1"),
    ),
    # attn_mask
    (lambda: from_tensor([True]), TypeError, ("attn_mask is a list", "hk.Mask", "bool tensor")),
    (
        lambda: from_tensor(torch.zeros(4, 5)),
        TypeError,
        ("attn_mask has dtype torch.float32", "True = may attend", "a float tensor is a bias"),
    ),
    (lambda: from_tensor(longs(1)), TypeError, ("attn_mask has dtype torch.int64", "bool tensor")),
    (
        lambda: from_tensor(all_real(1, 1, 1, 4, 5)),
        ValueError,
        ("attn_mask has shape [1, 1, 1, 4, 5]",),
    ),
    (
        lambda: from_tensor(all_real(2, 2, 4, 5)),
        ValueError,
        ("attn_mask has shape [2, 2, 4, 5]", "[2, 3, 4, 5]"),
    ),
    (
        lambda: from_tensor(all_real(2, 5)),
        ValueError,
        ("attn_mask has shape [2, 5]", "[2, 3, 4, 5]", "2-D is [T, S]", "hk.Mask(key_mask=...)"),
    ),
]


@pytest.mark.parametrize(("call", "kind", "parts"), REFUSALS, ids=[r[2][0] for r in REFUSALS])
def test_refusals(
    call: Callable[[], object], kind: type[Exception], parts: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as refusal:
        call()
    assert type(refusal.value) is kind
    for part in parts:
        assert part in str(refusal.value)


def test_and_with_anything_else_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        Mask(causal=True) & True  # type: ignore[operator]


SPARSE = torch.ones(2, 5, dtype=torch.bool).to_sparse()
SPARSE_LENGTHS = torch.tensor([1, 2]).to_sparse()


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("key_mask", SPARSE),
        ("key_mask", SPARSE.to_sparse_csr()),
        ("query_mask", SPARSE),
        ("query_mask", torch.nested.nested_tensor([torch.ones(5, dtype=torch.bool)] * 2)),
        ("key_lengths", SPARSE_LENGTHS),
        ("query_lengths", SPARSE_LENGTHS),
        ("prefix_lengths", SPARSE_LENGTHS),
        ("document_ids", SPARSE_LENGTHS),
        ("document_ids", (torch.tensor([0, 1]), SPARSE_LENGTHS)),
    ],
)
def test_tensors_that_are_not_dense(argument: str, given: object) -> None:
    with pytest.raises(ValueError, match=rf"^{argument} has layout \w+; pass .* dense\.$"):
        Mask(causal=True, **{argument: given})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^cu_seqlens has layout sparse_coo; pass "):
        Mask.from_cu_seqlens(SPARSE_LENGTHS, 5)


@pytest.mark.parametrize("argument", ["key_lengths", "query_lengths", "prefix_lengths"])
@pytest.mark.parametrize(
    ("length", "words"),
    [
        (2**70, r"about 2\*\*70"),
        (-(2**70), r"about -2\*\*70"),
        (2**31, "2147483648"),
        pytest.param(10**5000, r"about 2\*\*16609", id="more than Python prints"),
    ],
)
def test_lengths_that_no_call_has(argument: str, length: int, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^{argument} has {words}; lengths go from 0 to T or S"):
        Mask(causal=True, **{argument: [length, 1]})  # type: ignore[arg-type]


@pytest.mark.parametrize("total", [2**70, 2**31, -1])
def test_a_total_that_no_call_has(total: int) -> None:
    with pytest.raises(ValueError, match=r"^total is .*; pass a length from 0 to "):
        Mask.from_cu_seqlens(longs(0, 2), total)
