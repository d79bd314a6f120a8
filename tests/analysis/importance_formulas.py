"""Importance of heads by derivatives of explicit factors in stock eager attention."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

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


def sums(model: Any, arguments: dict[str, Tensor]) -> Tensor:
    return losses(model, arguments).sum()


class Factors:
    """Multiplies what comes into each output projection of a stock model by factors, `[B, H, T]` a run."""

    def __init__(self, model: Any) -> None:
        self.runs: dict[str, list[Tensor]] = {}
        self.handles = [
            layer.output.linear.register_forward_pre_hook(self.hook(layer))
            for layer in hk.heads.attention_layers(model)
        ]

    def hook(self, layer: hk.heads.AttentionLayer) -> Callable[..., Any]:
        def multiply(module: nn.Module, args: tuple[Tensor]) -> Tensor:
            (B, T, _), H = args[0].shape, layer.num_heads
            ones = torch.ones(B, H, T, dtype=args[0].dtype, requires_grad=True)
            self.runs.setdefault(layer.name, []).append(ones)
            return (args[0].unflatten(2, (H, -1)) * ones.transpose(1, 2)[..., None]).flatten(2)

        return multiply


def rows_of(model: Any, arguments: dict[str, Tensor], kind: str) -> Tensor:
    is_target = model.config.is_encoder_decoder and kind != "encoder"
    return arguments["decoder_attention_mask" if is_target else "attention_mask"].double()


def derivatives(
    model: Any, arguments: dict[str, Tensor], objective: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """`[B, H, T]` of each layer, its runs one behind the other; padded rows 0."""
    factors = Factors(model)
    value = objective(model, arguments).sum()
    for handle in factors.handles:
        handle.remove()
    found = {}
    for layer in hk.heads.attention_layers(model):
        slopes = torch.autograd.grad(value, factors.runs[layer.name], retain_graph=True)
        real = rows_of(model, arguments, layer.kind)[:, None]
        found[layer.name] = torch.cat([slope * real for slope in slopes], 2)
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
