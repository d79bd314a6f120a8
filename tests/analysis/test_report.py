"""`python -m heads_kernels report`: the page, what is measured for it, interrupted runs, refused options and models."""

import argparse
import html
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.alike import assert_alike

pytest.importorskip("transformers", reason="needs the extra [report]")
pytest.importorskip("jinja2", reason="needs the extra [report]")
pytest.importorskip("matplotlib", reason="needs the extra [report]")

import tokenizers
import transformers

import heads_kernels as hk
from heads_kernels.__main__ import main
from heads_kernels.report import command, panels
from heads_kernels.report.inputs import Inputs, load
from tests.support.tiny_models import build

pytestmark = pytest.mark.check

TEXT = """\
the cat sat on the mat .
a dog saw the cat , and the cat saw a dog !

on the mat sat a bird
the bird saw $x$ & <b> .
"""
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *sorted(set(TEXT.split()))]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("tiny") / "bert", "bert")


def saved(path: Path, family: str, special: bool = True) -> Path:
    """A tiny model of random weights, with a tokenizer of words."""
    build(family).save_pretrained(path)
    save_tokenizer(path, special)
    return path


def save_tokenizer(path: Path, special: bool = True) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "[UNK]"}
    if special:
        words.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
        names |= {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(path)


def report(model: Path, text: Path, out: Path, *more: str) -> int:
    return main(["report", "--model", str(model), "--text", str(text), "--out", str(out), *more])


def loaded(model: Path, text: Path, *more: str) -> Inputs:
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    given = ["--model", str(model), "--text", str(text), "--out", str(model / "report.html"), *more]
    return load(parser.parse_args(given))


def values(page: str, attribute: str) -> list[str]:
    return re.findall(rf' {attribute}="([^"]*)"', page)


# ---------------------------------------------------------------------- the page
PANELS = [
    "importance", "pruning", "statistics", "statistics-targets", "roles", "distance", "energy",
    "maps", "maps-large",
]  # fmt: skip


def test_whole_page_of_a_pruned_model(bert: Path, text: Path, tmp_path: Path) -> None:
    model = transformers.AutoModel.from_pretrained(bert)
    hk.heads.prune(model, {0: range(4), 1: [1]})
    model.save_pretrained(tmp_path / "pruned")
    save_tokenizer(tmp_path / "pruned")
    out = tmp_path / "out" / "report.html"
    out.parent.mkdir()
    assert report(tmp_path / "pruned", text, out, "--sentence", "a cat <b> & a dog") == 0
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]
    page = out.read_text(encoding="utf-8")
    assert values(page, "id") == PANELS
    sections = re.findall("<section id=.*?</section>", page, re.S)
    assert all("</table>" in section or "<img" in section for section in sections)
    assert "2 layers, 3 heads" in page
    assert "[CLS] a cat &lt;b&gt; &amp; a dog [SEP]" in page
    assert "By leaving out" in page
    assert page.count("<img") == 3 + 1 + 1  # small maps, the sharpest, curves
    # Self-contained: links go to panels, pictures are inside, nothing is loaded.
    assert values(page, "href") == [f"#{panel}" for panel in PANELS]
    assert all(source.startswith("data:image/") for source in values(page, "src"))
    assert not re.search(r"<(script|link|iframe)\b|https?://|@import|url\(", page)


def test_fast(text: Path, tmp_path: Path) -> None:
    """No head is left out alone, and the page says so. The model has rotary positions, and no special tokens."""
    out = tmp_path / "report.html"
    assert report(saved(tmp_path / "llama", "llama", special=False), text, out, "--fast") == 0
    page = out.read_text(encoding="utf-8")
    assert values(page, "id") == PANELS
    assert f"Made with --fast: {panels.LEFT_OUT}." in page
    assert "By leaving out" not in page
    assert TEXT.splitlines()[0] in page


def test_snippet_prunes_the_heads_of_the_curve(
    bert: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pasted as it is, it gives the model of the curve's last point that is close enough."""
    monkeypatch.setattr(panels, "CLOSE", 0.2)
    found = panels.pruning(loaded(bert, text, "--fast"))
    assert report(bert, text, tmp_path / "report.html", "--fast") == 0
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    [code] = re.findall("<code>(.*?)</code>", page, re.S)
    exec(html.unescape(code), names)
    assert names["heads"] == found["prunable"]
    closed = sum(map(len, names["heads"].values()))
    assert closed == found["most"]["least important first"] > 0
    layers = hk.heads.attention_layers(names["model"])
    assert sum(layer.num_heads for layer in layers) == 8 - closed
    assert (tmp_path / "pruned" / "config.json").exists()


def test_numbers_are_those_of_the_readings(bert: Path, text: Path) -> None:
    inputs = loaded(bert, text, "--limit", "3")
    (batch,) = inputs.batches
    model = hk.integrations.transformers.use(transformers.AutoModel.from_pretrained(bert)).eval()
    confidence = hk.analysis.statistics(model, [batch], exclude_keys=[1, 2]).confidence
    got = torch.tensor(panels.statistics(inputs)["values"]["confidence"])
    assert_alike(got, torch.stack(confidence.scores).float(), dtype=torch.float32)

    def embedding(closed: dict[int, list[int]]) -> torch.Tensor:
        hk.heads.reopen(model)
        hk.heads.close(model, closed)
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state
        real = batch["attention_mask"][..., None]
        mean = (hidden * real).sum(1) / real.sum(1)
        return mean / mean.norm(dim=1, keepdim=True)

    whole, scores = embedding({}), panels.importance(inputs)["scores"]
    moved = (embedding({1: [2]}) - whole).square().sum(1).mean()
    assert_alike(torch.tensor(scores["leaving out"][1][2]), moved)

    curve = panels.pruning(inputs)
    assert curve["closed"] == list(range(9))
    _, layer, head = min((scores["Fisher"][n][h], n, h) for n in range(2) for h in range(4))
    every = {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    got = torch.tensor([curve["cosine"]["least important first"][place] for place in (0, 1, -1)])
    some = [embedding(closed) for closed in ({}, {layer: [head]}, every)]
    assert_alike(got, torch.stack([(each * whole).sum(1).mean() for each in some]))


@pytest.mark.parametrize("place", [(transformers.BertModel, "forward"), (Path, "replace")])
def test_interrupted_run_leaves_what_was_there(
    place: tuple[type, str], bert: Path, text: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """While the model runs, and while the page is written."""
    out = tmp_path / "report.html"
    out.write_text("an earlier page")

    monkeypatch.setattr(*place, mock.Mock(side_effect=KeyboardInterrupt))
    assert report(bert, text, out, "--fast") == 130
    assert "report.html is as it was" in capsys.readouterr().err
    assert out.read_text() == "an earlier page"
    assert list(tmp_path.iterdir()) == [out]


# ---------------------------------------------------------------------- refused
Refused = Callable[..., None]


@pytest.fixture
def assert_refused(bert: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """A run with other options says what it refuses, and writes nothing."""

    def check(*said: str, **changes: object) -> None:
        given = {"model": bert, "text": text, "out": tmp_path / "out.html"} | changes
        with pytest.raises(SystemExit) as stopped:
            main(["report", *(f"--{name}={value}" for name, value in given.items())])
        assert stopped.value.code == 2
        message = capsys.readouterr().err
        assert all(each in message for each in said)
        assert not (tmp_path / "out.html").exists()

    return check


def test_bad_options(assert_refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("blank.txt").write_text("\n \n")
    Path("latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    for option, value, said in (
        ("model", "nowhere", "no config.json"),
        ("text", "nowhere.txt", "No such file"),
        ("text", "blank.txt", "no text"),
        ("text", "latin.txt", "not UTF-8"),
        ("out", ".", "pass a file, such as report.html"),
        ("out", "none/report.html", "make the folder first"),
        ("limit", "0", "1 or more"),
        ("sentence", "cat " * 80, "at most 64"),
        ("sentence", " ", "pass some words"),
    ):
        assert_refused(f"argument --{option}: ", said, **{option: value})
    roberta = saved(tmp_path / "roberta", "roberta")  # whose positions begin after the padding index
    limit = 64 - 1 - transformers.AutoConfig.from_pretrained(roberta).pad_token_id
    assert_refused(f"at most {limit}", model=roberta, sentence="cat " * 80)
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert_refused("pip install 'heads_kernels[report]'")


def interrupted_download(path: Path) -> None:
    weights = saved(path, "bert") / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)


def tokenizer_of_another_model(path: Path) -> None:
    model = transformers.AutoModel.from_pretrained(saved(path, "bert"))
    model.resize_token_embeddings(8)
    model.save_pretrained(path)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: transformers.AutoConfig.for_model("t5").save_pretrained(path), "encoder-decoder"),
        (lambda path: saved(path, "vit"), "takes pixel_values (vit), not text"),
        (interrupted_download, "cannot be read"),
        (lambda path: (saved(path, "bert") / "tokenizer.json").unlink(), "has no tokenizer"),
        (tokenizer_of_another_model, "embeddings of 8 tokens"),
    ],
)
def test_models_that_are_refused(
    make: Callable[[Path], Any], said: str, assert_refused: Refused, tmp_path: Path
) -> None:
    make(tmp_path / "model")
    assert_refused("argument --model: ", said, model=tmp_path / "model")
