"""`python -m heads_kernels report`: the whole command on tiny models, resumed, interrupted, refused."""

from __future__ import annotations

import csv
import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.alike import assert_alike

pytest.importorskip("transformers", reason="needs the extra [report]")
pytest.importorskip("rich", reason="needs the extra [report]")
pytest.importorskip("matplotlib", reason="needs the extra [report]")

import tokenizers
import transformers

import heads_kernels as hk
from heads_kernels.__main__ import main
from heads_kernels.report import command, drawing, page, pictures, stages
from heads_kernels.report.page import SECTIONS
from heads_kernels.report.stages import STAGES
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
    return saved(tmp_path_factory.mktemp("tiny") / "bert", "bert", special=True)


@pytest.fixture
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without what takes most of their time."""
    monkeypatch.setattr(drawing, "svg", lambda _: "<svg/>")


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take most of the time of a tiny report."""
    monkeypatch.setattr(page, "html", lambda *_: "")


def saved(path: Path, family: str, special: bool, **options: Any) -> Path:
    """A tiny model of random weights, with a tokenizer of words."""
    build(family, **options).save_pretrained(path)
    save_tokenizer(path, special)
    return path


def save_tokenizer(path: Path, special: bool) -> None:
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "[UNK]"}
    if special:
        words.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
        names |= {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(path)


def report(model: Path, text: Path, out: Path, *more: str) -> int:
    words = ["report", "--model", str(model), "--text", str(text), "--out", str(out), *more]
    return main(words)


def read(out: Path, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"{stage}.json").read_text(encoding="utf-8"))
    return found


def page_of(out: Path) -> str:
    return (out / "index.html").read_text(encoding="utf-8")


def values(page: str, attribute: str) -> list[str]:
    return re.findall(rf' {attribute}="([^"]*)"', page)


def check_whole(out: Path) -> None:
    """Every stage, a page that needs no other file, nothing half written, no file that nobody reads."""
    files = {f"{stage}.{kind}" for stage in STAGES for kind in ("csv", "json")}
    assert {path.name for path in out.iterdir()} == files | {"index.html"}
    page = page_of(out)
    ids, alts = values(page, "id"), values(page, "alt")
    assert {section.anchor for section in SECTIONS} <= {*ids}
    assert {*values(page, "download")} == {f"{stage}.csv" for stage in STAGES}
    for link in values(page, "href") + values(page, "src"):
        assert link[1:] in ids if link.startswith("#") else link.startswith("data:")
    assert not re.search(r"<(script|link|iframe)\b|https?://|@import|url\(", page)
    sections = re.findall(r"<section id=.*?</section>", page, re.S)
    assert all("<img" in content for content in sections)
    assert len({*alts}) == page.count("<img") == page.count("<figcaption")
    assert all(re.search(r"\d", alt) and alt.endswith(".") for alt in alts)


# ---------------------------------------------------------------------- the whole command
def test_whole_report_of_a_pruned_model(bert: Path, text: Path, tmp_path: Path) -> None:
    model = transformers.AutoModel.from_pretrained(bert)
    hk.heads.prune(model, {0: range(4), 1: [1]})
    model.save_pretrained(tmp_path / "pruned")
    save_tokenizer(tmp_path / "pruned", special=True)
    out, options = (
        tmp_path / "out",
        ("--batch", "3", "--sentence", "a cat & a dog", "--heads", "1:2"),
    )
    assert report(tmp_path / "pruned", text, out, *options) == 0
    check_whole(out)
    assert [layer["heads"] for layer in read(out, "model")["table"]] == [0, 3]
    check_tables(out, [(1, 0), (1, 1), (1, 2)])
    assert "no heads left" in read(out, "energy")["skipped"][0]["reason"]
    assert read(out, "maps")["layers"] == [{"layer": 1, "heads": 3}]


def test_decoder_without_special_tokens(text: Path, tmp_path: Path, no_page: None) -> None:
    model, out = saved(tmp_path / "gpt2", "gpt2", special=False), tmp_path / "out"
    assert report(model, text, out) == 0
    check_tables(out, [(layer, head) for layer in range(2) for head in range(4)])
    assert len(read(out, "pruning")["table"]) == 11
    assert read(out, "maps")["tokens"] == TEXT.splitlines()[0].split()


def test_layers_and_positions_of_other_models(text: Path, tmp_path: Path, no_page: None) -> None:
    """A layer that runs twice; RoBERTa, whose 64 positions take 62 tokens where padding is token 1."""
    out, long = tmp_path / "out", tmp_path / "long.txt"
    albert = saved(tmp_path / "albert", "albert", special=True)
    assert report(albert, text, out, "--only", "statistics", "distance", "maps") == 0
    assert len(read(out, "statistics")["table"]) == 4
    assert [layer["layer"] for layer in read(out, "maps")["layers"]] == [0, 1]
    assert {row["layer"] for row in read(out, "distance")["table"]} == {0, 1}
    long.write_text("the cat sat on the mat " * 20)
    roberta = saved(tmp_path / "roberta", "roberta", special=True, pad_token_id=1)
    assert report(roberta, long, out, "--only", "statistics") == 0
    assert read(out, "model")["tokens"] == 62


def test_layers_without_energy(bert: Path, text: Path, tmp_path: Path) -> None:
    """Rotary positions, converted layers; then the page has no picture."""
    out, converted = tmp_path / "out", tmp_path / "converted"
    assert (
        report(saved(tmp_path / "llama", "llama", special=False), text, out, "--only", "energy")
        == 0
    )
    assert "rotary" in read(out, "energy")["skipped"][1]["reason"]
    assert "rotary" in page_of(out)
    assert "<img" not in page_of(out)
    model = transformers.AutoModel.from_pretrained(bert)
    hk.convert.collaborate(model, 32, method="ragged", layers=[1], progress=False)
    model.save_pretrained(converted)
    save_tokenizer(converted, special=True)
    assert report(converted, text, out, "--only", "energy") == 0
    assert "collaborative" in read(out, "energy")["skipped"][0]["reason"]


def check_tables(out: Path, heads: list[tuple[int, int]]) -> None:
    """A row for each head, in JSON as in CSV."""
    for stage in ("statistics", "roles", "distance", "importance"):
        rows = read(out, stage)["table"]
        assert [(row["layer"], row["head"]) for row in rows] == heads
        with (out / f"{stage}.csv").open(newline="") as file:
            assert [[*row] for row in csv.DictReader(file)] == [[*row] for row in rows]


def test_numbers_are_those_of_the_readings(
    bert: Path, text: Path, tmp_path: Path, no_page: None
) -> None:
    out = tmp_path / "out"
    report(bert, text, out, "--limit", "3", "--only", "statistics", "pruning", "importance")
    model = hk.integrations.transformers.use(transformers.AutoModel.from_pretrained(bert))
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
    lines = [line for line in TEXT.splitlines() if line][:3]
    tokens = tokenizer(lines, padding=True, return_tensors="pt")
    batch = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    expected = hk.analysis.statistics(model, [batch], exclude_keys=[1, 2])
    for column in ("confidence", "entropy", "distance", "to_previous"):
        got = torch.tensor([row[column] for row in read(out, "statistics")["table"]])
        want = torch.cat(getattr(expected, column).scores).float()
        assert_alike(got, want, dtype=torch.float32)

    def embedding() -> torch.Tensor:
        with torch.no_grad():
            hidden = model.eval()(**batch).last_hidden_state
        real = batch["attention_mask"][..., None]
        mean = (hidden * real).sum(1) / real.sum(1)
        return mean / mean.norm(dim=1, keepdim=True)

    whole, rows = embedding(), read(out, "importance")["table"]
    (row,) = (row for row in rows if (row["layer"], row["head"]) == (1, 2))
    hk.heads.close(model, {1: [2]})
    moved = (embedding() - whole).square().sum(1).mean()
    assert_alike(torch.tensor(row["leave_one_out"]), moved)

    def cosine(closed: dict[int, Any]) -> torch.Tensor:
        hk.heads.reopen(model)
        hk.heads.close(model, closed)
        return (embedding() * whole).sum(1).mean()

    curve, least = read(out, "pruning")["table"], min(rows, key=lambda row: row["fisher"])
    assert [row["closed"] for row in curve[:2]] == [0, 1]
    assert curve[-1]["importance"] == curve[-1]["reversed"]
    found = torch.tensor([curve[i]["importance"] for i in (0, 1, -1)])
    one, every = {least["layer"]: [least["head"]]}, {0: range(4), 1: range(4)}
    assert_alike(found, torch.stack([cosine({}), cosine(one), cosine(every)]))


def test_maps_are_for_bertviz(bert: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report(bert, text, out, "--only", "maps", "--sentence", "the dog sat", "--heads", "0:1", "1:3")
    found = read(out, "maps")
    assert found["tokens"] == ["[CLS]", "the", "dog", "sat", "[SEP]"]
    model = transformers.AutoModel.from_pretrained(bert, attn_implementation="eager").eval()
    ids = torch.tensor([[WORDS.index(word) for word in found["tokens"]]])
    attention = model(ids, output_attentions=True).attentions
    assert len(attention) == len(found["attention"])
    for got, want in zip(found["attention"], attention, strict=True):
        assert_alike(torch.tensor(got), want.detach(), dtype=torch.float32)
    text = page_of(out)
    assert "0:1 attends most to" in text
    assert "1:3 attends most to" in text
    assert "1:2 attends most to" not in text


def test_rarest_word_needs_a_text_of_many_words(
    bert: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_page: None
) -> None:
    """Where 2 words count as common, this text has enough."""
    assert report(bert, text, tmp_path / "few", "--only", "roles") == 0
    assert read(tmp_path / "few", "roles")["rarest_by_chance"] is None
    monkeypatch.setattr(stages, "COMMON", 2)
    assert report(bert, text, tmp_path / "many", "--only", "roles") == 0
    found = read(tmp_path / "many", "roles")
    assert 0 < found["rarest_by_chance"] < 1
    assert all(0 <= row["rarest"] <= 1 for row in found["table"])


def test_snippet_prunes_the_heads_of_the_curve(
    bert: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pasted as it is, it gives the model of the curve's last point that is close enough."""
    out = tmp_path / "out"
    monkeypatch.setattr(pictures, "CLOSE", 0.2)
    assert report(bert, text, out, "--only", "pruning") == 0
    curve = [row for row in read(out, "pruning")["table"] if row["importance"] >= 0.2]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    [code] = re.findall("<code>(.*?)</code>", page_of(out), re.S)
    exec(html.unescape(code), names)
    model = names["model"]
    assert sum(map(len, names["heads"].values())) == curve[-1]["closed"] > 0
    left = sum(layer.num_heads for layer in hk.heads.attention_layers(model))
    assert left == 8 - curve[-1]["closed"]
    assert (tmp_path / "pruned" / "config.json").exists()


def test_fast(bert: Path, text: Path, tmp_path: Path, passes: list[int], no_drawing: None) -> None:
    """Fewer passes, said on the page; the full report replaces it, and is not replaced by it."""
    out = tmp_path / "out"
    only = "--only", "importance", "pruning"
    assert report(bert, text, out, *only, "--fast") == 0
    fast, passes[0] = passes[0], 0
    assert "leave_one_out" not in read(out, "importance")["table"][0]
    assert [row["closed"] for row in read(out, "pruning")["table"]] == [0, 2, 3, 5, 6, 8]
    assert f"Made with --fast: {stages.LEFT_OUT}." in page_of(out)
    assert report(bert, text, out, *only) == 0
    assert passes[0] > 1.8 * fast
    assert "Made with --fast" not in page_of(out)
    passes[0] = 0
    assert report(bert, text, out, *only, "--fast") == 0
    assert passes[0] == 0
    assert "leave_one_out" in read(out, "importance")["table"][0]


# ---------------------------------------------------------------------- kept and gone on with
@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the batches that go through the model."""
    counted, forward = [0], transformers.BertModel.forward

    def count(self: Any, *arguments: Any, **more: Any) -> Any:
        counted[0] += 1
        return forward(self, *arguments, **more)

    monkeypatch.setattr(transformers.BertModel, "forward", count)
    return counted


def test_only_what_is_new_is_computed(
    text: Path, tmp_path: Path, passes: list[int], no_page: None
) -> None:
    model, other, out = tmp_path / "model", tmp_path / "other.txt", tmp_path / "out"
    saved(model, "bert", special=True)
    other.write_text(TEXT + "a bird .\n")

    def computed(path: Path, *more: str) -> int:
        passes[0] = 0
        assert report(model, path, out, "--only", "statistics", "maps", *more) == 0
        return passes[0]

    assert computed(text) > 2
    assert computed(text, "--batch", "1", "--heads", "1:1") == 0
    assert computed(text, "--sentence", "a dog") == 1  # its maps alone
    assert computed(other)
    assert computed(other, "--tokens", "5")
    assert computed(other, "--limit", "3")
    saved(model, "bert", special=True)
    assert computed(other, "--limit", "3")
    (out / "statistics.json").write_text('{"half')
    assert computed(other, "--limit", "3")
    assert computed(other, "--limit", "3") == 0


def test_no_results_of_another_text_remain(
    bert: Path, text: Path, tmp_path: Path, no_drawing: None
) -> None:
    """Neither files nor sections; results of this text remain, and so does what another program wrote."""
    out = tmp_path / "out"
    report(bert, text, out, "--only", "roles")
    report(bert, text, out, "--only", "energy")
    assert {*values(page_of(out), "download")} == {"model.csv", "roles.csv", "energy.csv"}
    (out / "maps.json").write_text('{"fingerprint": "of another program"}')
    report(bert, text, out, "--only", "energy", "--limit", "2")
    assert {*values(page_of(out), "download")} == {"model.csv", "energy.csv"}
    assert {path.name for path in out.iterdir()} == {
        "model.csv", "model.json", "energy.csv", "energy.json", "index.html", "maps.json",
    }  # fmt: skip


def test_interrupted_run_leaves_whole_files(
    bert: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, no_page: None,
) -> None:  # fmt: skip
    out, forward, left = tmp_path / "out", transformers.BertModel.forward, [12]

    def interrupt(self: Any, *arguments: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return forward(self, *arguments, **more)

    monkeypatch.setattr(transformers.BertModel, "forward", interrupt)
    only = "--batch", "2", "--only", "statistics", "roles", "importance", "energy"
    assert report(bert, text, out, *only) == 130
    said = capsys.readouterr().out
    assert re.search(r"interrupted in importance, batch \d+ of about \d+", said)
    done = {path.name for path in out.iterdir()}
    stages = ("model", "statistics", "roles")
    assert done == {f"{stage}.{kind}" for stage in stages for kind in ("csv", "json")}
    assert report(bert, text, out, *only) == 0
    assert "roles        saved before" in capsys.readouterr().out
    assert {"importance.json", "energy.json"} <= {path.name for path in out.iterdir()}


def test_interrupted_write_leaves_what_was_there(
    bert: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_drawing: None
) -> None:
    out = tmp_path / "out"
    report(bert, text, out, "--only", "energy")
    before = (out / "index.html").read_bytes()

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    assert report(bert, text, out, "--only", "energy", "maps") == 130
    assert (out / "index.html").read_bytes() == before
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


# ---------------------------------------------------------------------- refused
def assert_refused(capsys: pytest.CaptureFixture[str], said: list[str], *words: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["report", *words])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert all(each in message for each in said)


def test_bad_options(
    bert: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("blank.txt").write_text("\n \n")
    Path("latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    good = {"--model": str(bert), "--text": str(text), "--out": "out"}
    for option, value, said in (
        ("--model", "nowhere", "no config.json"),
        ("--text", "blank.txt", "no text"),
        ("--text", "latin.txt", "not UTF-8"),
        ("--out", "latin.txt", "File exists"),
        ("--limit", "0", "1 or more"),
        ("--heads", "2:0", "layers 0 to 1"),
        ("--sentence", "cat " * 80, "at most 64"),
    ):
        given = good | {option: value}
        assert_refused(capsys, [option, said], *(word for pair in given.items() for word in pair))
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    given = good | {"--limit": "2"}
    extra = "pip install 'heads_kernels[report]'"
    assert_refused(capsys, [extra], *(word for pair in given.items() for word in pair))


def truncated_weights(path: Path) -> None:
    weights = saved(path, "bert", special=True) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def no_tokenizer(path: Path) -> None:
    (saved(path, "bert", special=True) / "tokenizer.json").unlink()


def tokenizer_of_another_model(path: Path) -> None:
    model = transformers.AutoModel.from_pretrained(saved(path, "bert", special=True))
    model.resize_token_embeddings(8)
    model.save_pretrained(path)


def no_weights(family: str) -> Callable[[Path], None]:
    return lambda path: transformers.AutoConfig.for_model(family).save_pretrained(path)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (no_weights("t5"), "encoder-decoder"),
        (no_weights("mobilebert"), "cannot be read"),
        (lambda path: saved(path, "vit", special=True), "takes pixel_values (vit), not text"),
        (truncated_weights, "cannot be read"),
        (no_tokenizer, "has no tokenizer"),
        (tokenizer_of_another_model, "embeddings of 8 tokens"),
    ],
)
def test_models_that_are_refused(
    make: Callable[[Path], Any], said: str, text: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    make(tmp_path / "model")
    words = "--model", str(tmp_path / "model"), "--text", str(text), "--out", str(tmp_path / "out")
    assert_refused(capsys, ["--model", said], *words)
