"""Whole-model benchmark: which heads and tokens its rows have, its goals, and what an interrupt leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="needs the extra [bench]")
pytest.importorskip("transformers", reason="needs the extra [transformers]")

from benchmarks import minilm, models
from benchmarks.models import GOALS, WHOLE, Batch, Row

pytestmark = pytest.mark.release


@pytest.fixture
def batch() -> Batch:
    ids = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0], [1, 2, 3, 4]])
    return Batch("as they come", ids, ids > 0)


@pytest.mark.parametrize("build", [models.llama, models.t5])
def test_candidates_agree(build: Any, batch: Batch) -> None:
    found = models.candidates(build(1))
    stock = found[WHOLE[0]]
    assert list(models.differences(found, batch)) == []
    for model in found.values():  # as a training step leaves it: with dropout
        models.training(model, batch)
    assert list(models.differences(found, models.prompts(stock, batch))) == []
    with torch.no_grad():  # heads that are left out count
        half = batch.output(found["ours, unpadded, half of the heads pruned"])
        assert (half - batch.output(stock)).abs().max() > models.TOLERANCE


def test_grouped_heads_are_pruned_with_their_key_head() -> None:
    model = models.llama(1)
    assert models.half(model) == {0: [2, 3, 6, 7]}
    pruned = models.candidates(model)["ours, half of the heads pruned"]
    (layer,) = models.hk.heads.attention_layers(pruned)
    assert (layer.num_heads, layer.num_key_heads) == (4, 2)


def test_padding_on_the_left(batch: Batch) -> None:
    left = batch.on_the_left()
    assert left.ids.tolist() == [[0, 5, 6, 7], [0, 0, 8, 9], [1, 2, 3, 4]]
    assert torch.equal(left.real, left.ids > 0)


def test_generation_has_its_length(batch: Batch) -> None:
    model = models.llama(1)
    tokens: Any = models.generation(model, batch.on_the_left())()
    assert tokens.shape == (3, 4 + models.GENERATED)


def test_goals_read_the_rows_they_name() -> None:
    title = "as they come: B32 T50, 790 of 1600 tokens real"
    rows = [
        Row("MiniLM", title, "inference", name, 1.0, x)
        for name, x in zip(WHOLE, (1.0, 1.1, 1.9), strict=True)
    ]
    outcome = GOALS[0].outcome(rows)
    assert outcome is not None
    assert (outcome.wanted, outcome.got, outcome.met) == ("2.00x", "1.90x", False)
    assert GOALS[1].outcome(rows) is None


def test_interrupted_run_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(**options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(minilm, "load", load)
    assert models.main(["--smoke", "--json", str(tmp_path / "numbers.json")]) == 130
    assert list(tmp_path.iterdir()) == []
