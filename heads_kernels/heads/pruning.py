"""Heads taken out of a model for good: smaller projections, the same output as with those heads closed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import gcd

import torch
from torch import Tensor, nn

from heads_kernels.checks import check_size, refuse
from heads_kernels.heads.dense import check_projections, dense_parts
from heads_kernels.heads.layers import (
    AttentionLayer,
    HeadsByLayer,
    attention_layers,
    heads_of_layers,
    is_transposed,
)
from heads_kernels.heads.reshape import replace, shrink
from heads_kernels.heads.saving import record_in_config
from heads_kernels.nn.snapshot import kept_on_error


@torch.inference_mode(False)
@torch.no_grad()
def prune(model: nn.Module, heads: HeadsByLayer, keep_at_least: int = 0) -> dict[str, list[int]]:
    """Take heads out of a model, in place; it then computes what it computed with these heads closed.

    A head goes with its rows of W_Q, W_K and W_V, its columns of W_O and its rows of output gates, mixing and content
    bias (Michel et al. 2019; Voita et al. 2019). Gates of the layers named in `heads`, learned ones too, are folded
    into W_O as they are at inference and taken off: `prune(model, hk.heads.closed(model))` ends the training of gates.

    Heads that are left are numbered anew from 0: pruning twice adds up. A layer without heads gives the bias of W_O. A
    causal layer of transformers keeps one key head then, because its cache counts the tokens by the keys.

    Grouped-query heads: a key head goes when no query head reads it. Where the groups that are left have sizes n_1,
    n_2, ... with greatest common divisor g, key head i becomes n_i / g key heads with the same weights, each of which
    serves g query heads. The output stays exact; equal groups keep their key heads.

    LoRA adapters of peft are pruned together with their projections. Other adapters have to be merged first. On an
    error or Ctrl-C the model is what it was.

    The parameters are new ones on the same modules, with dtype, device and `requires_grad` of the old: make the
    optimiser anew, it holds the old ones. Layers of T5 get their position bias from a layer that computes it for all
    heads; an attention function has to take the heads `module.kept_heads` of it, as "heads_kernels" does and
    transformers' own do not. What is left of each layer goes into the `config.heads_kernels` of transformers models;
    prune the whole model, not a part of it, for it to be saved.

    Args:
        model: with attention layers of the table.
        heads: `{layer: [heads]}`, layers by index or name, heads as they are numbered now.
        keep_at_least: so many heads stay in each of the layers, or all if there are fewer: of those in `heads` the ones
            of highest `HeadGate.rank()`, the first among equals. A gate of 0 is folded as 1 there: the head is kept
            because it is wanted.

    Returns:
        The heads that were taken out, `{layer name: [heads]}`.

    Raises:
        TypeError, ValueError: a layer or a head that doesn't exist, named beside those that do; a projection that is no
            `nn.Linear`, `Conv1D` or LoRA of one, that is quantised, parametrised, sharded or offloaded, or has forward
            hooks; one that layers or roles share without being one module.
    """
    check_size("keep_at_least", keep_at_least, 0)
    layers = attention_layers(model)
    asked = heads_of_layers(layers, heads)
    users = Counter(weight for layer in layers for weight in _weights(layer))
    for layer, _ in asked:
        check_projections(layer, "prune", adapters=True)
        _check_untied(layer, users)
    taken = {}
    with kept_on_error(model):
        for layer, chosen in asked:
            gone, spared = _gone_and_spared(layer, chosen, keep_at_least)
            _fold_gate(layer, spared)
            if gone:
                left = [head for head in range(layer.num_heads) if head not in gone]
                shrink(layer, left, read_key_heads(layer, left))
            taken[layer.name] = gone
        record_in_config(model)
    return taken


# ---------------------------------------------------------------------- which heads
def _gone_and_spared(
    layer: AttentionLayer, chosen: list[int], keep_at_least: int
) -> tuple[list[int], list[int]]:
    """Those of `chosen` that go, and the strongest of them, as many as must stay."""
    must_stay = max(0, min(keep_at_least, layer.num_heads) - (layer.num_heads - len(chosen)))
    rank = [1.0] * layer.num_heads if layer.gate is None else layer.gate.rank().tolist()
    strongest = sorted(chosen, key=lambda head: -rank[head])
    return sorted(strongest[must_stay:]), strongest[:must_stay]


def read_key_heads(layer: AttentionLayer, left: list[int]) -> list[int]:
    """The key heads that `left` read, repeated where that makes groups of equal size."""
    if layer.layout.shared:
        return [0]
    if not left:
        counts_tokens = layer.kind == "decoder" and hasattr(layer.module, "layer_idx")
        return [0] if counts_tokens else []
    group = layer.num_heads // layer.num_key_heads
    readers = Counter(head // group for head in left)
    size = gcd(*readers.values())
    return [key for key, count in readers.items() for _ in range(count // size)]


# ---------------------------------------------------------------------- weights
def _weights(layer: AttentionLayer) -> list[tuple[int, int]]:
    """What the projections of a layer consist of, and where they start in it."""
    projections = (layer.query, layer.key, layer.value, layer.output, *layer.beside)
    return [
        (id(parameter), projection.start)
        for projection in projections
        if projection.heads
        for part, _ in dense_parts(projection.linear)
        for parameter in part.parameters(recurse=False)
    ]


def _check_untied(layer: AttentionLayer, users: Mapping[tuple[int, int], int]) -> None:
    if any(users[weight] > 1 for weight in _weights(layer)):
        instead = "give each a copy of its own; layers that are one module are pruned as one"
        refuse(str(layer), "has projections that other roles or layers hold too", instead)


def _fold_gate(layer: AttentionLayer, spared: list[int]) -> None:
    """Multiply the columns of W_O by the gates of their heads, and take the gate off; `spared` heads are not 0."""
    if layer.gate is None:
        return
    gates = layer.gate.export()
    gates[[head for head in spared if gates[head] == 0]] = 1.0
    features = gates.repeat_interleave(layer.value_dim)
    for part, ends in dense_parts(layer.output.linear):
        if 0 in ends:
            columns = features[:, None] if is_transposed(part) else features
            weight: Tensor = part.weight  # type: ignore[assignment]
            replace(part, "weight", (weight * columns.to(weight.device)).to(weight.dtype))
    layer.module.head_gate = None
