"""Parameters, FLOPs and break-even lengths: the published tables, and PyTorch's own counter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from heads_kernels.convert import Heads
from heads_kernels.convert.counts import Sizes

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
    counts = []
    for sizes in (before, after):
        of = Sizes(D_in, D_in, sizes["D_k"], H)
        counts.append(of.parameters(sizes.get("Ds")))
    change = counts[1] - counts[0]
    assert round(millions + layers * change / 1e6, 2) == expected


def test_parameters_are_those_of_the_tensors() -> None:
    H, D, D_in, D_in_k = 3, 8, 12, 10
    query, key = torch.nn.Linear(D_in, H * D), torch.nn.Linear(D_in_k, H * D)
    own = sum(p.numel() for p in [*query.parameters(), *key.parameters()])
    sizes = Sizes(D_in, D_in_k, H * D, H)
    assert sizes.parameters() == own
    without = query.weight.numel() + key.weight.numel()
    assert replace(sizes, bias=False).parameters() == without
    weights = query.weight.view(H, D, D_in), key.weight.view(H, D, D_in_k)
    heads = Heads(*weights, D**-0.5, query.bias.view(H, D))
    assert heads.sizes == sizes
    factors = heads.fit(9)
    tensors = factors.query, factors.key, factors.mixing, factors.content
    assert sizes.parameters(9) == sum(x.numel() for x in tensors)


BERT = Sizes(768, 768, 768, 12)


@pytest.mark.parametrize(("Ds", "length"), [(512, 73), (384, 154), (256, 341), (96, 2688)])
def test_break_even_is_where_the_counts_cross(Ds: int, length: int) -> None:
    """Mixing and content left out, as the formula does."""
    D_in, H = BERT.D_in, BERT.H

    def cheaper(T: int) -> bool:
        mixing, content = T * H * Ds, 2 * T * D_in * H + H * T * T
        return BERT.flops(T, Ds) - mixing - content < BERT.flops(T)

    assert BERT.break_even(Ds) == length
    assert cheaper(length - 1)
    assert not cheaper(length + 1)


def test_break_even_without_either_side() -> None:
    sizes = Sizes(64, 64, 64, 4)
    assert sizes.break_even(64) == 0  # dense mixing of as many features: nothing is saved
    assert sizes.break_even(80) == 0
    # the same layer: never dearer
    assert sizes.break_even(64, 64) == math.inf
    assert sizes.break_even(80, 60) == 0
    assert sizes.break_even(32, 96) == round(2 * 64 * 32 / 32)


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
    assert Sizes(D_in, D_in_k, H * D, H).flops(T, Ds) == sum(found)


def test_ragged_heads_take_their_share() -> None:
    T, Ds = 64, 256
    saved = BERT.flops(T, Ds) - BERT.flops(T, Ds, executed_features=Ds)
    assert saved == (2 * T * T + T) * (BERT.H - 1) * Ds
