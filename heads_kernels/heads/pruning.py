"""Heads taken out of a model for good: smaller projections, the same output as with those heads closed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from heads_kernels.errors import refuse
from heads_kernels.heads.layers import (
    AttentionLayer,
    attention_layers,
    find_layers,
    heads_of_layers,
    is_transposed,
)


def prune(
    model: nn.Module, heads: Mapping[int | str, Iterable[int]], keep_at_least: int = 0
) -> dict[str, list[int]]:
    """Take heads out of a model, in place; it then computes what it computed with these heads closed.

    A head goes with its rows of W_Q, W_K and W_V, its columns of W_O and its rows of output gates, mixing and content
    bias (Michel et al. 2019; Voita et al. 2019). Gates of the layers named in `heads`, learned ones too, are folded
    into W_O as they are at inference and taken off: `prune(model, hk.heads.closed(model))` ends the training of gates.

    Heads that are left are numbered anew from 0: pruning twice adds up. A layer without heads gives the bias of W_O. A
    causal layer of transformers keeps one key head then, because its cache counts the tokens by the keys.

    Grouped-query heads: a key head goes when no query head reads it. Where the groups that are left have sizes n_1,
    n_2, ... with greatest common divisor g, key head i becomes n_i / g key heads with the same weights, each of which
    serves g query heads. The output stays exact; equal groups keep their key heads.

    The parameters are new ones on the same modules, with dtype, device and `requires_grad` of the old: make the
    optimiser anew, it holds the old ones. Layers of T5 get their position bias from a layer that computes it for all
    heads; an attention function has to take the heads `module.kept_heads` of it, as "heads_kernels" does and
    transformers' own do not. What is left of each layer goes into the `config.heads_kernels` of transformers models;
    prune the whole model, not a part of it, for it to be saved.

    Args:
        model: with attention layers of the table.
        heads: `{layer: [heads]}`, layers by index or name, heads as they are numbered now.
        keep_at_least: so many heads stay in each of the layers, or all if there are fewer: of those in `heads` the ones
            with the largest gates, the first among equals.

    Returns:
        The heads that were taken out, `{layer name: [heads]}`.

    Raises:
        TypeError, ValueError: a layer or a head that doesn't exist, named beside those that do; a projection that is no
            `nn.Linear` or `Conv1D`. Nothing is changed then.
    """
    if not isinstance(keep_at_least, int) or isinstance(keep_at_least, bool) or keep_at_least < 0:
        refuse("keep_at_least", f"is {keep_at_least!r}", "pass how many heads, 0 or more")
    asked = heads_of_layers(attention_layers(model), heads)
    for layer, _ in asked:
        _check_dense(layer)
    taken = {}
    for layer, chosen in asked:
        gone = _spare(layer, chosen, keep_at_least)
        _fold_gate(layer)
        if gone:
            left = [head for head in range(layer.num_heads) if head not in gone]
            shrink(layer, left, _key_heads(layer, left))
        taken[layer.name] = gone
    _record(model)
    return taken


def shrink(layer: AttentionLayer, heads: Sequence[int], key_heads: Sequence[int]) -> None:
    """Keep these heads and key heads of a layer, in this order; key heads may repeat."""
    if layer.family.shared:
        projections = [(layer.value, heads)]
    else:
        projections = [(layer.query, heads), (layer.key, key_heads), (layer.value, key_heads)]
    rows: dict[nn.Module, list[Tensor]] = {}  # a fused projection has several
    for projection, chosen in [*projections, *((beside, heads) for beside in layer.beside)]:
        rows.setdefault(projection.linear, []).append(projection.features(chosen))
    for linear, parts in rows.items():
        _select(linear, torch.cat(parts), 1)
    _select(layer.output.linear, layer.output.features(heads), 0)
    if not heads and is_transposed(layer.output.linear):
        setattr(layer.module, layer.family.output, _as_linear(layer.output.linear))
    kept = torch.tensor(heads, dtype=torch.int64)
    for name in layer.family.rows:
        _replace(layer.module, name, getattr(layer.module, name)[kept])
    if (gate := getattr(layer.module, "head_gate", None)) is not None:
        gate.keep(heads)
    device = layer.output.linear.weight.device
    before = getattr(layer.module, "kept_heads", torch.arange(layer.num_heads)).to(kept.device)
    layer.module.register_buffer("kept_heads", before[kept].to(device), persistent=False)
    _count(layer, len(heads), len(key_heads))


def shape(layer: AttentionLayer) -> dict[str, Any]:
    """What is left of a layer, in types of JSON.

    `heads`: the heads that are left, numbered as in the model that was never pruned; `key_heads`: how many; `head_dim`
    and `value_dim`: their widths.
    """
    return {
        "heads": kept_heads(layer),
        "key_heads": layer.num_key_heads,
        "head_dim": layer.head_dim,
        "value_dim": layer.value_dim,
    }


def kept_heads(layer: AttentionLayer) -> list[int]:
    """The heads of the layer, numbered as before it was ever pruned."""
    kept = getattr(layer.module, "kept_heads", None)
    return list(range(layer.num_heads)) if kept is None else kept.tolist()


# ---------------------------------------------------------------------- which heads
def _spare(layer: AttentionLayer, chosen: list[int], keep_at_least: int) -> list[int]:
    """`chosen` without the strongest of them, as many as must stay."""
    spared = max(0, min(keep_at_least, layer.num_heads) - (layer.num_heads - len(chosen)))
    gate = getattr(layer.module, "head_gate", None)
    gates = [1.0] * layer.num_heads if gate is None else gate.export().tolist()
    strongest = sorted(chosen, key=lambda head: -abs(gates[head]))
    return sorted(strongest[spared:])


def _key_heads(layer: AttentionLayer, left: list[int]) -> list[int]:
    """The key heads that `left` read, repeated where that makes groups of equal size."""
    if layer.family.shared:
        return [0]
    if not left:
        counts_tokens = layer.kind == "decoder" and hasattr(layer.module, "layer_idx")
        return [0] if counts_tokens else []
    group = layer.num_heads // layer.num_key_heads
    readers = Counter(head // group for head in left)
    size = gcd(*readers.values())
    return [key for key, count in readers.items() for _ in range(count // size)]


# ---------------------------------------------------------------------- weights
def _check_dense(layer: AttentionLayer) -> None:
    for projection in (layer.query, layer.key, layer.value, layer.output, *layer.beside):
        linear = projection.linear
        sizes = {
            getattr(linear, name, None) for name in ("in_features", "out_features", "nx", "nf")
        }
        weight = getattr(linear, "weight", None)
        if not isinstance(weight, nn.Parameter) or not set(weight.shape) <= sizes:
            was = f"is projected by a {type(linear).__name__}"
            refuse(str(layer), was, "prune a model of nn.Linear and Conv1D, before it is wrapped")


def _fold_gate(layer: AttentionLayer) -> None:
    """Multiply the columns of W_O by the gates of their heads, and take the gate off."""
    gate = getattr(layer.module, "head_gate", None)
    if gate is None:
        return
    linear = layer.output.linear
    columns = gate.export().repeat_interleave(layer.value_dim).to(linear.weight.device)
    columns = columns[:, None] if is_transposed(linear) else columns
    _replace(linear, "weight", (linear.weight * columns).to(linear.weight.dtype))
    layer.module.head_gate = None


def _select(linear: Any, features: Tensor, of: int) -> None:
    """Keep these input features (`of` = 0) or output features (1) of a projection."""
    axis = of if is_transposed(linear) else 1 - of
    _replace(linear, "weight", linear.weight.index_select(axis, features))
    if of and linear.bias is not None:
        _replace(linear, "bias", linear.bias[features])
    count = ("nx", "nf") if is_transposed(linear) else ("in_features", "out_features")
    setattr(linear, count[of], len(features))


def _as_linear(linear: Any) -> nn.Linear:
    """The same projection as an `nn.Linear`: a `Conv1D` can not run without input features."""
    made = nn.Linear(1, linear.nf, device="meta")
    made.in_features = linear.nx
    made.weight = nn.Parameter(linear.weight.detach().T, linear.weight.requires_grad)
    made.bias = linear.bias
    return made


def _replace(module: Any, name: str, value: Tensor) -> None:
    old = getattr(module, name)
    setattr(module, name, nn.Parameter(value.detach().clone(), requires_grad=old.requires_grad))


# ---------------------------------------------------------------------- counts
def _count(layer: AttentionLayer, H: int, Hk: int) -> None:
    """Bring the module's own head counts and sizes in step."""
    query = [] if layer.query.linear is not layer.key.linear else [H * layer.head_dim]
    counts = {
        "num_attention_heads": H,
        "num_heads": H,
        "n_heads": H,
        "num_key_heads": Hk,
        "num_key_value_heads": Hk,
        "num_key_value_groups": H // Hk if Hk else 1,
        "all_head_size": H * layer.head_dim,
        "inner_dim": H * layer.head_dim,
        "split_size": [*query, Hk * layer.head_dim, Hk * layer.value_dim],
    }
    for name, count in counts.items():
        if hasattr(layer.module, name) and name not in layer.family.keeps_count:
            setattr(layer.module, name, count)


def _record(model: nn.Module) -> None:
    """Put what is left of the heads into the configs of transformers models.

    Layers are named as in the base model, so that models with a task head and without find the same names. Parts of a
    model that share its config leave it to the whole.
    """
    part: Any
    recorded = set()
    for part in model.modules():
        if not hasattr(part, "base_model_prefix") or id(part.config) in recorded:
            continue
        recorded.add(id(part.config))
        pruned = {
            layer.name: shape(layer)
            for layer in find_layers(part.base_model)
            if hasattr(layer.module, "kept_heads")
        }
        if pruned:
            record = getattr(part.config, "heads_kernels", {})
            part.config.heads_kernels = {**record, "pruned": pruned}
