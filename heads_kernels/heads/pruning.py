"""Pruning: removes heads from the weights, with the same output as with those heads closed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn

from heads_kernels.checks import refuse
from heads_kernels.heads.gating import set_gate
from heads_kernels.heads.layers import HeadsByLayer, attention_layers, heads_of_layers
from heads_kernels.heads.projected import projected_layers, with_projections
from heads_kernels.heads.reshape import read_key_heads, replace, shrink
from heads_kernels.heads.saving import record_in_config
from heads_kernels.heads.weights import ProjectedLayer, check_projections, is_transposed
from heads_kernels.snapshot import kept_on_error


@torch.inference_mode(False)
@torch.no_grad()
def prune(model: nn.Module, heads: HeadsByLayer) -> dict[str, list[int]]:
    """Remove heads from a model, in place; outputs are then the same as with these heads closed.

    Removes the head's rows of W_Q, W_K and W_V, its columns of W_O and its rows of output gates, mixing and content
    bias (Michel et al. 2019; Voita et al. 2019). The gates of the layers in `heads`, also learned ones, are removed and
    their values at inference folded into W_O: after training gates, call `prune(model, hk.heads.closed(model))`.

    The remaining heads are renumbered from 0, and pruning can be repeated. A layer without heads gives the bias of W_O;
    a causal layer of transformers then keeps one key head, because its cache counts tokens by the keys.

    With grouped-query heads, a key head is removed once no query head uses it. If the remaining groups have sizes n_1,
    n_2, ... with greatest common divisor g, key head i becomes n_i / g key heads with the same weights, each for g
    query heads. The output stays exact; equal groups keep their key heads.

    Adapters must be merged first. An error or Ctrl-C leaves the model unchanged.

    The parameters are new, with the dtype, device and `requires_grad` of the old ones: create the optimiser afterwards.
    `generation_config.alignment_heads` of Whisper is renumbered. The remaining heads are recorded in
    `config.heads_kernels` of transformers models; prune the whole model, not a part of it, so that they are saved.

    Args:
        model: with attention layers (`attention_layers`).
        heads: `{layer: [heads]}`, layers by index or name, heads by their current number.

    Returns:
        The removed heads, `{layer name: [heads]}`.

    Raises:
        TypeError, ValueError: a layer or head does not exist; it is not known where a layer's heads are in its weights;
            a projection is not an `nn.Linear` or `Conv1D`, has an adapter, is quantised, parametrised, sharded or
            offloaded, has forward hooks, or is shared between different layers or roles; a head is one of Whisper's
            `generation_config.alignment_heads`.
    """
    named = heads_of_layers(attention_layers(model), heads)
    made = with_projections(model, [layer for layer, _ in named])
    asked = [(layer, chosen) for layer, (_, chosen) in zip(made, named, strict=True)]
    users = Counter(weight for layer in projected_layers(model) for weight in _weights(layer))
    for layer, _ in asked:
        check_projections(layer, "prune")
        if any(users[weight] > 1 for weight in _weights(layer)):
            instead = "give each its own copy; layers that are one module are pruned as one"
            refuse(str(layer), "shares projections with other roles or layers", instead)
    gone = {layer.name: chosen for layer, chosen in asked}
    numbers = _alignment_heads(model, gone)
    with kept_on_error(model):
        for layer, chosen in asked:
            _fold_gate(layer)
            if chosen:
                left = [head for head in range(layer.num_heads) if head not in chosen]
                shrink(layer, left, read_key_heads(layer, left))
        record_in_config(model)
    if numbers is not None:
        model.generation_config.alignment_heads = numbers  # type: ignore[union-attr]
    return gone


def _alignment_heads(model: nn.Module, gone: Mapping[str, list[int]]) -> list[list[int]] | None:
    """The heads `[layer, head]` from which Whisper reads when a token was spoken, as they are numbered after pruning,
    which may remove none of them; None without such heads."""
    there = getattr(getattr(model, "generation_config", None), "alignment_heads", None)
    if not there:
        return None
    numbers = []
    for layer, head in there:
        place = f"decoder.layers.{layer}.encoder_attn"
        removed = next((each for name, each in gone.items() if name.endswith(place)), [])
        if head in removed:
            was = f"has head {head} of {place!r}, one of generation_config.alignment_heads"
            refuse("heads", was, "keep it, or take it off that list, which gives timestamps of tokens")
        numbers.append([layer, head - sum(each < head for each in removed)])
    return numbers


# ---------------------------------------------------------------------- weights
def _weights(layer: ProjectedLayer) -> list[tuple[int, int]]:
    """The parameters of the projections of a layer, each with the offset where a projection starts."""
    projections = (layer.query, layer.key, layer.value, layer.output, *layer.beside)
    return [
        (id(parameter), projection.start)
        for projection in projections
        if projection.heads
        for parameter in projection.linear.parameters(recurse=False)
    ]


def _fold_gate(layer: ProjectedLayer) -> None:
    """Multiply the columns of W_O by the gates of their heads and remove the gate."""
    if layer.gate is None:
        return
    linear = layer.output.linear
    columns = layer.gate.export().repeat_interleave(layer.value_dim).to(linear.weight.device)
    columns = columns[:, None] if is_transposed(linear) else columns
    replace(linear, "weight", (linear.weight * columns).to(linear.weight.dtype))
    set_gate(layer.module, None)
