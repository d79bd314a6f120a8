"""What the operators mean, written once more and naively: no code of the package is used here.

Attention by autograd on plain einsum, masks by asking about every pair, Philox on Python integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import heads_kernels as hk

Sees = Callable[[int, int, int, int], bool]


def attention(
    arguments: Mapping[str, Tensor],
    visible: Tensor,
    scale: float,
    gate_activation: str = "identity",
    kept: Tensor | None = None,
) -> Tensor:
    """Either operator, its tensor arguments by name.

    `visible` is bool `[B, H, T, S]`; `kept` has that shape too: 0, or 1 over the share kept. A `bias` broadcasts to it.
    """
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    heads = []
    for h in range(visible.shape[1]):
        if "mixing" in arguments:
            scores = torch.einsum("btd,d,bsd->bts", query, arguments["mixing"][h], key)
            if "content_bias" in arguments:
                scores = scores + arguments["content_bias"][:, h, None, :]
            v = value[:, h]
        else:
            group = query.shape[1] // key.shape[1]
            scores = torch.einsum("btd,bsd->bts", query[:, h], key[:, h // group])
            v = value[:, h // group]
        scores = scale * scores
        if "bias" in arguments:
            scores = scores + arguments["bias"].expand(visible.shape)[:, h]
        # finite, so that autograd meets no nan in a row that sees nothing
        p = torch.softmax(scores.masked_fill(~visible[:, h], -1e30), -1) * visible[:, h]
        if kept is not None:
            p = p * kept[:, h]
        heads.append(torch.einsum("bts,bsd->btd", p, v))
    out = torch.stack(heads, 1)
    if "gate" not in arguments:
        return out
    gate = arguments["gate"]
    gate = gate[None] if gate.dim() == 1 else gate
    while gate.dim() < 4:
        gate = gate[..., None]
    if gate_activation == "sigmoid":
        gate = 1 / (1 + torch.exp(-gate))
    elif gate_activation == "softplus":
        gate = torch.log(1 + torch.exp(gate))
    return gate * out


def pairs(B: int, H: int, T: int, S: int, sees: Sees) -> Tensor:
    """bool `[B, H, T, S]`, by asking `sees(b, h, i, j)` about every pair."""
    asked = [
        sees(b, h, i, j) for b in range(B) for h in range(H) for i in range(T) for j in range(S)
    ]
    return torch.tensor(asked, dtype=torch.bool).reshape(B, H, T, S)


def masks(B: int, H: int, T: int, S: int) -> dict[str, tuple[dict[str, Any], Sees]]:
    """By name: the mask arguments of a call, and whether row i of head h in batch b sees key j."""
    dense = torch.rand(B, H, T, S) > 0.4
    dense[0, 0, 0] = False
    square = torch.rand(T, S) > 0.4
    holes = torch.rand(B, S) > 0.4
    holes[-1] = False
    rows = torch.rand(B, T) > 0.4
    keys = [(3 * b + S // 2) % (S + 1) for b in range(B)]
    real = [(2 * b + T - 1) % (T + 1) for b in range(B)]
    t_ids, s_ids = torch.arange(T) // 2, torch.arange(S) // 3
    return {
        "none": ({}, lambda b, h, i, j: True),
        "causal": ({"is_causal": True}, lambda b, h, i, j: j <= i),
        "lower_right": (
            {"attn_mask": hk.Mask(causal="lower_right")},
            lambda b, h, i, j: j <= i + S - T,
        ),
        "window": (
            {"attn_mask": hk.Mask(window=(2, 1))},
            lambda b, h, i, j: i - 2 <= j <= i + 1,
        ),
        "lengths": (
            {"attn_mask": hk.Mask(key_lengths=keys, query_lengths=real)},
            lambda b, h, i, j: j < keys[b] and i < real[b],
        ),
        "causal lengths": (
            {"attn_mask": hk.Mask(key_lengths=torch.tensor(keys)), "is_causal": True},
            lambda b, h, i, j: j < keys[b] and j <= i,
        ),
        "holes": (
            {"attn_mask": hk.Mask(key_mask=holes, query_mask=rows)},
            lambda b, h, i, j: bool(holes[b, j] and rows[b, i]),
        ),
        "padding tensor": (
            {"attn_mask": holes[:, None, None]},
            lambda b, h, i, j: bool(holes[b, j]),
        ),
        "documents": (
            {"attn_mask": hk.Mask(document_ids=(t_ids, s_ids))},
            lambda b, h, i, j: bool(t_ids[i] == s_ids[j]),
        ),
        "nothing": (
            {"attn_mask": hk.Mask(key_lengths=[0])},
            lambda b, h, i, j: False,
        ),
        "square": ({"attn_mask": square}, lambda b, h, i, j: bool(square[i, j])),
        "dense causal": (
            {"attn_mask": dense, "is_causal": True},
            lambda b, h, i, j: bool(dense[b, h, i, j]) and j <= i,
        ),
    }


def philox4x32(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 on Python's integers (Salmon et al. 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b % 2**32, (a >> 32) ^ c3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def keeps(seed: int, dropout_p: float, B: int, H: int, T: int, S: int) -> Tensor:
    """bool `[B, H, T, S]`: which probabilities dropout keeps."""
    key = seed % 2**32, (seed >> 32) % 2**32
    return pairs(
        B,
        H,
        T,
        S,
        lambda b, h, i, j: philox4x32((j // 4, i, h, b), key)[j % 4] >= int(dropout_p * 2**32),
    )
