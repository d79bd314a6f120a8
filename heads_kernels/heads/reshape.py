"""Change the shape of layers: fewer heads, or one query and one key for all heads; check the calls of pruned layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from heads_kernels.checks import refuse
from heads_kernels.heads.interface import NAME, attention_function, is_cache, names_attention_function, stock_arguments
from heads_kernels.heads.layouts import LAYOUTS
from heads_kernels.heads.shared import FusedProjection, SharedProjection, check_runs_shared
from heads_kernels.heads.weights import ProjectedLayer, Projection, check_projections, existing, is_transposed
from heads_kernels.nn import CollaborativeMultiheadAttention, GatedMultiheadAttention
from heads_kernels.nn.attention import put


# ---------------------------------------------------------------------- fewer heads
def read_key_heads(layer: ProjectedLayer, left: list[int], count: int | None = None) -> list[int]:
    """The key heads that the query heads `left` use, or value heads if all share one key, in groups of equal size.

    They may repeat. As few as possible, or `count`; if no equal groups give `count`, another number, which the caller
    refuses.
    """
    if not left:
        counts_tokens = layer.kind == "decoder" and hasattr(layer.module, "layer_idx")
        needed = int(counts_tokens and not layer.layout.shared)
        return [0] * (needed if count is None else count)
    group = layer.num_heads // layer.value.heads
    readers = Counter(head // group for head in left)
    sizes = [*readers.values()]
    if count:
        sizes.append(len(left) // count)
    size = gcd(*sizes)
    return [key for key, heads in readers.items() for _ in range(heads // size)]


def shrink(layer: ProjectedLayer, heads: Sequence[int], key_heads: Sequence[int]) -> None:
    """Keep these heads and key heads of a layer, in this order; key heads may repeat.

    Of a layer whose heads share one key `key_heads` are the value heads. The module then has `kept_heads`, an int64
    buffer with the original numbers of its heads, `heads_before`, their original number, and `kept_key_heads`, the
    original numbers of its key heads.
    """
    if layer.layout.shared:
        projections = [(layer.value, key_heads)]
    else:
        projections = [(layer.query, heads), (layer.key, key_heads), (layer.value, key_heads)]
    rows: dict[nn.Module, list[Tensor]] = {}  # a fused projection has several
    for projection, chosen in [*projections, *((beside, heads) for beside in layer.beside)]:
        rows.setdefault(projection.linear, []).append(projection.features(chosen))
    for linear, parts in rows.items():
        select(linear, torch.cat(parts), 1)
    select(layer.output.linear, layer.output.features(heads), 0)
    module = layer.module
    if not heads and is_transposed(layer.output.linear):
        linear = layer.output.linear
        setattr(module, layer.layout.output, _linear(linear.weight.T, linear.bias, linear))
    kept = torch.tensor(heads, dtype=torch.int64)
    for name in layer.layout.rows:
        if isinstance(rows_of_heads := getattr(module, name, None), nn.Parameter):
            replace(module, name, rows_of_heads[kept])
    if layer.gate is not None and layer.gate.num_heads == layer.num_heads:  # else it is shared, and cut already
        layer.gate.keep(heads)
    if not hasattr(module, "kept_heads"):
        module.heads_before = layer.num_heads
        if names_attention_function(getattr(module, "config", None)):
            module.register_forward_pre_hook(check_pruned_call, with_kwargs=True)
    own = getattr(module, "kept_key_heads", range(layer.value.heads))
    module.kept_key_heads = [own[head] for head in key_heads]
    numbers = getattr(module, "kept_heads", torch.arange(layer.num_heads)).to(kept.device)[kept]
    device = layer.output.linear.weight.device
    module.register_buffer("kept_heads", numbers.to(device), persistent=False)
    count_heads(layer, len(heads), len(key_heads))


def replace(module: Any, name: str, value: Tensor) -> None:
    """Replace a parameter by a new one with the same `requires_grad`."""
    old = getattr(module, name)
    setattr(module, name, nn.Parameter(value.detach().clone(), requires_grad=old.requires_grad))


def select(linear: Any, features: Tensor, of: int) -> None:
    """Keep these input features (`of` = 0) or output features (1) of a projection."""
    axis = of if is_transposed(linear) else 1 - of
    replace(linear, "weight", linear.weight.index_select(axis, features))
    if of and linear.bias is not None:
        replace(linear, "bias", linear.bias[features])
    count = ("nx", "nf") if is_transposed(linear) else ("in_features", "out_features")
    setattr(linear, count[of], len(features))


def _linear(weight: Tensor, bias: Tensor | None, like: Any) -> nn.Linear:
    """These parts of a projection as an `nn.Linear`, which unlike a `Conv1D` runs without input features too."""
    made = nn.Linear(1, 1, bias=bias is not None, device="meta")
    made.out_features, made.in_features = weight.shape
    made.weight = nn.Parameter(weight.detach().contiguous(), like.weight.requires_grad)
    if bias is not None:
        made.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias.detach(), like.bias.requires_grad)
    as_initialised(made)
    return made


def as_initialised(made: nn.Module) -> nn.Module:
    """A module whose weights `PreTrainedModel.init_weights` does not draw anew."""
    for part in made.modules():
        part._is_hf_initialized = True  # type: ignore[assignment]
    return made


def count_heads(layer: ProjectedLayer, H: int, Hk: int) -> None:
    """Update the module's head counts and sizes; Hk is the number of value heads."""
    module = layer.module
    query = [] if layer.query.linear is not layer.key.linear else [H * layer.head_dim]
    sizes = [*query, Hk * layer.head_dim, Hk * layer.value_dim]
    fused = (part.sizes for part in module.children() if isinstance(part, FusedProjection))
    counts = {
        "num_attention_heads": H,
        "num_heads": H,
        "n_heads": H,
        "num_key_heads": Hk,
        "num_key_value_heads": Hk,
        "num_value_heads": Hk,
        "num_key_value_groups": H // Hk if Hk else 1,
        "all_head_size": H * layer.value_dim,
        "inner_dim": H * layer.value_dim,
        "split_size": next(fused, sizes),
    }
    for name, count in counts.items():
        if hasattr(module, name) and name not in layer.layout.keeps_count:
            setattr(module, name, count)


def check_pruned_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hook before the forward of a pruned module of transformers.

    It refuses stock attention that would add a position bias of the heads before pruning, and a cache that has, or is
    made for, another number of key heads.
    """
    given = {**dict(zip(stock_arguments(type(module)), args, strict=False)), **kwargs}
    H, before = len(module.kept_heads), module.heads_before
    if (runs := attention_function(module)) != NAME:
        biases = (
            isinstance(value, Tensor) and value.dim() == 4 and value.shape[1] == before != H
            for value in list(given.values())[1:]
        )
        if adds_bias_of_all_heads(module) or any(biases):
            was = f"is {runs!r} in a {type(module).__name__} with {H} of {before} heads"
            was += ", to which stock attention adds the position bias of all"
            use = "call hk.integrations.transformers.use(model)"
            refuse("attn_implementation", was, f"{use}, which selects those of its heads")
    if getattr(module, "mixing", None) is None:
        for name, heads in _heads_in_caches(module, given):
            if heads != len(module.kept_key_heads):
                was = f"has keys of {heads} heads for layer {module.layer_idx}, of which "
                was += f"pruning left {len(module.kept_key_heads)}"
                instead = "pass an empty cache, and no prefill_chunk_size to generate: it reserves memory for all heads"
                refuse(name, was, instead)


def adds_bias_of_all_heads(module: Any) -> bool:
    """Whether stock attention of a pruned module adds a position bias that pruning leaves as it is: T5, Swin, BEiT."""
    own = ("has_relative_attention_bias", "has_relative_position_bias", "relative_position_bias")
    is_biased = any(getattr(module, name, None) not in (None, False) for name in own)
    H = len(module.kept_heads)
    return is_biased or getattr(module, "n_heads", H) != H  # T5 adds zeros of all heads


def _heads_in_caches(module: Any, given: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The number of heads of the keys that a cache has for a module, or has memory for."""
    index = given.get("layer_idx", getattr(module, "layer_idx", None))
    if not isinstance(index, int):
        return
    # Of layers that run several times.
    index += sum(given.get(name, 0) for name in ("cycle_offset", "cache_offset"))
    for name, value in given.items():
        layers = getattr(value, "layers", None) if is_cache(value) else None
        if isinstance(layers, list) and index < len(layers):
            keys = getattr(layers[index], "keys", None)
            if isinstance(keys, Tensor) and keys.dim() == 4:
                yield name, keys.shape[1]


# ---------------------------------------------------------------------- one query and one key
def check_has_products(layer: ProjectedLayer) -> None:
    """Refuse a layer whose scores are not products of its weights."""
    if layer.layout.between:
        was = f"has {layer.layout.between} between its projections and its scores"
        refuse(str(layer), was, "only scores that are products of the weights have shared features")
    has_entmax = getattr(layer.module, "alpha_logits", None) is not None
    is_wide = not layer.layout.shared and layer.query.width != layer.head_dim
    for is_so, was in (
        (layer.layout.shared, "is collaborative already"),
        (not layer.num_heads, "has no heads left"),
        (has_entmax, "has entmax, which collaborative attention has not"),
        (is_wide, "has logits of an output gate among the rows of its queries"),
    ):
        if is_so:
            refuse(str(layer), was, "leave it out")
    name = type(layer.module).__name__
    if layer.layout.rotary and name not in LAYOUTS:
        instead = "convert a model whose layers are of a known class themselves"
        refuse(str(layer), f"is a {name}, which may do more than its base class", instead)
    if layer.scale is None:
        was = f"is a {name} without {layer.layout.scale!r}"
        refuse(str(layer), was, "register its layout with the path of its scale")
    check_projections(layer, "convert")


def check_can_share(model: nn.Module, layer: ProjectedLayer) -> None:
    """Refuse a layer that cannot be converted to one query and one key for all heads."""
    check_has_products(layer)
    module = layer.module
    was = f"is a {type(module).__name__}"
    if isinstance(module, GatedMultiheadAttention):
        if type(module) is not GatedMultiheadAttention:
            instead = "what its class adds would be lost: replace it by a GatedMultiheadAttention"
            refuse(str(layer), was, instead, TypeError)
        if module is model:
            refuse("model", f"{was} itself", "pass a module that holds it: nn.Sequential(model)")
        if module._forward_hooks or module._forward_pre_hooks:
            refuse(str(layer), "has forward hooks, which would be lost", "remove them first: handle.remove()")
        if "forward" in vars(module):
            refuse(str(layer), "has a replaced forward, which would be lost", "restore its forward first")
        return
    if not names_attention_function(getattr(module, "config", None)):
        instead = "layers of transformers and hk.nn.GatedMultiheadAttention can be converted"
        refuse(str(layer), was, f"{instead}; for others use Heads and the factors", TypeError)
    check_runs_shared(module, (), {})
    fused = layer.key.linear in (layer.query.linear, layer.value.linear)
    if fused and not (hasattr(module, "split_size") or layer.layout.rotary):
        instead = "only modules that split it by `split_size` can be converted"
        refuse(str(layer), f"{was} with one projection for several roles", instead)


def share(model: nn.Module, layer: ProjectedLayer, dim: int, *, ragged: bool, slots: int = 0) -> dict[str, Tensor]:
    """Make a layer of `dim` shared features, which passes `check_can_share`; it is invalid afterwards.

    A `GatedMultiheadAttention` is replaced by a `CollaborativeMultiheadAttention` wherever the model holds it. Other
    modules keep their forward and get a `SharedProjection` (of `slots`) for query and for key, `mixing`, `ragged` and
    `num_value_heads`.

    Returns:
        The new parameters, uninitialised, with dtype, device and `requires_grad` of the old projections: `query`
        `[Ds, D_in]`, `key` `[Ds, D_in_k]`, `mixing` `[H, Ds]` and `content` `[H, D_in_k]`. With rotary positions
        `mixing` `[H, Ds / 2]`, biases instead of `content`, `query_bias` and `key_bias` `[Ds]`, if there were some, and
        the buffers `query_places` and `key_places`.
    """
    module = layer.module
    if isinstance(module, GatedMultiheadAttention):
        new = _collaborative(layer, dim, ragged)
        as_initialised(new)
        put(model, {module: new})
        assert new.content_proj is not None
        weights = new.q_proj.weight, new.k_proj.weight, new.mixing, new.content_proj.weight
        return dict(zip(("query", "key", "mixing", "content"), weights, strict=True))
    rotary = layer.layout.rotary
    made = {
        role: SharedProjection(
            old.inputs,
            dim,
            layer.head_dim,
            content_heads=layer.num_heads if role == "key" and not rotary else None,
            slots=slots,
            bias=rotary and old.linear.bias is not None,
        )
        for role, old in (("query", layer.query), ("key", layer.key))
    }
    paths = _put_projections(layer, made["query"], made["key"])
    module.mixing = _mixing(layer, dim // 2 if rotary else dim)
    if rotary:
        module.rotary_key = paths["key"]
    module.ragged = ragged
    module.register_forward_pre_hook(check_runs_shared, with_kwargs=True)
    module.num_value_heads = layer.num_key_heads
    count_heads(layer, layer.num_heads, layer.num_key_heads)
    found: dict[str, Tensor | None] = {"mixing": module.mixing}
    for role, each in made.items():
        found |= {role: each.weight, f"{role}_bias": each.bias, f"{role}_places": each.places}
        found |= {} if each.content is None else {"content": each.content.weight}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _collaborative(layer: ProjectedLayer, dim: int, ragged: bool) -> CollaborativeMultiheadAttention:
    old: GatedMultiheadAttention = layer.module
    made = CollaborativeMultiheadAttention(
        old.embed_dim,
        old.num_heads,
        dim,
        kdim=old.kdim,
        vdim=old.vdim,
        value_dim=old.value_dim,
        num_value_heads=old.num_key_heads,
        mixing_init="ones",
        ragged=ragged,
        dropout=old.dropout,
        scale=old.scale,
        output_gate=old.output_gate,
        batch_first=old.batch_first,
        device="meta",
    ).train(old.training)
    for name, value in vars(old).items():  # attributes that were set on it
        if name not in vars(made) and name not in ("head_dim", "num_key_heads", "_compiled_call_impl"):
            vars(made)[name] = value
    assert made.content_proj is not None
    for linear, like in ((made.q_proj, layer.query), (made.k_proj, layer.key), (made.content_proj, layer.key)):
        _as_empty(linear, like)
    made.mixing = _mixing(layer, dim)
    for name, part in old._modules.items():
        if name not in ("q_proj", "k_proj"):
            setattr(made, name, part)
    for name, parameter in old.named_parameters(recurse=False, remove_duplicate=False):
        setattr(made, name, parameter)
    for name, buffer in old.named_buffers(recurse=False, remove_duplicate=False):
        made.register_buffer(name, buffer, persistent=name not in old._non_persistent_buffers_set)
    return made


def _put_projections(layer: ProjectedLayer, query: SharedProjection, key: SharedProjection) -> dict[str, str]:
    """Replace the projections of query and key, a fused one by a `FusedProjection`; returns the paths of the new."""
    holder, layout = layer.holder, layer.layout
    paths = {role: existing(holder, getattr(layout, role)) for role in ("query", "key", "value")}
    _as_empty(query, layer.query)
    _as_empty(key, layer.key)
    made: dict[str, nn.Linear | SharedProjection] = {"query": query, "key": key}
    if paths["value"] in (paths["query"], paths["key"]):
        made["value"] = _linear(*layer.value.rows(), layer.value.linear)
    for path in dict.fromkeys(paths[role] for role in made):
        parts = {role: part for role, part in made.items() if paths[role] == path}
        put: nn.Module = next(iter(parts.values()))
        if len(parts) > 1:
            put = FusedProjection(parts, equal=not hasattr(layer.module, "split_size"))
            paths |= {role: f"{path}.{role}" for role in parts}
        parent, _, name = path.rpartition(".")
        put = as_initialised(put.train(layer.module.training))
        setattr(holder.get_submodule(parent), name, put)
    # The family's initialisation looks for the stock projections in the module.
    layer.module._is_hf_initialized = True
    return paths


def _as_empty(made: nn.Module, like: Projection) -> None:
    """Move a module from the meta device to the device and dtype of a projection, with empty parameters."""
    weight = like.linear.weight
    made.to_empty(device=weight.device).to(weight.dtype).requires_grad_(weight.requires_grad)


def _mixing(layer: ProjectedLayer, dim: int) -> nn.Parameter:
    weight = layer.query.linear.weight
    return nn.Parameter(weight.detach().new_empty(layer.num_heads, dim), weight.requires_grad)
