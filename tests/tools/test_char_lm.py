"""The example runs, writes what it prints, and leaves nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.release

pytest.importorskip("rich", reason="the example shows its progress with rich")

EXAMPLES = str(Path(__file__).parents[2] / "examples")


@pytest.fixture
def char_lm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    import char_lm

    return char_lm


def test_runs_in_its_quick_form(
    char_lm: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.json"
    assert char_lm.main(["--quick", "--steps", "4", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["settings"]["steps"] == 4
    base, control, penalised, scheduled = found["runs"]
    assert (base["steps"], control["steps"]) == (4, 2)
    assert penalised["lambda"] == 0.01
    for row in (penalised, scheduled):
        for rule in ("binary", "mean"):
            assert sum(row[rule]["by_layer"]) == row[rule]["open"]
            assert 4 < row[rule]["bits"] < 8  # log2 of 103 characters is 6.7
    assert scheduled["binary"]["open"] == scheduled["mean"]["open"] == scheduled["asked"] == 3
    assert scheduled["binary"]["bits"] == scheduled["mean"]["bits"]
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]
    shown = capsys.readouterr().out
    assert "control, no gates" in shown
    assert f"{scheduled['mean']['bits']:.3f}" in shown


def test_seeds_reproduce(char_lm: ModuleType, tmp_path: Path) -> None:
    def rows(seed: int) -> list[object]:
        out = tmp_path / f"{seed}.json"
        char_lm.main(["--quick", "--steps", "2", "--seed", str(seed), "--out", str(out)])
        runs = json.loads(out.read_text())["runs"]
        return [{key: row[key] for key in row if key != "seconds"} for row in runs]

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)


def test_interrupted_it_keeps_the_runs_that_were_finished(
    char_lm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "table.json"
    monkeypatch.setattr(char_lm, "by_both_rules", interrupt)
    assert char_lm.main(["--quick", "--steps", "2", "--out", str(out)]) == 130
    assert [row["name"] for row in json.loads(out.read_text())["runs"]] == [
        "base",
        "control, no gates",
    ]

    monkeypatch.setattr(char_lm.os, "replace", interrupt)
    before = out.read_text()
    assert char_lm.main(["--quick", "--steps", "2", "--out", str(out)]) == 130
    assert out.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


@pytest.mark.parametrize(
    "arguments", [["--steps", "1"], ["--steps", "many"], ["--out", "no/such/x"]]
)
def test_bad_options(
    char_lm: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        char_lm.main(["--quick", *arguments])
    assert arguments[0] in capsys.readouterr().err
