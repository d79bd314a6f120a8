"""The benchmark of reading heads: it runs, and refuses numbers that differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="reads a transformers model")
pytest.importorskip("rich", reason="prints tables with rich")

from benchmarks import reading

pytestmark = pytest.mark.release


def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "reading.json"
    assert reading.main(["--smoke", "--out", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    ways = ["no reading, stock SDPA", "by maps", "ours"]
    assert [(row["reading"], row["way"]) for row in rows] == [
        (name, way) for name in ("statistics", "distance") for way in ways
    ]
    assert all(row["ms"] > 0 for row in rows)
    assert "x ours" in capsys.readouterr().out


def test_other_numbers_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, of_maps = reading.READINGS["distance"]

    def wrong(*call: object) -> reading.Reading:
        return {"distance": ours(*call)["distance"] + 0.01}

    monkeypatch.setitem(reading.READINGS, "distance", (wrong, of_maps))
    assert reading.main(["--smoke"]) == 1
    assert "FAIL distance, T 24: distance differs by 1.0e-02" in capsys.readouterr().out


def test_differences() -> None:
    expected = {"a": torch.tensor([0.5]), "b": torch.tensor([300.0])}
    assert not list(reading.differences(expected, expected))
    assert not list(reading.differences({"b": torch.tensor([300.002])}, expected))
    assert list(reading.differences({"a": torch.tensor([0.5001])}, expected))
    assert list(reading.differences({"a": torch.tensor([float("nan")])}, expected))
