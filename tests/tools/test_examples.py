"""The examples run at tiny sizes, write what they print, and refuse bad options by name."""

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


# ---------------------------------------------------------------------- translation
def test_translation(tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "pairs.tsv"
    with example("translation/__main__.py") as module:
        pairs = module.invented_pairs(60, seed=3)
    file.write_text("".join("\t".join(map(" ".join, pair)) + "\n" for pair in pairs))
    sizes = "--pairs", str(file), "--steps", "3", "--gated-steps", "5", "--heads", "7"
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
