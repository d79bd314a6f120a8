"""Parameters, FLOPs and break-even lengths: the published tables, and PyTorch's own counter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from heads_kernels.convert import Heads, break_even, count_flops, count_parameters, ragged

#: Of Cordonnier et al. 2020, table 2 and the sizes between them, and table 1: millions of parameters of the model,
#: layers, sizes of a layer before, after, and millions after.
BERT_BASE, DISTILBERT, TRANSLATION_BASE = (108.3, 12), (66.4, 6), (60.9, 18)
PUBLISHED: list[tuple[tuple[float, int], dict[str, Any], dict[str, Any], float]] = [
    *(
        (BERT_BASE, {"D_k": 768}, {"D_k": 768, "Ds": Ds}, after)
        for Ds, after in ((768, 108.50), (512, 103.75), (384, 101.37), (256, 98.99), (128, 96.61))
    ),
    (DISTILBERT, {"D_k": 768}, {"D_k": 768, "Ds": 384}, 62.93),
    *(
        (TRANSLATION_BASE, {"D_k": 512}, {"D_k": D_k}, after)
        for D_k, after in ((512, 60.9), (256, 56.17), (128, 53.81), (64, 52.63))
    ),
    *(
        (TRANSLATION_BASE, {"D_k": 512}, {"D_k": D_k, "Ds": D_k, "trained": True}, after)
        for D_k, after in ((512, 60.97), (256, 56.21), (128, 53.83), (64, 52.64))
    ),
]


@pytest.mark.parametrize(("model", "before", "after", "expected"), PUBLISHED)
def test_published_tables(
    model: tuple[float, int], before: dict[str, Any], after: dict[str, Any], expected: float
) -> None:
    millions, layers = model
    D_in, H = (512, 8) if model is TRANSLATION_BASE else (768, 12)
    change = count_parameters(D_in, H=H, **after) - count_parameters(D_in, H=H, **before)
    assert round(millions + layers * change / 1e6, 2) == expected


def test_parameters_are_those_of_the_tensors() -> None:
    H, D, D_in, D_in_k = 3, 8, 12, 10
    query, key = torch.nn.Linear(D_in, H * D), torch.nn.Linear(D_in_k, H * D)
    own = sum(p.numel() for p in [*query.parameters(), *key.parameters()])
    assert count_parameters(D_in, H * D, H, D_in_k=D_in_k) == own
    without = query.weight.numel() + key.weight.numel()
    assert count_parameters(D_in, H * D, H, D_in_k=D_in_k, bias=False) == without
    weights = query.weight.view(H, D, D_in), key.weight.view(H, D, D_in_k)
    factors = ragged(Heads(*weights, D**-0.5, query.bias.view(H, D)), 9)
    tensors = factors.query, factors.key, factors.mixing, factors.content
    expected = sum(x.numel() for x in tensors)
    assert count_parameters(D_in, H * D, H, 9, D_in_k=D_in_k) == expected
    assert count_parameters(D_in, H * D, H, 9, trained=True, bias=False) == 9 * (2 * D_in + H)


# ---------------------------------------------------------------------- break-even
BERT = (768, 768, 12)


@pytest.mark.parametrize(("Ds", "length"), [(512, 73), (384, 154), (256, 341), (96, 2688)])
def test_break_even_is_where_the_counts_cross(Ds: int, length: int) -> None:
    """Mixing and content left out, as the formula does."""
    D_in, D_k, H = BERT

    def cheaper(T: int) -> bool:
        before, after = count_flops(T, T, D_in, D_k, H), count_flops(T, T, D_in, D_k, H, Ds)
        return after.total - after.mixing - after.content < before.total

    assert break_even(D_in, D_k, Ds, H) == length
    assert cheaper(length - 1)
    assert not cheaper(length + 1)


def test_break_even_without_either_side() -> None:
    assert break_even(64, 64, 64, 4) == 0  # dense mixing of as many features: nothing is saved
    assert break_even(64, 64, 80, 4) == 0
    # the same layer: never dearer
    assert break_even(64, 64, 64, 4, executed_features=64) == math.inf
    assert break_even(64, 64, 80, 4, executed_features=60) == 0
    assert break_even(64, 64, 32, 4, executed_features=96) == round(2 * 64 * 32 / 32)


# ---------------------------------------------------------------------- FLOPs
def counted(call: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("Ds", [None, 20])
def test_matrix_products_are_those_that_pytorch_counts(Ds: int | None) -> None:
    T, S, D_in, D_in_k, H, D, Dv, D_out = 7, 5, 12, 10, 4, 6, 3, 9
    found = count_flops(T, S, D_in, H * D, H, Ds, D_v=H * Dv, D_in_k=D_in_k, D_out=D_out)
    x, y, heads = torch.randn(T, D_in), torch.randn(S, D_in_k), torch.randn(H, S, Dv)
    width = Ds or H * D
    assert found.query == counted(lambda: x @ torch.randn(D_in, width))
    assert found.key == counted(lambda: y @ torch.randn(D_in_k, width))
    head_width = Ds or D
    scores = counted(lambda: torch.randn(H, T, head_width) @ torch.randn(H, head_width, S))
    assert found.scores == scores
    assert found.values == counted(lambda: torch.randn(H, T, S) @ heads)
    assert found.value == counted(lambda: y @ torch.randn(D_in_k, H * Dv))
    assert found.output == counted(lambda: torch.randn(T, H * Dv) @ torch.randn(H * Dv, D_out))
    if Ds is None:
        assert found.mixing == found.content == 0
    else:
        assert found.mixing == T * H * Ds  # one product for each element of each head's query
        assert found.content == counted(lambda: y @ torch.randn(D_in_k, H)) + H * T * S
    assert found.total == sum(found)


def test_masks_gates_and_ragged_heads_take_their_share() -> None:
    D_in, D_k, H = BERT
    T, Ds = 64, 256
    whole = count_flops(T, T, D_in, D_k, H, Ds)
    causal = count_flops(T, T, D_in, D_k, H, Ds, pairs=T * (T + 1) // 2)
    assert causal.scores * 2 * T == whole.scores * (T + 1)
    assert causal.values * 2 * T == whole.values * (T + 1)
    assert causal.query == whole.query
    half = count_flops(T, T, D_in, D_k, H, Ds, open_heads=H // 2)
    assert (half.scores * 2, half.values * 2, half.mixing * 2) == (
        whole.scores, whole.values, whole.mixing,
    )  # fmt: skip
    assert (half.query, half.key, half.value, half.output) == (
        whole.query, whole.key, whole.value, whole.output,
    )  # fmt: skip
    closed = count_flops(T, T, D_in, D_k, H, Ds, open_heads=0)
    assert closed.scores == closed.values == closed.mixing == 0
    disjoint = count_flops(T, T, D_in, D_k, H, Ds, executed_features=Ds)
    assert disjoint.scores == 2 * T * T * Ds
    assert disjoint.mixing == T * Ds


SIZES = dict.fromkeys(("T", "S", "D_in", "D_k", "H"), 1)
LAYER = dict.fromkeys(("D_in", "D_k", "H", "Ds"), 1)


@pytest.mark.parametrize(
    ("function", "sizes", "names"),
    [
        (count_flops, SIZES, (*SIZES, "Ds", "D_v", "D_in_k", "D_out")),
        (count_parameters, LAYER, (*LAYER, "D_in_k")),
        (break_even, LAYER, tuple(LAYER)),
    ],
)
def test_sizes_below_1(function: Any, sizes: dict[str, int], names: tuple[str, ...]) -> None:
    for name in names:
        with pytest.raises(ValueError, match=f"^{name} is 0; pass an int of at least 1."):
            function(**sizes | {name: 0})


@pytest.mark.parametrize("open_heads", [-1, 13])
def test_more_heads_than_there_are(open_heads: int) -> None:
    with pytest.raises(ValueError, match=f"^open_heads is {open_heads}; pass 0 to 12, which is H."):
        count_flops(1, 1, *BERT, open_heads=open_heads)
