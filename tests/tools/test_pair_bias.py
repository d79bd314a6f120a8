"""examples/pair_bias: the modules are the published algorithms, the reference layout loads, and pair bias is needed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from tests.support.alike import assert_alike

pytestmark = pytest.mark.release

EXAMPLE = Path(__file__).parents[2] / "examples" / "pair_bias"
N, S, HEADS, WIDTH = 5, 3, 2, 3  # residues, rows; width of a head


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Its `__main__.py` as a module; what it changes for the whole process is set back."""
    monkeypatch.syspath_prepend(EXAMPLE)
    spec = importlib.util.spec_from_file_location("pair_bias_example", EXAMPLE / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    threads = torch.get_num_threads()
    spec.loader.exec_module(module)
    yield module
    torch.set_num_threads(threads)
    for path in EXAMPLE.glob("*.py"):
        if path.stem != "__main__":
            del sys.modules[path.stem]


# ---------------------------------------------------------------------- the algorithms, written out
class Reference(nn.Module):
    """Projections under the names of the reference layout; `biased` are those with a bias."""

    def __init__(
        self, width: int, c_z: int, biased: str, norms: dict[str, int], pairs: str
    ) -> None:
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


def msa_rows(r: Reference, m: Tensor, z: Tensor) -> Tensor:
    """AlphaFold 2, algorithm 7."""
    m = r.layer_norm_m(m)
    q, k, v = (r.heads(letter, m) for letter in "qkv")
    b = r.linear_z(r.layer_norm_z(z))
    a = torch.einsum("bsihc,bsjhc->bsijh", q, k) / WIDTH**0.5 + b[:, None]
    return r.close(m, torch.einsum("bsijh,bsjhc->bsihc", a.softmax(-2), v))


def starting(r: Reference, z: Tensor) -> Tensor:
    """AlphaFold 2, algorithm 13."""
    z = r.layer_norm(z)
    q, k, v = (r.heads(letter, z) for letter in "qkv")
    b = r.linear(z)
    a = torch.einsum("bijhc,bikhc->bijkh", q, k) / WIDTH**0.5
    a = (a + b[:, None]).softmax(-2)
    return r.close(z, torch.einsum("bijkh,bikhc->bijhc", a, v))


def ending(r: Reference, z: Tensor) -> Tensor:
    """AlphaFold 2, algorithm 14."""
    z = r.layer_norm(z)
    q, k, v = (r.heads(letter, z) for letter in "qkv")
    b = r.linear(z)
    a = torch.einsum("bijhc,bkjhc->bijkh", q, k) / WIDTH**0.5
    a = (a + torch.einsum("bkih->bikh", b)[:, :, None]).softmax(-2)
    return r.close(z, torch.einsum("bijkh,bkjhc->bijhc", a, v))


def tokens(r: Reference, a: Tensor, z: Tensor) -> Tensor:
    """AlphaFold 3, algorithm 24, without conditioning."""
    a = r.layer_norm_a(a)
    q, k, v = (r.heads(letter, a) for letter in "qkv")
    b = r.linear_b(r.layer_norm_z(z))
    p = (torch.einsum("bihc,bjhc->bijh", q, k) / WIDTH**0.5 + b).softmax(-2)
    return r.close(a, torch.einsum("bijh,bjhc->bihc", p, v))


def random(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64, requires_grad=True)


def held(example: ModuleType, name: str) -> tuple[nn.Module, Reference, object, tuple[Tensor, ...]]:
    """A module, its reference, the algorithm written out, and inputs."""
    modules, sizes = sys.modules["modules"], {"heads": HEADS, "head_dim": WIDTH}
    z, c_m, c_z = random(2, N, N, 6), 8, 6
    if name == "rows":
        reference = Reference(
            c_m, c_z, "go", {"layer_norm_m": c_m, "layer_norm_z": c_z}, "linear_z"
        )
        return (
            modules.MSARowAttention(c_m, c_z, **sizes),
            reference,
            msa_rows,
            (random(2, S, N, c_m), z),
        )
    if name == "tokens":
        reference = Reference(c_m, c_z, "q", {"layer_norm_a": c_m, "layer_norm_z": c_z}, "linear_b")
        return (
            modules.AttentionWithPairBias(c_m, c_z, **sizes),
            reference,
            tokens,
            (random(2, N, c_m), z),
        )
    reference = Reference(c_z, c_z, "go", {"layer_norm": c_z}, "linear")
    module = modules.TriangleAttention(c_z, **sizes, ending=name == "ending")
    return module, reference, ending if name == "ending" else starting, (z,)


@pytest.mark.parametrize("name", ["rows", "starting", "ending", "tokens"])
def test_a_module_is_its_algorithm(example: ModuleType, name: str) -> None:
    """With the weights of the reference layout; outputs and all gradients."""
    module, reference, algorithm, inputs = held(example, name)
    module = module.double()
    sys.modules["modules"].load_reference(module, reference.state_dict())
    out, expected = module(*inputs), algorithm(reference, *inputs)  # type: ignore[operator]
    assert_alike(out, expected)
    weight = torch.randn_like(out)
    found = torch.autograd.grad((out * weight).sum(), (*inputs, *module.parameters()))
    wanted = torch.autograd.grad((expected * weight).sum(), (*inputs, *reference.parameters()))
    assert_alike(found[: len(inputs)], wanted[: len(inputs)])
    paths = [name.rpartition(".") for name, _ in reference.named_parameters()]
    names = sys.modules["modules"].REFERENCE
    theirs = [f"{names[path.rpartition('.')[2]]}.{kind}" for path, _, kind in paths]
    ours = [name for name, _ in module.named_parameters()]
    by_name = (
        dict(zip(some, grads[len(inputs) :], strict=True))
        for some, grads in ((ours, found), (theirs, wanted))
    )
    assert_alike(*by_name)


def test_names_and_weights_that_do_not_fit_are_refused(example: ModuleType) -> None:
    module, reference, _, _ = held(example, "rows")
    load, state = sys.modules["modules"].load_reference, reference.state_dict()
    with pytest.raises(KeyError, match="linear_x"):
        load(module, {**state, "linear_x.weight": torch.zeros(1)})
    del state["mha.linear_g.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*attention\.gate_proj\.weight"):
        load(module, state)


@pytest.mark.parametrize("name", ["rows", "starting", "ending"])
def test_padding_changes_no_real_element(example: ModuleType, name: str) -> None:
    module, _, _, inputs = held(example, name)
    module = module.double()
    real = torch.tensor([True] * (N - 2) + [False] * 2)
    mask = real.expand(2, S, N) if name == "rows" else (real[:, None] & real).expand(2, N, N)
    short = [
        x[..., : N - 2, :] if name == "rows" and x is inputs[0] else x[:, : N - 2, : N - 2]
        for x in inputs
    ]
    out, expected = module(*inputs, mask=mask), module(*short)
    assert_alike(out[mask], expected.flatten(0, -2))


def test_conditioned_tokens_start_almost_closed(example: ModuleType) -> None:
    """AlphaFold 3, algorithms 24 and 26: adaptive norm, output gated by what conditions the layer, one more bias."""
    module = sys.modules["modules"].AttentionWithPairBias(8, 6, c_s=4, heads=HEADS, head_dim=WIDTH)
    module = module.double()
    a, z, s = random(2, N, 8), random(2, N, N, 6), random(2, N, 4)
    nn.init.zeros_(module.open.weight)
    beta = torch.zeros(N, N, dtype=torch.float64).masked_fill(
        ~torch.eye(N, dtype=torch.bool), -torch.inf
    )
    normed = nn.functional.layer_norm(s, (4,), module.norm_s.weight)
    adapted = module.scale(normed).sigmoid() * nn.functional.layer_norm(a, (8,)) + module.shift(
        normed
    )
    layer = module.attention  # each token sees itself alone
    expected = layer.out_proj(layer.gate_proj(adapted).sigmoid() * layer.v_proj(adapted))
    assert_alike(module(a, z, s, beta), expected / (1 + torch.exp(torch.tensor(2.0).double())))


def test_heads_can_be_read_and_pruned(example: ModuleType) -> None:
    module, _, _, inputs = held(example, "rows")
    module = module.double()
    with torch.no_grad():
        hk.heads.close(module, {0: [1]})
        expected = module(*inputs)
        hk.heads.prune(module, hk.heads.closed(module))
        with pytest.raises(ValueError, match=r"bias has 2 heads; pass 1"):
            module(*inputs)
        module.bias.weight = nn.Parameter(module.bias.weight[[0]])
        assert_alike(module(*inputs), expected)


# ---------------------------------------------------------------------- the task
def test_chains_are_those_of_alpha_carbons(example: ModuleType) -> None:
    chains = sys.modules["chains"]
    batch = chains.draw(20, 2, 30, torch.Generator().manual_seed(0))
    bonds = batch.distances.diagonal(1, -2, -1)
    assert_alike(bonds, torch.full_like(bonds, chains.BOND), dtype=torch.float32)
    assert batch.known.diagonal(1, -2, -1).all()
    assert torch.equal(batch.known, batch.known.mT)
    share = batch.known.triu(2).sum() / (20 * 29 * 28 / 2)
    assert 0.3 < share < 0.4
    helix = chains._walk(torch.full((1, 9), 91.0), torch.full((1, 9), 50.0))
    turn = torch.cdist(helix, helix)[0].diagonal(3)
    assert ((turn > 4.8) & (turn < 5.4)).all()  # Angstrom, from one turn of a helix to the next


def test_pair_bias_is_needed(example: ModuleType) -> None:
    said: list[str] = []
    options = example.argparse.Namespace(steps=150, seed=0)
    found = example.experiment(options, said.append)
    assert len(said) == 5
    before, biased, plain = (found[name][0] for name in found)
    assert biased < plain < before


def test_command(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLE, "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "without pair bias" in done.stdout
    assert not list(tmp_path.iterdir())
    done = subprocess.run([*command[:3], "0"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is '0'; pass a whole number" in done.stderr
