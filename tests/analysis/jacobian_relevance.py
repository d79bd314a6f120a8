"""The rule of layer-wise relevance propagation as it is written, by Jacobians: of an example, a row, a whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heads_kernels as hk

EPSILON = 1e-5


def by_jacobian(
    function: Callable[..., Tensor], inputs: list[Tensor], given: Tensor, kept: bool = True
) -> list[Tensor]:
    """The rule as it is written, for one example: its Jacobian, both signs with a factor of 1/2, then scaled."""
    slopes = torch.autograd.functional.jacobian(function, tuple(inputs))
    m, n = given.numel(), sum(x.numel() for x in inputs)
    owed = [slope.reshape(m, -1) * x.flatten() for slope, x in zip(slopes, inputs, strict=True)]
    at_zero = function(*map(torch.zeros_like, inputs)).flatten()
    z = torch.cat(owed, 1) + at_zero[:, None] / n
    up, down = z * (z > 0), z * (z < 0)
    shares = 0.5 * up / (up.sum(1, keepdim=True) + EPSILON)
    shares = shares + 0.5 * down / (down.sum(1, keepdim=True) - EPSILON)
    found = given.flatten() @ shares
    if kept and found.sum() > 0:
        found = found * given.sum() / found.sum()
    parts = found.split([x.numel() for x in inputs])
    return [part.view(x.shape) for part, x in zip(parts, inputs, strict=True)]


def by_rows(function: Callable[..., Tensor], inputs: list[Tensor], given: Tensor) -> list[Tensor]:
    """`by_jacobian` of each row of tensors of two dimensions or more."""
    flat = [x.reshape(-1, x.shape[-1]) for x in inputs]
    rows = [
        by_jacobian(function, list(parts), each)
        for *parts, each in zip(*flat, given.reshape(-1, given.shape[-1]), strict=True)
    ]
    return [
        torch.stack(found).view(x.shape)
        for found, x in zip(zip(*rows, strict=True), inputs, strict=True)
    ]


class Encoder(nn.Module):
    """Two of PyTorch's own layers around our attention, and scores of the mean token."""

    def __init__(self, norm_first: bool = False, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                8, 2, 12, batch_first=True, norm_first=norm_first, dtype=torch.float64
            )
            for _ in range(2)
        )
        for layer in self.layers:
            layer.self_attn = hk.nn.GatedMultiheadAttention(8, 4, dtype=torch.float64, **options)
        self.scores = nn.Linear(8, 3, dtype=torch.float64)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=None if real is None else ~real)
        if real is None:
            return self.scores(x.mean(1))
        weights = real[..., None].double()
        return self.scores((x * weights).sum(1) / weights.sum(1))


def attention_by_jacobian(
    layer: hk.nn.GatedMultiheadAttention, x: Tensor, given: Tensor, full: bool
) -> tuple[Tensor, Tensor]:
    """What the input `[T, E]` of self-attention gets, and the relevance of each head."""
    H, D = layer.num_heads, layer.head_dim
    parts = layer.q_proj, layer.k_proj, layer.v_proj
    q, k, v = (part(x).view(-1, H, D).transpose(0, 1) for part in parts)
    p = (layer.scale * (q @ k.mT)).softmax(-1)
    heads = (p @ v).transpose(0, 1).flatten(1)
    [of_heads] = by_rows(layer.out_proj, [heads], given)
    of_heads = of_heads.view(-1, H, D).transpose(0, 1)  # [H, T, D]
    found = [torch.zeros_like(q) for _ in parts]
    for h in range(H):
        if full:

            def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return (layer.scale * (q @ k.mT)).softmax(-1) @ v

            of_parts = by_jacobian(whole, [q[h], k[h], v[h]], of_heads[h])
        else:
            zeros = torch.zeros_like(q[h])
            [of_value] = by_jacobian(lambda v, h=h: p[h] @ v, [v[h]], of_heads[h])
            of_parts = [zeros, zeros, of_value]
        for each, part in zip(found, of_parts, strict=True):
            each[h] = part
    flat = [each.transpose(0, 1).flatten(1) for each in found]
    inputs = [by_rows(part, [x], each)[0] for part, each in zip(parts, flat, strict=True)]
    return sum(inputs), of_heads.sum((1, 2))


def encoder_by_jacobian(model: Encoder, x: Tensor, full: bool) -> list[Tensor]:
    """The relevance of the heads of each layer for the largest score of one example `[T, E]`, normalised."""
    states = []
    for layer in model.layers:
        attended = x + layer.self_attn(x[None])[0][0]
        normed = layer.norm1(attended)
        hidden = layer.linear1(normed).relu()
        fed = normed + layer.linear2(hidden)
        states.append((x, attended, normed, hidden, fed))
        x = layer.norm2(fed)
    scores = model.scores(x.mean(0))
    given = F.one_hot(scores.argmax(), 3).double()
    [given] = by_jacobian(model.scores, [x.mean(0)], given)
    [given] = by_jacobian(lambda y: y.mean(0), [x], given)
    found = []
    for layer, (x, attended, normed, hidden, fed) in reversed(
        list(zip(model.layers, states, strict=True))
    ):
        [given] = by_rows(layer.norm2, [fed], given)
        beside, given = by_rows(torch.add, [normed, fed - normed], given)
        [given] = by_rows(layer.linear2, [hidden], given)
        [given] = by_rows(layer.linear1, [normed], given)  # the activation lets it through
        [given] = by_rows(layer.norm1, [attended], given + beside)
        beside, given = by_rows(torch.add, [x, attended - x], given)
        given, heads = attention_by_jacobian(layer.self_attn, x, given, full)
        given = given + beside
        found.append(heads / heads.sum())
    return found[::-1]
