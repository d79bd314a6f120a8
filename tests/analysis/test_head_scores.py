"""Scores of heads: their order, what is lowest, rank correlation, tables; what they and other objects print."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import heads_kernels as hk
from tests.support.nn_layers import Layers


def scores(*rows: list[float], name: str = "layer{}") -> hk.analysis.HeadScores:
    return hk.analysis.HeadScores(
        layers=tuple(name.format(i) for i in range(len(rows))),
        kinds=("encoder",) * len(rows),
        scores=tuple(torch.tensor(row, dtype=torch.float64) for row in rows),
        method="some",
    )


#: A layer that lost two heads, and one that lost all.
SOME = scores([3.0, -1.0, 2.0, 0.5], [0.5, 4.0], [])


def test_ranked_from_the_least_and_by_place_among_equals() -> None:
    order = [("layer0", 1), ("layer0", 3), ("layer1", 0), ("layer0", 2), ("layer0", 0)]
    assert SOME.ranked() == [*order, ("layer1", 1)]


def test_the_lowest_heads() -> None:
    for count, keep, expected in (
        (0, 0, {}),
        (5, 0, {"layer0": [0, 1, 2, 3], "layer1": [0]}),
        (6, 0, {"layer0": [0, 1, 2, 3], "layer1": [0, 1]}),
        (4, 1, {"layer0": [1, 2, 3], "layer1": [0]}),
        (2, 2, {"layer0": [1, 3]}),
    ):
        assert SOME.lowest(count, keep_at_least=keep) == expected
    assert scores([1.0, 2.0], [0.0]).lowest(1, keep_at_least=1) == {"layer0": [0]}


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
    assert torch.tensor(first.spearman(scores([1.0] * 3, [1.0] * 2))).isnan()


def test_normalised_scores_and_tables() -> None:
    found = scores([3.0, -4.0], [0.0, 0.0], []).normalised()
    assert [each.tolist() for each in found.scores] == [[0.6, -0.8], [0.0, 0.0], []]
    assert found.method == "some, l2 per layer"
    table = SOME.table()
    assert table[0].tolist() == [3.0, -1.0, 2.0, 0.5]
    assert table[1, :2].tolist() == [0.5, 4.0]
    assert table[1, 2:].isnan().all()
    assert table[2].isnan().all()
    assert scores([], []).table().shape == (2, 0)


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: SOME.lowest(7), "count is 7; pass an int from 0 to 6"),
    (lambda: SOME.lowest(-1), "count is -1"),
    (lambda: SOME.lowest(2.0), "count is 2.0"),  # type: ignore[arg-type]
    (lambda: SOME.lowest(5, keep_at_least=1), r"count is 5; .* 0 to 4 \(1 stay in each layer\)"),
    (lambda: SOME.lowest(1, keep_at_least=-1), "keep_at_least is -1"),
    (lambda: SOME.spearman(scores([1.0])), r"other is of \{'layer0': 1\}; pass scores of the same"),
    (lambda: scores([1.0], [torch.nan, 1.0]), r"scores of 'layer1' are \[nan, 1.0\]"),
    (
        lambda: hk.analysis.HeadScores(("one",), ("encoder",), (), "some"),
        r"HeadScores of \[1, 1, 0\] layers, kinds and scores",
    ),
]


def test_bad_input() -> None:
    for call, message in BAD:
        with pytest.raises(ValueError, match=message):
            call()


def test_scores_are_a_grid() -> None:
    assert str(scores([0.0, 1 / 3, 2 / 3], [], [0.0], name="layers.{}")) == (
        "HeadScores: some\n"
        "layer     kind     head 0      1      2\n"
        "layers.0  encoder       0  0.333  0.667\n"
        "layers.1  encoder\n"
        "layers.2  encoder       0"
    )
    assert "..." + "a" * 35 + ".0  " in str(scores([0.5], name="a" * 60 + ".{}"))


def test_statistics_are_grids_with_units() -> None:
    sets = {"first": lambda batch: torch.arange(5).expand(2, 5) == 0}
    model = Layers(*(hk.nn.GatedMultiheadAttention(12, heads) for heads in (3, 2)))
    found = hk.analysis.statistics(model, [torch.randn(2, 5, 12)], token_sets=sets)
    text = str(found)
    assert text.startswith("HeadStatistics: means over 10 query rows of a layer\n")
    units = ["confidence (probability)", "entropy (nats)", "distance (tokens)"]
    units += [f"to_{name} (probability)" for name in ("self", "previous", "next", "first")]
    assert [block.split("\n")[0] for block in text.split("\n\n")[1:]] == units
    assert f"{found.entropy.scores[1][1]:.3g}" in text
