"""Arguments of `Mask` that do not fit raise before anything runs, with the argument's name and what it was."""

from collections.abc import Callable
from typing import Any

import torch

from heads_kernels.mask import Mask, as_mask
from tests.mask.masks import all_real, longs
from tests.support.refusals import assert_refused

SPARSE, SPARSE_LENGTHS = all_real(2, 5).to_sparse(), longs(1, 2).to_sparse()
NESTED = torch.nested.nested_tensor([torch.ones(5, dtype=torch.bool)] * 2)

#: What an argument is, whatever the call.
ARGUMENTS: list[tuple[Any, ...]] = [
    ({"causal": "left"}, r"causal is 'left'; .*lower_right"),
    ({"window": (1, 2, 3)}, r"window is \(1, 2, 3\); .*\(left, right\)"),
    ({"window": (1, -2)}, r"window is \(1, -2\); .*-1 = unlimited"),
    ({"window": (1.0, 0)}, TypeError, r"window is \(1.0, 0\)"),
    ({"window": [(1, 0), 4]}, r"window is 4; .*for each head: a list of H such pairs"),
    ({"window": longs(4, 9)}, r"window has shape \[2\]; .*integer tensor \[H, 2\]"),
    ({"window": longs(4, -2)[None]}, "window has -2; -1 is unlimited"),
    ({"window": torch.ones(3, 2)}, TypeError, "window has dtype torch.float32"),
    ({"first_keys": 4}, "first_keys is given without window; pass window="),
    ({"window": (1, 0), "first_keys": -1}, "first_keys is -1; counts go from 0 to S"),
    ({"window": (1, 0), "first_keys": longs(1, -1)}, "first_keys has -1; pass an int"),
    ({"window": (1, 0), "first_keys": [1.5]}, TypeError, r"first_keys is \[1.5\]; pass an int"),
    ({"causal": False, "prefix_lengths": [1]}, "prefix_lengths .*pass causal=True"),
    ({"key_lengths": torch.ones(2)}, TypeError, "key_lengths has dtype torch.float32; .*integer"),
    ({"key_lengths": 3}, TypeError, "key_lengths is a int; .*list of B ints"),
    ({"query_lengths": [1.5]}, TypeError, r"query_lengths is \[1.5\]"),
    ({"query_lengths": longs(1)[None]}, r"query_lengths has shape \[1, 1\]"),
    *(
        ({name: [length, 1]}, rf"{name} has {words}; lengths go from 0 to T or S")
        for name in ("key_lengths", "query_lengths", "prefix_lengths")
        for length, words in ((-(2**70), r"about -2\*\*70"), (2**31, "2147483648"))
    ),
    ({"key_mask": longs(1)[None]}, TypeError, "key_mask has dtype torch.int64; .*True = real key"),
    ({"key_mask": all_real(5)}, r"key_mask has shape \[5\]; pass .*\[B, S\]"),
    ({"query_mask": torch.ones(1, 4)}, TypeError, r"query_mask has dtype .*\[B, T\]"),
    ({"document_ids": torch.ones(4)}, TypeError, "document_ids has dtype torch.float32"),
    ({"document_ids": longs(1)[None, None]}, "document_ids has shape"),
    ({"document_ids": (longs(1),)}, "document_ids has 1 parts; .*a pair"),
    ({"document_ids": 3}, TypeError, "document_ids is a int"),
    ({"document_ids": (longs(0, 1), longs(2, 1))}, "document_ids does not ascend"),
    *(
        ({name: given}, rf"{name} has layout \w+; pass .* dense")
        for name, given in [
            ("key_mask", SPARSE),
            ("key_mask", SPARSE.to_sparse_csr()),
            ("query_mask", NESTED),
            *((name, SPARSE_LENGTHS) for name in ("key_lengths", "query_lengths")),
            ("prefix_lengths", SPARSE_LENGTHS),
            ("document_ids", (longs(0, 1), SPARSE_LENGTHS)),
        ]
    ),
]


def test_arguments() -> None:
    assert_refused(*(({"causal": True, **given}, *row) for given, *row in ARGUMENTS), of=Mask)


def test_cu_seqlens() -> None:
    assert_refused(
        (([0, 4], 4), TypeError, "cu_seqlens is a list"),
        ((longs(0)[None], 4), r"cu_seqlens has shape \[1, 1\]"),
        ((longs(1, 4), 4), r"cu_seqlens is \[1, 4\]"),
        ((longs(0, 5), 4), r"cu_seqlens is \[0, 5\]; .*at most total = 4"),
        ((longs(0, 4), 4.0), TypeError, "total is a float; pass .*an int"),
        ((longs(0, 2), 2**70), "total is .*; pass a length from 0"),
        of=Mask.from_cu_seqlens,
    )


def from_tensor(mask: Any) -> Mask:
    return as_mask(mask, (2, 3, 4, 5))


#: How it fits a call of B 2, H 3, T 4, S 5.
CALLS: list[tuple[Callable[[], Mask], str]] = [
    (lambda: Mask(key_lengths=[1, 2, 3]), "key_lengths holds 3 lengths, but B is 2"),
    (lambda: Mask(key_lengths=[1, 6]), r"key_lengths is \[1, 6\]; .*S = 5"),
    (lambda: Mask(query_lengths=longs(5)), r"query_lengths is \[5\]; .*T = 4"),
    (lambda: Mask(causal=True, prefix_lengths=[6]), r"prefix_lengths is \[6\]; .*S = 5"),
    (lambda: Mask(key_mask=all_real(2, 4)), r"key_mask has shape \[2, 4\], .*pass \[2 or 1, 5\]"),
    (lambda: Mask(query_mask=all_real(2, 5)), "query_mask .*T is 4"),
    (lambda: Mask(document_ids=longs(0, 0, 1, 1)), "document_ids .*T is 4 and S is 5; .*a pair"),
    (lambda: Mask(document_ids=(longs(*range(4)), longs(0, 0))), r"document_ids .* S is 5"),
    (lambda: Mask(window=[(1, 0)] * 2), "window is of 2 heads, but H is 3; pass 3, or one for all"),
    (lambda: Mask(window=(1, 0), first_keys=[1, 2]), "first_keys is of 2 heads, but H is 3"),
    (
        lambda: Mask(window=(1, 0), first_keys=[1, 2]).rows(longs(0, 1, 2, 3), 2, 2, 4, 5),
        r"rows has shape \[1, 2, 4\], but B is 2, H is 3",
    ),
    (lambda: from_tensor(all_real(2, 5)), r"attn_mask .*2-D is \[T, S\]; .*hk.Mask\(key_mask="),
    *(
        (lambda mask=mask: mask, f"{name} is on meta, but query is on cpu; move it there")
        for name, mask in {
            "key_lengths": Mask(key_lengths=longs(1).to("meta")),
            "query_lengths": Mask(query_lengths=longs(1).to("meta")),
            "prefix_lengths": Mask(causal=True, prefix_lengths=longs(1).to("meta")),
            "window": Mask(window=longs(1, 0)[None].to("meta")),
            "first_keys": Mask(window=(1, 0), first_keys=longs(1).to("meta")),
            "key_mask": Mask(key_mask=all_real(2, 5, device="meta")),
            "query_mask": Mask(query_mask=all_real(2, 4, device="meta")),
            "document_ids": Mask(document_ids=(longs(0, 0, 0, 0), longs(*range(5)).to("meta"))),
            "attn_mask": from_tensor(all_real(4, 5, device="meta")),
        }.items()
    ),
]


def test_calls() -> None:
    rows = (((make,), words) for make, words in CALLS)
    assert_refused(*rows, of=lambda make: make().intervals(2, 3, 4, 5, "cpu"))


def test_a_tensor_does_not_join_a_mask_by_an_operator() -> None:
    mask, dense = Mask(causal=True), all_real(5, 5)
    words = r"^& joins a Mask and a Tensor; .*key_mask=.*to_dense"
    assert_refused(
        *((join, TypeError, words) for join in (lambda: mask & dense, lambda: dense & mask)),
        (lambda: mask & 1, TypeError, "unsupported operand"),  # type: ignore[operator]
    )
