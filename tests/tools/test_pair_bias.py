"""examples/pair_bias: the modules are the published algorithms, the reference layout loads, and pair bias is needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from tests.support.alike import assert_alike
from tests.support.examples import example

pytestmark = pytest.mark.release

N, S, HEADS, WIDTH = 5, 3, 2, 3  # residues, rows; width of a head


@pytest.fixture
def command() -> Iterator[ModuleType]:
    with example("pair_bias/__main__.py") as module:
        yield module


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
    a = torch.einsum("bijhc,bikhc->bijkh", q, k) / WIDTH**0.5 + r.linear(z)[:, None]
    return r.close(z, torch.einsum("bijkh,bikhc->bijhc", a.softmax(-2), v))


def ending(r: Reference, z: Tensor) -> Tensor:
    """AlphaFold 2, algorithm 14."""
    z = r.layer_norm(z)
    q, k, v = (r.heads(letter, z) for letter in "qkv")
    b = torch.einsum("bkih->bikh", r.linear(z))[:, :, None]
    a = torch.einsum("bijhc,bkjhc->bijkh", q, k) / WIDTH**0.5 + b
    return r.close(z, torch.einsum("bijkh,bkjhc->bijhc", a.softmax(-2), v))


def tokens(r: Reference, a: Tensor, z: Tensor) -> Tensor:
    """AlphaFold 3, algorithm 24, without conditioning."""
    a = r.layer_norm_a(a)
    q, k, v = (r.heads(letter, a) for letter in "qkv")
    b = r.linear_b(r.layer_norm_z(z))
    p = (torch.einsum("bihc,bjhc->bijh", q, k) / WIDTH**0.5 + b).softmax(-2)
    return r.close(a, torch.einsum("bijh,bjhc->bihc", p, v))


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
@pytest.mark.usefixtures("command")
def test_a_module_is_its_algorithm(name: str) -> None:
    """With the weights of the reference layout."""
    module, reference, inputs = made(name)
    sys.modules["modules"].load_reference(module, reference.state_dict())
    assert_alike(module(*inputs), ALGORITHMS[name](reference, *inputs))


@pytest.mark.usefixtures("command")
def test_names_and_weights_that_do_not_fit_are_refused() -> None:
    module, reference, _ = made("rows")
    load, state = sys.modules["modules"].load_reference, reference.state_dict()
    with pytest.raises(KeyError, match="linear_x"):
        load(module, {**state, "linear_x.weight": torch.zeros(1)})
    del state["mha.linear_g.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*attention\.gate_proj\.weight"):
        load(module, state)
