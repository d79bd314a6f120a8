"""Parameters, FLOPs and break-even lengths: the published tables, and PyTorch's own counter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from heads_kernels.convert import Heads
from heads_kernels.convert.counts import break_even, count_flops, count_parameters

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
]


@pytest.mark.parametrize(("model", "before", "after", "expected"), PUBLISHED)
def test_published_tables(
    model: tuple[float, int], before: dict[str, Any], after: dict[str, Any], expected: float
) -> None:
    millions, layers = model
    D_in, H = (512, 8) if model is TRANSLATION_BASE else (768, 12)
    sizes = {"D_in": D_in, "D_in_k": D_in, "H": H}
    change = count_parameters(**sizes, **after) - count_parameters(**sizes, **before)
    assert round(millions + layers * change / 1e6, 2) == expected


def test_parameters_are_those_of_the_tensors() -> None:
    H, D, D_in, D_in_k = 3, 8, 12, 10
    query, key = torch.nn.Linear(D_in, H * D), torch.nn.Linear(D_in_k, H * D)
    own = sum(p.numel() for p in [*query.parameters(), *key.parameters()])
    assert count_parameters(D_in, H * D, H, D_in_k=D_in_k) == own
    without = query.weight.numel() + key.weight.numel()
    assert count_parameters(D_in, H * D, H, D_in_k=D_in_k, bias=False) == without
    weights = query.weight.view(H, D, D_in), key.weight.view(H, D, D_in_k)
    factors = Heads(*weights, D**-0.5, query.bias.view(H, D)).fit(9)
    tensors = factors.query, factors.key, factors.mixing, factors.content
    expected = sum(x.numel() for x in tensors)
    assert count_parameters(D_in, H * D, H, 9, D_in_k=D_in_k) == expected


# ---------------------------------------------------------------------- break-even
BERT = (768, 768, 12)


@pytest.mark.parametrize(("Ds", "length"), [(512, 73), (384, 154), (256, 341), (96, 2688)])
def test_break_even_is_where_the_counts_cross(Ds: int, length: int) -> None:
    """Mixing and content left out, as the formula does."""
    D_in, D_k, H = BERT

    def cheaper(T: int) -> bool:
        before = count_flops(T, D_in, D_k, H, D_in_k=D_in)
        after = count_flops(T, D_in, D_k, H, Ds, D_in_k=D_in)
        mixing, content = T * H * Ds, 2 * T * D_in * H + H * T * T
        return after - mixing - content < before

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
    T, D_in, D_in_k, H, D = 7, 12, 10, 4, 6
    x, y, heads = torch.randn(T, D_in), torch.randn(T, D_in_k), torch.randn(H, T, D)
    width, head_width = Ds or H * D, Ds or D
    found = [
        counted(lambda: x @ torch.randn(D_in, width)),
        counted(lambda: y @ torch.randn(D_in_k, width)),
        counted(lambda: torch.randn(H, T, head_width) @ torch.randn(H, head_width, T)),
        counted(lambda: torch.randn(H, T, T) @ heads),
        counted(lambda: y @ torch.randn(D_in_k, H * D)),
        counted(lambda: torch.randn(T, H * D) @ torch.randn(H * D, D_in)),
    ]
    if Ds is not None:
        found.append(T * H * Ds)  # one product for each element of each head's query
        found.append(counted(lambda: y @ torch.randn(D_in_k, H)) + H * T * T)
    assert count_flops(T, D_in, H * D, H, Ds, D_in_k=D_in_k) == sum(found)


def test_ragged_heads_take_their_share() -> None:
    D_in, D_k, H = BERT
    T, Ds = 64, 256
    whole = count_flops(T, D_in, D_k, H, Ds, D_in_k=D_in)
    disjoint = count_flops(T, D_in, D_k, H, Ds, D_in_k=D_in, executed_features=Ds)
    assert whole - disjoint == (2 * T * T + T) * (H - 1) * Ds
