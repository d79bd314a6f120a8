"""What readings give: scores of heads, distances between them, maps. test_statistics.py has those of models."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import heads_kernels as hk
from heads_kernels.analysis import HeadMaps
from tests.support import tiny_models
from tests.support.alike import assert_alike
from tests.support.nn_layers import Layers
from tests.support.refusals import assert_refused

use = hk.integrations.transformers.use


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
    assert scores([1.0, 2.0], [0.0]).lowest(np.int64(1), keep_at_least=1) == {"layer0": [0]}


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


def test_bad_scores() -> None:
    assert_refused(
        (lambda: SOME.lowest(7), "count is 7; pass an int from 0 to 6"),
        (lambda: SOME.lowest(-1), "count is -1"),
        (lambda: SOME.lowest(2.0), "count is 2.0"),
        (lambda: SOME.lowest(5, keep_at_least=1), r"count is 5; .* 0 to 4 \(1 stay in each layer\)"),
        (lambda: SOME.lowest(1, keep_at_least=-1), "keep_at_least is -1"),
        (lambda: SOME.spearman(scores([1.0])), r"other is of \{'layer0': 1\}; pass scores of the same"),
        (lambda: scores([1.0], [torch.nan, 1.0]), r"scores of 'layer1' are \[nan, 1.0\]"),
        (lambda: hk.analysis.HeadScores(("one",), ("encoder",), (), "some"), r"HeadScores of \[1, 1, 0\] layers, kin"),
    )


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


# ---------------------------------------------------------------------- distances
def distances(points: Tensor) -> hk.analysis.HeadDistance:
    """Of a layer of three heads and one of four, whose squared distances are those of `points` `[7, D]`."""
    heads = [(0, head) for head in range(3)] + [(1, head) for head in range(4)]
    matrix = (points[:, None] - points).square().sum(-1)
    return hk.analysis.HeadDistance("encoder", ("a", "b"), tuple(heads), matrix, rows=5)


def test_means_and_odd_heads_of_each_layer() -> None:
    found = distances(torch.tensor([0.0, 3.0, 1.0, 0.0, 0.0, 0.0, 2.0]).double()[:, None])
    assert found.block(0).tolist() == [[0, 9, 1], [9, 0, 4], [1, 4, 0]]
    assert_alike(found.within(), torch.tensor([28 / 6, 24 / 12], dtype=torch.float64))
    assert found.odd() == [1, 3]
    found = hk.analysis.HeadDistance("encoder", ("a",), ((0, 0),), torch.zeros(1, 1), rows=5)
    assert found.odd() == [None]
    assert found.within().isnan().all()


def test_the_embedding_has_the_distances_of_all_dimensions() -> None:
    found = distances(torch.randn(7, 3, dtype=torch.float64))
    points = found.embedding(3)
    assert_alike(torch.cdist(points, points).square(), found.matrix)
    assert_alike(found.embedding(), points[:, :2])
    spread = points.square().sum(0)
    assert (spread[:-1] >= spread[1:]).all()
    assert (points.gather(0, points.abs().argmax(0, keepdim=True)) > 0).all()


class Branches(Layers):
    """Two layers, which may not run, or see other tokens."""

    def forward(self, x: Tensor, first: bool, second: bool) -> None:
        if first:
            self.layers[0](x)
        if second:
            self.layers[1](x[:, :3])


def test_bad_distances() -> None:
    model = Branches(*(hk.nn.GatedMultiheadAttention(16, 4) for _ in range(2)))
    x = torch.randn(1, 5, 16)
    assert_refused(
        ((model, [(x, False, False)]), "data reaches no layer of kind 'encoder'"),
        ((model, [(x, True, False), (x, True, True)]), "data makes other layers run in one batch"),
        ((model, [(x, True, True)]), "model has T 3 and S 3 in layer 1"),
        of=hk.analysis.distance,
    )
    translator = use(tiny_models.build("bart"))
    assert_refused(
        ({"kind": None}, "kind is None; pass one of 'encoder', 'decoder', 'cross'"),
        ({"kind": "both"}, "kind is 'both'"),
        of=partial(hk.analysis.distance, translator, [tiny_models.batch(translator)]),
    )


# ---------------------------------------------------------------------- maps
def test_some_heads_examples_and_rows() -> None:
    model = use(tiny_models.build("bert"))
    arguments = tiny_models.batch(model)
    every = hk.analysis.maps(model, arguments)
    [one] = hk.analysis.maps(model, arguments, {1: [3, 0]})
    assert (one.layer, one.heads) == (every[1].layer, (0, 3))
    assert_alike(one.maps, every[1].maps[[0, 3]])
    assert hk.analysis.maps(model, arguments, {1: []}) == []
    heads = {1: [3, 0]}
    [whole] = hk.analysis.maps(model, arguments, heads, example=None)
    assert whole.maps.shape == (3, 2, 9, 9)
    for example, real in enumerate(arguments["attention_mask"].bool()):
        [one] = hk.analysis.maps(model, arguments, heads, example=example)
        assert_alike(one.maps, whole.maps[example][:, real][..., real])
        assert_alike(one.maps.sum(), whole.maps[example].sum())
        [some_rows] = hk.analysis.maps(model, arguments, heads, example=example, rows=slice(5, 7))
        assert_alike(some_rows.maps, one.maps[:, real[:5].sum() :][:, : real[5:7].sum()])
    hk.heads.prune(model, {0: [0, 1, 2], 1: range(4)})
    [left] = hk.analysis.maps(model, arguments)
    assert_alike(left.maps, every[0].maps[3:])


# ---------------------------------------------------------------------- what others draw of maps
def some(heads: int, T: int = 4, S: int = 5, kind: str = "cross") -> HeadMaps:
    return HeadMaps("attention", kind, tuple(range(heads)), torch.rand(heads, T, S))


def words(count: int, start: str = "w") -> list[str]:
    return [f"{start}{i}" for i in range(count)]


def test_bertviz_of_one_kind_of_layers() -> None:
    """Every layer `[1, H, T, S]`, heads alike in number, whatever was pruned."""
    found = [some(heads, 6, 6, "encoder") for heads in (4, 3)]
    given = hk.analysis.bertviz(found, words(6))
    assert given["tokens"] == words(6)
    stacked = torch.stack([each.squeeze(0) for each in given["attention"]])  # as BertViz does
    assert stacked.shape == (2, 4, 6, 6)
    assert_alike(stacked[0], found[0].maps)
    assert_alike(stacked[1, :3], found[1].maps)
    assert not stacked[1, 3].any()


def test_bertviz_of_a_translation_model() -> None:
    shapes = {"encoder": (7, 7), "decoder": (4, 4), "cross": (4, 7)}
    found = [some(4, *shape, kind) for kind, shape in shapes.items()]
    given = hk.analysis.bertviz(found, words(7), words(4, "d"))
    for each, kind in zip(found, shapes, strict=True):
        [maps] = given[f"{kind}_attention"]
        assert_alike(maps[0], each.maps)
    assert given["encoder_tokens"] == words(7)
    assert given["decoder_tokens"] == words(4, "d")


@pytest.mark.check
def test_a_picture() -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    found = [some(2), some(3)]
    figure = hk.analysis.plot_maps(found, words(4), words(5))
    drawn = [axes for axes in figure.axes if axes.images]
    assert len(drawn) == 5
    for axes, expected in zip(drawn, [*found[0].maps, *found[1].maps], strict=True):
        assert torch.equal(torch.from_numpy(axes.images[0].get_array().data), expected)
    assert [label.get_text() for label in drawn[0].get_xticklabels()] == words(5)
    assert [label.get_text() for label in drawn[0].get_yticklabels()] == words(4)


def test_bad_maps() -> None:
    model = use(tiny_models.build("bert"))
    assert_refused(
        ({"example": 3}, "example is 3; .* 0 to 2"),
        ({"example": -1}, "example is -1"),
        ({"heads": {0: [9]}}, "heads of layer 0 .* head 9"),
        ({"rows": 3}, TypeError, "rows is 3; pass a slice of ints"),
        ({"rows": slice(1.0, 2)}, TypeError, r"rows is slice\(1.0, 2, None\)"),
        ({"batch": [tiny_models.batch(model)]}, TypeError, "batch is a list of 1 batches"),
        of=partial(hk.analysis.maps, model, batch=tiny_models.batch(model)),
        unchanged=[model],
    )
    batch = HeadMaps("a", "encoder", (0,), torch.ones(1, 1, 2, 2))
    assert_refused(
        (lambda: hk.analysis.plot_maps([batch]), "^found has maps of a whole batch"),
        (lambda: hk.analysis.bertviz([], ["a"]), "^found has no maps"),
        (lambda: hk.analysis.plot_maps([]), "^found has no maps"),
        (lambda: hk.analysis.bertviz([some(1)], ["a", "b"]), "^tokens are 2 for rows; .* 4 rows"),
        (lambda: hk.analysis.plot_maps([some(1)], key_tokens=words(3)), "^tokens are 3 for keys"),
        (lambda: hk.analysis.plot_maps([some(1)], [], words(5)), "^tokens are 0 for rows"),
    )
