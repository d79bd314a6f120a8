"""Scores of heads: their order, what is lowest, rank correlation, tables."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import heads_kernels as hk


def scores(*rows: list[float], method: str = "some") -> hk.analysis.HeadScores:
    return hk.analysis.HeadScores(
        layers=tuple(f"layer{i}" for i in range(len(rows))),
        kinds=("encoder",) * len(rows),
        scores=tuple(torch.tensor(row, dtype=torch.float64) for row in rows),
        method=method,
    )


#: A layer that lost two heads, and one that lost all.
SOME = scores([3.0, -1.0, 2.0, 0.5], [0.5, 4.0], [])


def test_ranked_from_the_least_and_by_place_among_equals() -> None:
    order = [("layer0", 1), ("layer0", 3), ("layer1", 0), ("layer0", 2), ("layer0", 0)]
    assert SOME.ranked() == [*order, ("layer1", 1)]


@pytest.mark.parametrize(
    ("count", "keep", "expected"),
    [
        (0, 0, {}),
        (2, 0, {"layer0": [1, 3]}),
        (5, 0, {"layer0": [0, 1, 2, 3], "layer1": [0]}),
        (6, 0, {"layer0": [0, 1, 2, 3], "layer1": [0, 1]}),
        (4, 1, {"layer0": [1, 2, 3], "layer1": [0]}),
        (2, 2, {"layer0": [1, 3]}),
        (1, 3, {"layer0": [1]}),
    ],
)
def test_the_lowest_heads(count: int, keep: int, expected: dict[str, list[int]]) -> None:
    assert SOME.lowest(count, keep_at_least=keep) == expected


def test_the_lowest_heads_are_what_prune_and_close_take() -> None:
    model = torch.nn.ModuleList(hk.nn.GatedMultiheadAttention(12, 3) for _ in range(2))
    names = tuple(layer.name for layer in hk.heads.attention_layers(model))
    values = (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5.0, 4.0, 0.0]))
    lowest = hk.analysis.HeadScores(names, ("encoder",) * 2, values, "some").lowest(3)
    hk.heads.close(model, lowest)
    assert hk.heads.closed(model) == {"0": [0, 1], "1": [2]}
    assert hk.heads.prune(model, lowest) == lowest


def test_rank_correlation() -> None:
    """1 - 6 sum d^2 / n (n^2 - 1) where no ranks are equal; Pearson's of mean ranks where some are."""
    first = scores([1.0, 2.0, 3.0], [4.0, 5.0])
    second = scores([10.0, 30.0, -20.0], [4e9, 5.0])
    d = torch.tensor([1 - 3.0, 2 - 4, 3 - 1, 4 - 5, 5 - 2])
    assert first.spearman(second) == pytest.approx(1 - 6 * d.square().sum().item() / (5 * 24))
    assert first.spearman(first) == pytest.approx(1)
    assert first.spearman(scores([-1.0, -2.0, -3.0], [-4.0, -5.0])) == pytest.approx(-1)
    tied = scores([1.0, 1.0, 2.0], [2.0, 3.0])  # ranks 1.5, 1.5, 3.5, 3.5, 5
    ranks = torch.tensor([[1.0, 2, 3, 4, 5], [1.5, 1.5, 3.5, 3.5, 5]], dtype=torch.float64)
    assert first.spearman(tied) == pytest.approx(torch.corrcoef(ranks)[0, 1].item())
    assert first.spearman(scores([1.0] * 3, [1.0] * 2)) != first.spearman(tied)
    assert torch.tensor(first.spearman(scores([1.0] * 3, [1.0] * 2))).isnan()
    with pytest.raises(ValueError, match=r"other is of \{'layer0': 4, .*; pass scores of the same"):
        first.spearman(SOME)


def test_normalised_layer_by_layer() -> None:
    found = scores([3.0, -4.0], [0.0, 0.0], []).normalised()
    assert [each.tolist() for each in found.scores] == [[0.6, -0.8], [0.0, 0.0], []]
    assert found.method == "some, l2 per layer"


def test_a_row_for_each_layer() -> None:
    table = SOME.table()
    assert table.shape == (3, 4)
    assert table[0].tolist() == [3.0, -1.0, 2.0, 0.5]
    assert table[1, :2].tolist() == [0.5, 4.0]
    assert table[1, 2:].isnan().all()
    assert table[2].isnan().all()
    assert scores([], []).table().shape == (2, 0)


def test_json_holds_it() -> None:
    reported = json.loads(json.dumps(SOME.to_dict()))
    assert reported["method"] == "some"
    assert reported["layers"][1] == {"name": "layer1", "kind": "encoder", "scores": [0.5, 4.0]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 7}, r"count is 7; pass an int from 0 to 6"),
        ({"count": -1}, r"count is -1; pass an int from 0 to 6"),
        ({"count": 2.0}, r"count is 2.0; pass an int from 0 to 6"),
        ({"count": True}, r"count is True"),
        ({"count": 5, "keep_at_least": 1}, r"count is 5; .* 0 to 4 \(1 stay in each layer\)"),
        ({"count": 1, "keep_at_least": -1}, r"keep_at_least is -1"),
    ],
)
def test_lowest_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SOME.lowest(**arguments)


def test_scores_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scores of 'layer1' are \[nan, 1.0\]"):
        scores([1.0], [torch.nan, 1.0])
    with pytest.raises(ValueError, match=r"HeadScores of \[1, 1, 0\] layers, kinds and scores"):
        hk.analysis.HeadScores(("one",), ("encoder",), (), "some")
