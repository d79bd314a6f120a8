"""The examples run at tiny sizes and write what they print; modules of pair_bias are the published algorithms."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.commands import python
from tests.support.examples import EXAMPLES, example

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


def test_pair_bias(tmp_path: Path) -> None:
    done = python(EXAMPLES / "pair_bias", "--steps", "2", cwd=tmp_path)
    assert "without pair bias" in done.stdout
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- the algorithms of pair_bias, written out
N, S, HEADS, WIDTH = 5, 3, 2, 3  # residues, rows; width of a head


class Reference(nn.Module):
    """Projections under the names of the reference layout; `biased` are those with a bias."""

    def __init__(self, width: int, c_z: int, biased: str, norms: dict[str, int], pairs: str) -> None:
        super().__init__()
        for name, size in norms.items():
            setattr(self, name, nn.LayerNorm(size))
        setattr(self, pairs, nn.Linear(c_z, HEADS, bias=False))
        self.mha = nn.Module()
        for letter in "qkvg":
            linear = nn.Linear(width, HEADS * WIDTH, bias=letter in biased)
            setattr(self.mha, f"linear_{letter}", linear)
        self.mha.linear_o = nn.Linear(HEADS * WIDTH, width, bias="o" in biased)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.7)
        self.double()

    def heads(self, letter: str, x: Tensor) -> Tensor:
        """`[..., H, c]`."""
        return getattr(self.mha, f"linear_{letter}")(x).unflatten(-1, (HEADS, WIDTH))

    def close(self, x: Tensor, attended: Tensor) -> Tensor:
        """The gate and the output projection; `attended` is `[..., H, c]`."""
        return self.mha.linear_o((self.heads("g", x).sigmoid() * attended).flatten(-2))


def attend(r: Reference, x: Tensor, bias: Tensor) -> Tensor:
    """Of `x` `[..., N, c]` with a bias `[..., N, N, H]` of the pairs (i, j)."""
    q, k, v = (r.heads(letter, x) for letter in "qkv")
    p = (torch.einsum("...ihc,...jhc->...ijh", q, k) / WIDTH**0.5 + bias).softmax(-2)
    return r.close(x, torch.einsum("...ijh,...jhc->...ihc", p, v))


def msa_rows(r: Reference, m: Tensor, z: Tensor) -> Tensor:
    """AlphaFold 2, algorithm 7."""
    return attend(r, r.layer_norm_m(m), r.linear_z(r.layer_norm_z(z))[:, None])


def starting(r: Reference, z: Tensor) -> Tensor:
    """AlphaFold 2, algorithm 13."""
    z = r.layer_norm(z)
    return attend(r, z, r.linear(z)[:, None])


def ending(r: Reference, z: Tensor) -> Tensor:
    """AlphaFold 2, algorithm 14: of each column, with the bias of the pair (k, i)."""
    return starting(r, z.transpose(1, 2)).transpose(1, 2)


def tokens(r: Reference, a: Tensor, z: Tensor) -> Tensor:
    """AlphaFold 3, algorithm 24, without conditioning."""
    return attend(r, r.layer_norm_a(a), r.linear_b(r.layer_norm_z(z)))


def random(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64)


ALGORITHMS = {"rows": msa_rows, "starting": starting, "ending": ending, "tokens": tokens}


def made(name: str) -> tuple[nn.Module, Reference, tuple[Tensor, ...]]:
    """A module, its reference and inputs."""
    modules, sizes = sys.modules["modules"], {"heads": HEADS, "head_dim": WIDTH}
    z = random(2, N, N, 6)
    if name == "rows":
        norms = {"layer_norm_m": 8, "layer_norm_z": 6}
        module: nn.Module = modules.MSARowAttention(8, 6, **sizes)
        reference, inputs = Reference(8, 6, "go", norms, "linear_z"), (random(2, S, N, 8), z)
    elif name == "tokens":
        norms = {"layer_norm_a": 8, "layer_norm_z": 6}
        module = modules.AttentionWithPairBias(8, 6, **sizes)
        reference, inputs = Reference(8, 6, "q", norms, "linear_b"), (random(2, N, 8), z)
    else:
        module = modules.TriangleAttention(6, **sizes, ending=name == "ending")
        reference, inputs = Reference(6, 6, "go", {"layer_norm": 6}, "linear"), (z,)
    return module.double(), reference, inputs


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_module_of_pair_bias_is_its_algorithm(name: str) -> None:
    """With the weights of the reference layout."""
    with example("pair_bias/__main__.py"):
        module, reference, inputs = made(name)
        sys.modules["modules"].load_reference(module, reference.state_dict())
        assert_alike(module(*inputs), ALGORITHMS[name](reference, *inputs))


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
