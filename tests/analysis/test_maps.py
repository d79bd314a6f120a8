"""Maps of one sentence: chosen heads; their picture; what BertViz takes. test_statistics.py has the families."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import heads_kernels as hk
from heads_kernels.analysis import HeadMaps
from tests.support import tiny_models
from tests.support.alike import assert_alike

use = hk.integrations.transformers.use


def test_chosen_heads() -> None:
    model = use(tiny_models.build("bert"))
    arguments = tiny_models.batch(model)
    every = hk.analysis.maps(model, arguments)
    [one] = hk.analysis.maps(model, arguments, {1: [3, 0]})
    assert (one.layer, one.heads) == (every[1].layer, (0, 3))
    assert_alike(one.maps, every[1].maps[[0, 3]])
    assert hk.analysis.maps(model, arguments, {1: []}) == []
    hk.heads.prune(model, {0: [0, 1, 2], 1: range(4)})
    [left] = hk.analysis.maps(model, arguments)
    assert_alike(left.maps, every[0].maps[3:])


def test_a_whole_batch_and_some_rows() -> None:
    model = use(tiny_models.build("bert"))
    arguments = tiny_models.batch(model)
    heads = {1: [3, 0]}
    [whole] = hk.analysis.maps(model, arguments, heads, example=None)
    assert whole.maps.shape == (3, 2, 9, 9)
    for example, real in enumerate(arguments["attention_mask"].bool()):
        [one] = hk.analysis.maps(model, arguments, heads, example=example)
        assert_alike(one.maps, whole.maps[example][:, real][..., real])
        assert_alike(one.maps.sum(), whole.maps[example].sum())
        [some_rows] = hk.analysis.maps(model, arguments, heads, example=example, rows=slice(5, 7))
        assert_alike(some_rows.maps, one.maps[:, real[:5].sum() :][:, : real[5:7].sum()])


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


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"hk.analysis.plot_maps needs matplotlib"):
        hk.analysis.plot_maps([some(1)])


# ---------------------------------------------------------------------- refusals
BAD: list[tuple[Any, str]] = [
    (lambda model, batch: hk.analysis.maps(model, batch, example=3), "example is 3; .* 0 to 2"),
    (lambda model, batch: hk.analysis.maps(model, batch, example=-1), "example is -1"),
    (lambda model, batch: hk.analysis.maps(model, batch, {0: [9]}), "heads of layer 0 .* head 9"),
    (lambda model, batch: hk.analysis.maps(model, batch, rows=3), "rows is 3; pass a slice"),
    (
        lambda *_: hk.analysis.plot_maps([HeadMaps("a", "encoder", (0,), torch.ones(1, 1, 2, 2))]),
        "found has maps of a whole batch",
    ),
    (lambda *_: hk.analysis.bertviz([], ["a"]), "found has no maps"),
    (lambda *_: hk.analysis.plot_maps([]), "found has no maps"),
    (lambda *_: hk.analysis.bertviz([some(1)], ["a", "b"]), "tokens are 2 for rows; .* 4 rows"),
    (lambda *_: hk.analysis.plot_maps([some(1)], key_tokens=words(3)), "tokens are 3 for keys"),
    (lambda *_: hk.analysis.plot_maps([some(1)], [], words(5)), "tokens are 0 for rows"),
]


def test_bad_input() -> None:
    model = use(tiny_models.build("bert"))
    for call, message in BAD:
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            call(model, tiny_models.batch(model))
