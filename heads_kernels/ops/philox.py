"""Dropout masks by Philox4x32-10, as a function of the seed and an element's index (b, h, i, j).

With counter-based random numbers (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")
a forward pass, its backward pass and every backend draw the same mask without storing it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from heads_kernels.call import SEED_LENGTH

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_WORD = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a product of two words, in halves of `b`, so that no step reaches 2**50."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """The four words of Philox4x32-10. Words are int64 tensors in [0, 2**32) and broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & _WORD, (k1 + WEYL[1]) & _WORD
    return c0, c1, c2, c3


def threshold(dropout_p: float) -> int:
    """A probability is dropped where its word is below this: `floor(dropout_p * 2**32)`."""
    return math.floor(dropout_p * 2**32)


def draw_seed(device: torch.device) -> Tensor:
    """A 63-bit seed from the device's default generator, for a call whose first element is (0, 0, 0, 0)."""
    drawn = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    return torch.nn.functional.pad(drawn, (0, SEED_LENGTH - 1))


def keep_mask(seed: Tensor, dropout_p: float, B: int, H: int, T: int, S: int, device: torch.device) -> Tensor:
    """bool `[B, H, T, S]`, True where the probability of key j in row i is kept.

    Element (b, h, i, j) reads word `j & 3` of counter `(j >> 2, i, h, b)` under the key
    `(seed & 0xffffffff, seed >> 32)` and is kept if that word is at least `threshold(dropout_p)`. Indices are those
    in the whole call; `seed` has that of the first element of this one (`SEED_LENGTH`).
    """

    number, b, h, i, j = seed.to(device).unbind()

    def count(first: Tensor, n: int, dimension: int) -> Tensor:
        indices = first + torch.arange(n, dtype=torch.int64, device=device)
        return indices.reshape([-1 if d == dimension else 1 for d in range(4)])

    counter = count(j >> 2, (S + 3) // 4, 3), count(i, T, 2), count(h, H, 1), count(b, B, 0)
    words = philox4x32(counter, (number & _WORD, (number >> 32) & _WORD))
    drawn = torch.stack([w.expand(B, H, T, -1) for w in words], dim=-1)  # [B, H, T, S / 4, 4]
    return drawn.flatten(3)[..., :S] >= threshold(dropout_p)
