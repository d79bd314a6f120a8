"""Dropout masks: the generator's published answers, every element's index, and the share kept."""

from itertools import product

import pytest
import torch
from torch import Tensor

from heads_kernels import functional
from heads_kernels.ops.philox import philox4x32
from tests.ops.calls import DIFFERENTIABLE, assert_same_bits, call, tensors
from tests.support.alike import assert_alike

FULL = 0xFFFFFFFF

#: Known answers of Random123 (kat_vectors, philox4x32 10): counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def plain_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 on Python's integers (Salmon et al. 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b % 2**32, (a >> 32) ^ c3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def keeps(seed: int, dropout_p: float, *sizes: int) -> Tensor:
    """bool `[B, H, T, S]`: which probabilities dropout keeps."""
    key = seed % 2**32, (seed >> 32) % 2**32
    kept = [
        plain_philox((j // 4, i, h, b), key)[j % 4] >= int(dropout_p * 2**32)
        for b, h, i, j in product(*map(range, sizes))
    ]
    return torch.tensor(kept).reshape(sizes)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    got = philox4x32(tuple(torch.tensor(word) for word in counter), tuple(torch.tensor(word) for word in key))
    assert tuple(int(word) for word in got) == words
    assert plain_philox(counter, key) == words


#: Of a part: how many places of the whole come before it in each dimension.
PART = {"b": 1, "h": 2, "i": 3, "j": 4}


@pytest.mark.parametrize(
    ("seed", "S", "before"),
    [(0, 1, {}), (1, 4, {}), (2**32 - 1, 6, PART), (2**45 + 3, 9, PART), (2**63 - 1, 7, {}), (-5, 9, {})],
)
@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_the_mask_of_an_operator(
    operator: str, backend: str, seed: int, S: int, before: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys as values show the dropped probabilities: each reads its own word, of a part as of the whole."""
    B, H, T, p = 2, 2, 6, 0.3
    b, h, i, j = (before.get(name, 0) for name in "bhij")
    monkeypatch.setattr(functional, "draw_seed", lambda device: torch.tensor([seed, b, h, i, j]))
    arguments = tensors(operator, B=B, H=H, Hk=H, T=T, S=S, D=4, Dv=S, dtype=torch.float32)
    arguments["value"] = torch.eye(S).expand(B, H, S, S)
    plain = call(operator, backend, **arguments)
    dropped = call(operator, backend, **arguments, dropout_p=p)
    kept = keeps(seed, p, B + b, H + h, T + i, S + j)[b:, h:, i:, j:]
    assert_alike(dropped, plain * kept / (1 - p))


@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_the_seed_is_drawn_from_pytorchs_generator(operator: str, backend: str) -> None:
    arguments = tensors(operator, dtype=torch.float32)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(call(operator, backend, **arguments, dropout_p=0.5))
    assert_same_bits(backend, outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    state = torch.get_rng_state()
    call(operator, backend, **arguments)
    assert torch.equal(torch.get_rng_state(), state), "no seed is drawn without dropout"
