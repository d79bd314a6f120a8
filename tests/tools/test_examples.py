"""The examples run at tiny sizes, write what they print, and an interrupted run leaves no half-written file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.examples import EXAMPLES, example

pytestmark = pytest.mark.release

for name in ("rich", "matplotlib", "safetensors"):
    pytest.importorskip(name, reason="the examples need heads_kernels[examples]")


def interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


# ---------------------------------------------------------------------- char_lm
@pytest.fixture
def char_lm() -> Iterator[ModuleType]:
    with example("char_lm.py") as module:
        yield module


def test_char_lm(char_lm: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.json"
    assert char_lm.main(["--quick", "--steps", "4", "--out", str(out)]) == 0
    base, control, penalised, scheduled = json.loads(out.read_text())["runs"]
    assert (base["steps"], control["steps"]) == (4, 2)
    for row in (penalised, scheduled):
        for rule in ("binary", "mean"):
            assert sum(row[rule]["by_layer"]) == row[rule]["open"]
            assert 4 < row[rule]["bits"] < 8  # log2 of 103 characters is 6.7
    assert scheduled["binary"]["open"] == scheduled["mean"]["open"] == scheduled["asked"] == 3
    assert f"{scheduled['mean']['bits']:.3f}" in capsys.readouterr().out


def test_char_lm_interrupted(
    char_lm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the runs that were finished, and what was there where the write itself is interrupted."""
    out, command = tmp_path / "table.json", ["--quick", "--steps", "2"]
    monkeypatch.setattr(char_lm, "by_both_rules", interrupt)
    assert char_lm.main([*command, "--out", str(out)]) == 130
    assert [row["name"] for row in json.loads(out.read_text())["runs"]] == [
        "base", "control, no gates",
    ]  # fmt: skip
    monkeypatch.setattr(char_lm.os, "replace", interrupt)
    before = out.read_text()
    assert char_lm.main([*command, "--out", str(out)]) == 130
    assert out.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


# ---------------------------------------------------------------------- translation
@pytest.fixture
def translation() -> Iterator[ModuleType]:
    with example("translation/__main__.py") as module:
        yield module


@pytest.fixture
def pairs(translation: ModuleType, tmp_path: Path) -> str:
    """A file of 60 sentence pairs."""
    lines = ["\t".join(map(" ".join, pair)) for pair in translation.invented_pairs(60, seed=3)]
    path = tmp_path / "pairs.tsv"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_translation(pairs: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sizes = "--pairs", pairs, "--steps", "3", "--gated-steps", "5", "--heads", "7"
    command = [sys.executable, EXAMPLES / "translation", *sizes, "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {
        "pruned.safetensors", "open_heads.png", "results.json",
    }  # fmt: skip
    results = json.loads((out / "results.json").read_text())
    assert results["checks"] == {"pruned = gated": True, "loaded = pruned, bit for bit": True}
    before, gated, pruned, control = results["rows"]
    assert before["open_heads"] == control["open_heads"] == dict.fromkeys(gated["open_heads"], 12)
    assert gated["open_heads"] == pruned["open_heads"]
    assert sum(gated["open_heads"].values()) == 7
    # A head is 16 rows of W_Q, W_K, W_V with their biases, and 16 columns of W_O.
    gone = 29 * 16 * (4 * 64 + 3)
    assert pruned["parameters"] == before["parameters"] - gone == gated["parameters"] - 36 - gone
    assert all(f"{row['parameters']:,}" in done.stdout for row in results["rows"])


def test_translation_interrupted(
    translation: ModuleType, pairs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, out = sys.modules["training"], tmp_path / "out"
    learn_on = training.train

    def train(*arguments: object) -> Iterator[tuple[int, float]]:
        for step, loss in learn_on(*arguments):
            yield step, loss
            if arguments[4] is not training.no_penalty and step == 2:  # with gates
                raise KeyboardInterrupt

    monkeypatch.setattr(training, "train", train)
    sizes = "--steps", "2", "--gated-steps", "9", "--pairs", pairs
    assert translation.main([*sizes, "--out", str(out)]) == 130
    assert list(out.iterdir()) == []


# ---------------------------------------------------------------------- pair_bias
def test_pair_bias(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "pair_bias", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "without pair bias" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("example", "options"),
    [
        ("char_lm.py", ["--quick", "--out", "no/such/x"]),
        ("pair_bias", ["--steps", "0"]),
        ("translation", ["--pairs", "nowhere.tsv"]),
    ],
)
def test_a_bad_option_is_named(example: str, options: list[str]) -> None:
    command = [sys.executable, EXAMPLES / example, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert options[-2] in done.stderr
