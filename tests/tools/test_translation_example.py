"""examples/translation: it runs at tiny sizes, does what it says, and an interrupted run leaves nothing behind."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import heads_kernels as hk

pytestmark = pytest.mark.release

for name in ("rich", "matplotlib", "safetensors"):
    pytest.importorskip(name, reason="the examples need heads_kernels[examples]")

EXAMPLE = Path(__file__).parents[2] / "examples" / "translation"
FILES = {"pruned.safetensors", "open_heads.png", "results.json"}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Its `__main__.py` as a module; what it changes for the whole process is set back."""
    monkeypatch.syspath_prepend(EXAMPLE)
    spec = importlib.util.spec_from_file_location("translation_example", EXAMPLE / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        spec.loader.exec_module(module)
        yield module
    torch.set_num_threads(threads)
    for path in EXAMPLE.glob("*.py"):
        if path.stem != "__main__":
            del sys.modules[path.stem]


@pytest.fixture
def pairs(example: ModuleType, tmp_path: Path) -> str:
    """A file of 60 sentence pairs."""
    lines = ["\t".join(map(" ".join, pair)) for pair in example.invented_pairs(60, seed=3)]
    path = tmp_path / "pairs.tsv"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_command_with_heads(pairs: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sizes = "--pairs", pairs, "--steps", "3", "--gated-steps", "5", "--heads", "7"
    command = [sys.executable, EXAMPLE, *sizes, "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == FILES
    assert (out / "open_heads.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((out / "results.json").read_text())
    assert results["checks"] == {"pruned = gated": True, "loaded = pruned, bit for bit": True}

    before, gated, pruned, control = results["rows"]
    assert [row["model"] for row in results["rows"]] == [
        "before", "gated", "pruned", "control",
    ]  # fmt: skip
    assert before["open_heads"] == control["open_heads"] == dict.fromkeys(gated["open_heads"], 12)
    assert gated["open_heads"] == pruned["open_heads"]
    assert sum(gated["open_heads"].values()) == 7
    assert results["history"][-1][1] == gated["open_heads"]
    # A head is 16 rows of W_Q, W_K, W_V with their biases, and 16 columns of W_O.
    gone = 29 * 16 * (4 * 64 + 3)
    assert pruned["parameters"] == before["parameters"] - gone == gated["parameters"] - 36 - gone
    assert all(row["seconds"] > 0 for row in results["rows"])
    for row in results["rows"]:
        assert f"{row['parameters']:,}" in done.stdout


def test_a_large_penalty_closes_every_head(example: ModuleType, pairs: str, tmp_path: Path) -> None:
    arguments = "--steps", "1", "--gated-steps", "10", "--penalty", "50", "--pairs", pairs
    assert example.main([*arguments, "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert sum(results["rows"][2]["open_heads"].values()) == 0
    assert all(results["checks"].values())


def test_interrupted(
    example: ModuleType, pairs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    training = sys.modules["training"]
    learn_on = training.train

    def train(*arguments: object) -> Iterator[tuple[int, float]]:
        for step, loss in learn_on(*arguments):
            yield step, loss
            if arguments[4] is not training.no_penalty and step == 2:  # with gates
                raise KeyboardInterrupt

    monkeypatch.setattr(training, "train", train)
    out = tmp_path / "out"
    sizes = "--steps", "2", "--gated-steps", "9", "--pairs", pairs
    assert example.main([*sizes, "--out", str(out)]) == 130
    shown = capsys.readouterr().out
    assert "before" in shown
    assert "interrupted in gates, step 2 of 9" in shown
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "37"], "invalid choice: 37"),
        (["--heads", "3", "--penalty", "0.1"], "not allowed with"),
        (["--penalty", "-1"], "is '-1'; pass a number such as 0.02"),
        (["--steps", "0"], "is '0'; pass a whole number, 1 or more"),
        (["--pairs", "nowhere.tsv"], "No such file"),
        (["--out", "/dev/null/out"], "argument --out"),
    ],
)
def test_bad_option(
    example: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        example.main(arguments)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_file_of_pairs_is_read_strictly(example: ModuleType, tmp_path: Path) -> None:
    corpus = sys.modules["corpus"]
    path = tmp_path / "pairs.tsv"
    path.write_text("a b\tc\na  b\td e\nb\tc c\n")
    assert corpus.read_pairs(path) == [(["a", "b"], ["d", "e"]), (["b"], ["c", "c"])]
    path.write_text("a b\tc\nno tab\n")
    with pytest.raises(ValueError, match=r"line 2 is 'no tab'; write source, tab, target"):
        corpus.read_pairs(path)


def test_the_languages_are_a_matter_of_the_seed(example: ModuleType) -> None:
    assert example.invented_pairs(50, seed=1) == example.invented_pairs(50, seed=1)
    assert example.invented_pairs(50, seed=1) != example.invented_pairs(50, seed=2)


def test_a_sentence_has_one_translation(example: ModuleType) -> None:
    grammar = sys.modules["languages"].Grammar(0)
    found: dict[tuple[str, ...], list[str]] = {}
    drawn = [grammar.sentence() for _ in range(3000)]
    for source, target in drawn:
        assert found.setdefault(tuple(source), target) == target
    assert len(found) < len(drawn)  # some were drawn twice
    assert any(len(source) != len(target) for source, target in drawn)
    assert len(set(grammar.lexicon.values())) == len(grammar.lexicon)


def test_decoding_with_caches_is_decoding_without(example: ModuleType) -> None:
    """Greedy translation word by word, and the words that the whole model predicts after them."""
    corpus = example.Corpus(example.invented_pairs(40, seed=0), seed=0)
    torch.manual_seed(0)
    sizes = len(corpus.source.words), len(corpus.target.words), corpus.longest
    model = example.Translator(*sizes, width=16, heads=2, layers=2).eval()
    source, _ = example.padded(corpus.held_out)
    words = model.translate(source)
    with torch.no_grad():
        again = model(source, words[:, :-1]).argmax(-1)
    ended = (words == sys.modules["corpus"].END).cumsum(1)[:, :-1] > 0
    real = (words[:, :-1] != sys.modules["corpus"].PAD).cumprod(1).bool() & ~ended
    assert real.sum() > len(words)
    assert torch.equal(words[:, 1:][real], again[real])


def test_padding_changes_no_output(example: ModuleType) -> None:
    corpus = example.Corpus(example.invented_pairs(40, seed=0), seed=0)
    torch.manual_seed(0)
    sizes = len(corpus.source.words), len(corpus.target.words), corpus.longest
    model = example.Translator(*sizes, width=16, heads=2, layers=2).eval()
    together = example.outputs(model, example.padded(corpus.held_out))
    for row, (source, target) in zip(together, corpus.held_out, strict=True):
        alone = example.outputs(model, example.padded([(source, target)]))[0]
        torch.testing.assert_close(row[: len(alone)], alone)
    assert {layer.kind for layer in hk.heads.attention_layers(model)} == {
        "encoder", "decoder", "cross",
    }  # fmt: skip
