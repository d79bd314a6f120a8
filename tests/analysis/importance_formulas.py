"""Importance of heads by derivatives of explicit factors in stock eager attention."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import heads_kernels as hk
from tests.support.tiny_models import batch, build


def examples_of(model: Any, arguments: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What the model says of real tokens, `[B, T, width]`, 0 elsewhere; and weights of them that differ everywhere."""
    values = model(**arguments)[0]
    real = arguments.get("decoder_attention_mask", arguments["attention_mask"])[
        :, : values.shape[1]
    ]
    weights = torch.linspace(-1, 1, values[0].numel(), dtype=values.dtype).view(values[0].shape)
    return torch.where(real[..., None] != 0, values, 0), weights


def losses(model: Any, arguments: dict[str, Tensor]) -> Tensor:
    """`[B]`, not linear."""
    values, weights = examples_of(model, arguments)
    return (values + weights).square().sum((1, 2)) / 10


def embeddings(model: Any, arguments: dict[str, Tensor]) -> Tensor:
    """`[B, width]`."""
    return examples_of(model, arguments)[0].sum(1)


def derivatives(
    model: Any, arguments: dict[str, Tensor], objective: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """By factors of 1 before each output projection: `[B, H, T]`, runs one behind the other; padded rows 0."""
    layers, found = hk.heads.attention_layers(model), {}
    factors: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}

    def multiply(layer: hk.heads.AttentionLayer, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        ones = torch.ones(B, layer.num_heads, T, dtype=x.dtype, requires_grad=True)
        factors[layer.name].append(ones)
        heads = x.unflatten(2, (layer.num_heads, -1)) * ones.transpose(1, 2)[..., None]
        return heads.flatten(2)

    handles = [
        layer.output.linear.register_forward_pre_hook(
            lambda _, args, layer=layer: multiply(layer, args[0])
        )
        for layer in layers
    ]
    value = objective(model, arguments).sum()
    for handle in handles:
        handle.remove()
    for layer in layers:
        is_target = model.config.is_encoder_decoder and layer.kind != "encoder"
        real = arguments["decoder_attention_mask" if is_target else "attention_mask"].double()
        slopes = torch.autograd.grad(value, factors[layer.name], retain_graph=True)
        found[layer.name] = torch.cat([slope * real[:, None] for slope in slopes], 2)
    return found


def pair(family: str) -> tuple[Any, Any, dict[str, Tensor]]:
    """A model in stock eager attention, the same one in use, both in float64, and a padded batch."""
    stock = build(family).double()
    arguments = batch(stock)
    return stock, hk.integrations.transformers.use(copy.deepcopy(stock)), arguments


def by_name(scores: hk.analysis.HeadScores) -> dict[str, Tensor]:
    return dict(zip(scores.layers, scores.scores, strict=True))


REDUCED = {
    "token": lambda terms: terms.abs().sum((0, 2)) / len(terms),
    "example": lambda terms: terms.sum(2).abs().mean(0),
    "batch": lambda terms: terms.sum((0, 2)).abs() / len(terms),
}
